// Metrics over steps or time: which, how smooth, on which scale.

class Curves {
  constructor(view, spec, at) {
    Object.assign(this, { view, spec, at, charts: new Map(), weight: 0, log: false, time: false, range: null });
    this.chosen = new Set(spec.panels.filter((p) => p.shown).map((p) => p.id));
    const slider = h("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: 0, oninput: () => this.set("weight", Number(slider.value)) });
    const log = h("input", { type: "checkbox", onchange: () => this.set("log", log.checked) });
    const axis = h("select", { onchange: () => this.set("time", axis.value === "time") }, h("option", { value: "step" }, "step"), h("option", { value: "time" }, "time"));
    this.boxes = h("div", { className: "rlkit-boxes" });
    this.grid = h("div", { className: "rlkit-grid" });
    this.node = h("div", {},
      h("div", { className: "rlkit-bar" },
        h("details", { className: "rlkit-choose" }, h("summary", {}, "Curves"), this.boxes),
        h("label", {}, "smooth ", slider), h("label", {}, log, " log scale"), h("label", {}, "over ", axis),
        h("button", { type: "button", onclick: () => this.zoom(null) }, "Show all")),
      this.grid);
  }

  set(key, value) {
    this[key] = value;
    if (key === "time") this.range = null;
    for (const chart of this.charts.values()) chart.range = this.range;
    this.update();
  }

  zoom(range) {
    this.range = range;
    for (const chart of this.charts.values()) {
      chart.range = range;
      chart.redraw();
    }
  }

  // The panels that the log has something for: those of the spec, and one for each metric that none of them names.
  panels() {
    const names = new Set();
    for (const source of this.spec.sources) for (const name of this.view.store.tables[source.table]?.names ?? []) names.add(name);
    for (const name of ["step", "t"]) names.delete(name);
    const used = new Set(), out = [];
    for (const panel of this.spec.panels) {
      const listed = panel.names.filter((n) => names.has(n));
      const prefixed = panel.prefix ? [...names].filter((n) => n.startsWith(panel.prefix) && !panel.except.includes(n)) : [];
      const all = [...new Set([...listed, ...prefixed])];
      all.forEach((n) => used.add(n));
      if (panel.band) used.add(panel.band);
      if (all.length || panel.shown) out.push({ ...panel, names: all });
    }
    for (const name of [...names].sort()) if (!used.has(name)) out.push({ id: name, title: name, names: [name], shown: false });
    return out;
  }

  update() {
    const panels = this.panels(), look = theme(this.node);
    const known = panels.map((p) => p.id).join("|");
    if (known !== this.known) this.offer(panels);
    this.known = known;
    for (const [id, chart] of this.charts) {
      if (this.chosen.has(id)) continue;
      chart.remove();
      this.charts.delete(id);
    }
    for (const panel of panels) if (this.chosen.has(panel.id)) this.draw(panel, look);
  }

  offer(panels) {
    this.boxes.replaceChildren(...panels.map((panel) => {
      const box = h("input", { type: "checkbox", checked: this.chosen.has(panel.id), onchange: () => {
        if (box.checked) this.chosen.add(panel.id);
        else this.chosen.delete(panel.id);
        this.update();
      } });
      return h("label", {}, box, " ", panel.title);
    }));
  }

  draw(panel, look) {
    let chart = this.charts.get(panel.id);
    if (!chart) {
      chart = new Chart(panel.title);
      chart.range = this.range;
      chart.onzoom = (range) => this.zoom(range);
      this.charts.set(panel.id, chart);
      this.grid.append(chart.node);
    }
    const traces = [], several = this.spec.sources.length > 1;
    this.spec.sources.forEach((source, s) => {
      const table = this.view.store.tables[source.table];
      if (!table) return;
      panel.names.forEach((name, i) => {
        const raw = table.get(name);
        if (!raw) return;
        // One run: a colour a metric. Several: a colour a run, a dash a metric.
        const [c, d] = several ? [s, i] : [i, i];
        const short = panel.names.length > 1 ? name.slice(name.indexOf("/") + 1) : panel.title;
        traces.push({
          name: several ? `${source.label}${panel.names.length > 1 ? " " + short : ""}` : short, raw, y: smooth(raw, this.weight), x: table.get(this.time ? "t" : "step"),
          color: look.colors[c % look.colors.length], dash: DASHES[d % DASHES.length], bad: table.bad(name),
          band: panel.band && !this.weight ? table.get(panel.band) : null,
        });
      });
    });
    const version = [...this.spec.sources.map((source) => this.view.store.tables[source.table]?.version), this.weight, look.key];
    chart.draw(traces, { log: this.log, time: this.time, version });
  }

  remove() {
    for (const chart of this.charts.values()) chart.remove();
  }
}
