// The widget: a head with the run's name and state, and its parts from top to bottom.

const KINDS = { curves: Curves, machines: Machines, phases: Timeline, controls: Controls, health: Health, rollouts: Rollouts, differences: Differences };
const FRAME_MS = 300;  // between two drawings

class View {
  constructor(model, el) {
    this.store = stores.get(model) ?? new Store(model);
    stores.set(model, this.store);
    const spec = model.get("spec");
    this.isRun = spec.run;
    this.runs = spec.names;
    this.state = h("span", { className: "rlkit-state" });
    this.badges = h("span", { className: "rlkit-badges", role: "status" });
    this.parts = spec.parts.map((part, i) => new KINDS[part.kind](this, part, i));
    const sections = this.parts.map((part, i) => {
      const { title, kind, open } = spec.parts[i];
      if (spec.parts.length === 1) return h("section", { "data-kind": kind, "aria-label": title }, part.node);
      return h("details", { "data-kind": kind, open: open !== false, ontoggle: () => this.changed(true) }, h("summary", {}, title), part.node);
    });
    this.root = h("div", { className: "rlkit-view", role: "region", "aria-label": `rlkit: ${spec.names.join(", ")}` },
      h("header", { className: "rlkit-head" }, h("b", {}, this.runs.length > 1 ? "" : spec.names[0]), this.state, this.badges), ...sections);
    el.append(this.root);
    this.notebook = el.closest(".jp-Notebook");
    this.size = new ResizeObserver(() => this.changed(true));
    this.size.observe(this.root);
    this.looks = new MutationObserver(() => this.changed(true));
    this.looks.observe(document.body, { attributes: true, attributeFilter: ["data-jp-theme-name", "data-jp-theme-light", "class"] });
    page.plotly.then(() => this.changed(true));
    this.store.attach(this);
    this.pulse();
  }

  // Draw again, at most a few times a second, and not while nobody can see it.
  changed() {
    if (this.timer || this.gone) return;
    this.timer = setTimeout(() => {
      this.timer = null;
      if (document.hidden) return document.addEventListener("visibilitychange", () => this.changed(), { once: true });
      if (!this.gone && this.root.clientWidth) this.draw();
    }, Math.max(0, FRAME_MS - (performance.now() - (this.drawn ?? -FRAME_MS))));
  }

  draw() {
    const began = performance.now();
    for (const part of this.parts) if (!part.node.closest("details:not([open])")) part.update();
    this.pulse();
    this.drawn = performance.now();
    this.root.dataset.drawMs = (this.drawn - began).toFixed(1);
    this.root.dataset.points = this.store.tables["0 steps"]?.n ?? 0;
  }

  // What goes on with the clock: elapsed times, and how old the newest word is.
  pulse() {
    const { facts, skew } = this.store, now = Date.now() / 1000, badges = [];
    const state = facts["0 state"];
    const each = this.runs.map((name, i) => (this.runs.length > 1 ? `${name}: ` : "") + stateWords(facts[`${i} state`], now - skew));
    const words = this.isRun ? each.join(" — ") : "";
    if (this.state.textContent !== words) this.state.textContent = words;
    for (const [key, value] of Object.entries(facts)) if (key.endsWith(" state") && value.stale_since) badges.push(`stale: last read ${duration(now - value.stale_since)} ago`);
    for (const [key, value] of Object.entries(facts)) if (key.endsWith(" clock") && value > 1) badges.push(`the clock went back ${duration(value)}: time is drawn as not going back`);
    for (const [key, value] of Object.entries(facts)) if (key.endsWith(" state") && value.damaged) badges.push(`${value.damaged} damaged line${value.damaged > 1 ? "s" : ""} of the log left out`);
    if (this.store.lost) badges.push(GONE);
    else if (this.store.silence()) badges.push(`no word from the kernel for ${duration(this.store.silence())}: it is gone, or busy with a cell`);
    if (!page.ready && state) badges.push("waiting for plotly.js");
    const text = badges.join(" · ");
    if (this.badges.textContent !== text) this.badges.textContent = text;
    for (const part of this.parts) part.pulse?.();
  }

  remove() {
    this.gone = true;
    clearTimeout(this.timer);
    this.size.disconnect();
    this.looks.disconnect();
    for (const part of this.parts) part.remove();
    // Taken out of a notebook that is still there, or gone with the notebook's page? Only then may it come back.
    setTimeout(() => this.store.detach(this, Boolean(this.notebook?.isConnected)));
  }
}

export default {
  render({ model, el }) {
    const view = new View(model, el);
    return () => view.remove();
  },
};
