// What the machines do: GPUs and nodes over time, with the run's phases behind them, and the phases alone.

const WINDOWS = [["300", "last 5 min"], ["1800", "last 30 min"], ["0", "all"]];

// Spans of phases within a range of time: [start, end, phase]. Those of a phase that are less than a pixel apart are joined, and pixels are
// taken for larger until there are no more than `most`.
function spans(table, range, pixels, most) {
  const out = [], newest = new Map(), start = table?.get("start");
  if (!start || !start.length) return out;
  const seconds = table.get("seconds"), code = table.get("phase"), pixel = (range[1] - range[0]) / Math.max(1, pixels);
  for (let i = 0; i < start.length; i++) {
    const a = Math.max(start[i], range[0]), b = Math.min(start[i] + seconds[i], range[1]), before = newest.get(code[i]);
    if (b < range[0] || a > range[1]) continue;
    if (before && a - before[1] < pixel) before[1] = Math.max(before[1], b);
    else {
      out.push([a, b, code[i]]);
      newest.set(code[i], out[out.length - 1]);
    }
  }
  return out.length > most && pixels > 8 ? spans(table, range, pixels / 2, most) : out;
}

const phaseColor = (look, name) => look.colors[PHASE_COLOR[name] ?? 6];

class Machines {
  constructor(view, spec, at) {
    Object.assign(this, { view, spec, at, charts: new Map(), seconds: 300, gpu: "all" });
    const window = h("select", { onchange: () => ((this.seconds = Number(window.value)), this.zoom(null), this.update()) }, ...WINDOWS.map(([v, t]) => h("option", { value: v }, t)));
    this.pick = h("select", { onchange: () => ((this.gpu = this.pick.value), this.update()) });
    this.picker = h("label", {}, "GPU ", this.pick);
    this.legend = h("span", { className: "rlkit-legend" });
    this.note = h("p", { className: "rlkit-note" });
    this.now = h("div", { className: "rlkit-scroll" });
    this.grid = h("div", { className: "rlkit-grid" });
    this.node = h("div", {}, h("div", { className: "rlkit-bar" }, h("label", {}, "time ", window), this.picker, this.legend), this.note, this.now, this.grid);
  }

  nodes() {
    return Object.entries(this.view.store.tables).filter(([name]) => name.startsWith(`${this.spec.source} node `)).map(([name, table]) => [name.slice(name.indexOf("node ") + 5), table]);
  }

  update() {
    const nodes = this.nodes(), look = theme(this.node), facts = this.view.store.facts[`${this.spec.source} machines`] ?? { gpus: {}, notes: {} };
    const gpus = nodes.flatMap(([node, table]) => (facts.gpus[node] ?? []).map((name, i) => ({ node, table, i, name: nodes.length > 1 ? `${node} · ${name}` : name, key: `${node}/${i}` })));
    this.say(nodes, gpus, facts);
    this.offer(gpus);
    this.table(gpus, look);
    if (!nodes.length) return;
    const end = Math.max(...nodes.map(([, t]) => t.last("t"))), begin = Math.min(...nodes.map(([, t]) => t.get("t")?.[0] ?? end));
    const range = this.seconds ? [Math.max(begin, end - this.seconds), end] : [begin, end];
    if (range[1] <= range[0]) range[1] = range[0] + 1;
    const phases = this.view.store.tables[`${this.spec.source} phases`];
    const shapes = spans(phases, this.range ?? range, 400, 400).map(([a, b, code]) => ({
      type: "rect", xref: "x", yref: "paper", x0: new Date(a * 1000), x1: new Date(b * 1000), y0: 0, y1: 1, layer: "below", line: { width: 0 },
      fillcolor: withAlpha(phaseColor(look, phases.labels[code]), 0.16),
    }));
    const drawn = new Set(shapes.map((s) => s.fillcolor));
    put(this.legend, (phases?.labels ?? []).filter((name) => drawn.has(withAlpha(phaseColor(look, name), 0.16))).map((name) => h("span", {}, h("i", { style: `background:${phaseColor(look, name)}` }), name)));
    const common = { time: true, xrange: range, shapes, version: [...nodes.map(([, table]) => table.version), phases?.version, look.key] };
    const line = (table, key, name, c, scale = 1) => ({ name, x: table.get("t"), y: scaled(table.get(key), scale), color: look.colors[c % look.colors.length], dash: DASHES[Math.floor(c / look.colors.length) % DASHES.length] });
    const wanted = new Set(), show = (title, traces, more) => {
      wanted.add(title);
      this.chart(title).draw(traces, { ...common, ...more });
    };
    const chosen = gpus.filter((g) => this.gpu === "all" || g.key === this.gpu);
    if (gpus.length) {
      show("GPU utilisation", chosen.map((g, c) => line(g.table, `gpu${g.i}/utilization`, g.name, c)), { unit: " %", yrange: [0, 102] });
      if (chosen.length === 1) {
        const g = chosen[0];
        show("GPU memory", ["engine", "learner", "other"].map((role, c) => ({ ...line(g.table, `gpu${g.i}/${role}`, role, [0, 2, 6][c], 2 ** -30), stack: "memory" })), { unit: " GiB" });
      } else show("GPU memory", chosen.map((g, c) => line(g.table, `gpu${g.i}/memory`, g.name, c, 2 ** -30)), { unit: " GiB" });
      show("Power", chosen.map((g, c) => line(g.table, `gpu${g.i}/power`, g.name, c)), { unit: " W" });
      show("Temperature", chosen.map((g, c) => line(g.table, `gpu${g.i}/temperature`, g.name, c)), { unit: " °C" });
    }
    const label = (node, name) => (nodes.length > 1 ? node : name);
    show("CPU", nodes.map(([node, t], c) => line(t, "cpu", label(node, "CPU"), c)), { unit: " %", yrange: [0, 102] });
    show("Memory of the node", nodes.map(([node, t], c) => line(t, "memory", label(node, "memory"), c, 2 ** -30)), { unit: " GiB" });
    if (nodes.some(([, t]) => Number.isFinite(lastFinite(t.get("object_store") ?? []))))
      show("Object store", nodes.map(([node, t], c) => line(t, "object_store", label(node, "object store"), c, 2 ** -30)), { unit: " GiB" });
    for (const [title, chart] of this.charts) if (!wanted.has(title)) (chart.remove(), this.charts.delete(title));
  }

  say(nodes, gpus, facts) {
    const notes = nodes.map(([node]) => facts.notes[node] && `${nodes.length > 1 ? node + ": " : ""}${facts.notes[node]}`).filter(Boolean);
    const text = !nodes.length ? "No sample of the machines yet." : gpus.length ? "" : "No GPU: the curves are those of the CPU side.";
    this.note.textContent = [text, ...notes].filter(Boolean).join(" ");
    this.note.hidden = !this.note.textContent;
  }

  offer(gpus) {
    const known = gpus.map((g) => g.key).join("|");
    this.picker.hidden = gpus.length < 2;
    if (known === this.known) return;
    this.known = known;
    if (!gpus.some((g) => g.key === this.gpu)) this.gpu = "all";
    this.pick.replaceChildren(h("option", { value: "all" }, `all ${gpus.length}`), ...gpus.map((g) => h("option", { value: g.key, selected: g.key === this.gpu }, g.name)));
  }

  // The GPUs as they are now, memory split by the role of the process that holds it.
  table(gpus, look) {
    if (!gpus.length) return this.now.replaceChildren();
    const roles = ["engine", "learner", "other"];
    this.now.replaceChildren(h("table", { className: "rlkit-table" },
      h("thead", {}, h("tr", {}, ...["GPU", "busy", "memory (engine, learner, other), GiB", "power", "temperature"].map((t) => h("th", { scope: "col" }, t)))),
      h("tbody", {}, ...gpus.map((g) => {
        const of = (key) => g.table.last(`gpu${g.i}/${key}`), total = of("memory_total");
        const bar = h("span", { className: "rlkit-membar" }, ...roles.map((role, c) => h("i", { title: `${role} ${gib(of(role))} GiB`, style: `width:${Math.max(0, (100 * (of(role) || 0)) / total)}%;background:${look.colors[[0, 2, 6][c]]}` })));
        return h("tr", {}, h("th", { scope: "row" }, g.name), h("td", {}, `${number(of("utilization"))} %`), h("td", {}, bar, ` ${roles.map((r) => gib(of(r))).join(" + ")} of ${gib(total)}`), h("td", {}, `${number(of("power"))} W`), h("td", {}, `${number(of("temperature"))} °C`));
      }))));
  }

  chart(title) {
    let chart = this.charts.get(title);
    if (!chart) {
      chart = new Chart(title, { height: 150 });
      chart.range = this.range ?? null;
      chart.onzoom = (range) => this.zoom(range);
      this.charts.set(title, chart);
      this.grid.append(chart.node);
    }
    return chart;
  }

  zoom(range) {
    this.range = range;
    for (const chart of this.charts.values()) chart.range = range;
    this.update();
  }

  remove() {
    for (const chart of this.charts.values()) chart.remove();
  }
}

function scaled(column, factor) {
  if (!column || factor === 1) return column;
  return column.map((v) => v * factor);
}

// One lane a kind of phase.
class Timeline {
  constructor(view, spec, at) {
    Object.assign(this, { view, spec, at, seconds: 300, range: null });
    const window = h("select", { onchange: () => ((this.seconds = Number(window.value)), (this.range = null), this.update()) }, ...WINDOWS.map(([v, t]) => h("option", { value: v }, t)));
    this.plot = h("div", { className: "rlkit-lanes", role: "img", tabIndex: 0 });
    this.sums = h("span", { className: "rlkit-legend" });
    this.node = h("div", {}, h("div", { className: "rlkit-bar" }, h("label", {}, "time ", window), this.sums), this.plot);
  }

  update() {
    const table = this.view.store.tables[`${this.spec.source} phases`], look = theme(this.node);
    if (!table?.n) return this.plot.replaceChildren("No phase has ended yet.");
    const start = table.get("start"), seconds = table.get("seconds"), end = start[table.n - 1] + seconds[table.n - 1];
    const range = this.seconds ? [Math.max(start[0], end - this.seconds), end] : [start[0], end], width = range[1] - range[0] || 1;
    const by = new Map();
    for (const [a, b, code] of spans(table, range, this.plot.clientWidth || 600, 4000)) (by.get(code) ?? by.set(code, []).get(code)).push([a, b]);
    const total = new Map();
    for (let i = 0; i < table.n; i++) if (start[i] >= range[0]) total.set(table.get("phase")[i], (total.get(table.get("phase")[i]) ?? 0) + seconds[i]);
    const codes = [...by.keys()].sort((a, b) => a - b), at = (t) => (100 * (t - range[0])) / width;
    this.plot.replaceChildren(...codes.map((code) => {
      const name = table.labels[code], color = phaseColor(look, name);
      return h("div", { className: "rlkit-lane" }, h("span", {}, name), h("div", {}, ...by.get(code).map(([a, b]) => h("i", { title: `${name} ${number(b - a)} s`, style: `left:${at(a)}%;width:${Math.max(0.15, at(b) - at(a))}%;background:${color}` }))));
    }), h("div", { className: "rlkit-lane rlkit-ends" }, h("span", {}), h("div", {}, h("span", {}, clock(range[0])), h("span", {}, clock(range[1])))));
    const words = codes.map((code) => `${table.labels[code]} ${Math.round((100 * (total.get(code) ?? 0)) / width)} %`).join(", ");
    this.sums.textContent = words;
    this.plot.setAttribute("aria-label", `Phases of ${duration(width)}: ${words}`);
  }

  remove() {}
}

const clock = (t) => new Date(t * 1000).toLocaleTimeString("en-GB");
