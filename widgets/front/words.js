// Parts that are words and buttons: the run's state and controls, health, the differences of two configurations.

const SAID_MS = 10000;  // a button's answer stays so long: the state says how it went on
const CONTROL_WORDS = { run: "running", pausing: "pausing after this step", paused: "paused", stopping: "stopping after this step", stopped: "stopped" };

// The run's state in words. `state` is a RunState of rlkit.watch.
function stateWords(state, now) {
  if (!state) return "waiting for the kernel";
  const since = state.phase_since ? `, ${duration(now - state.phase_since)}` : "";
  if (!state.live) return `${state.control === "unknown" ? "read from its folder, which does not say whether it runs" : "not running"}; ${state.committed + 1} steps are complete`;
  const words = [];
  if (state.control && state.control !== "run") words.push(CONTROL_WORDS[state.control] ?? state.control);
  if (state.step !== null && state.step !== undefined) words.push(`step ${state.step}${state.total ? ` of ${state.total}` : ""}`);
  else words.push(`${state.committed + 1} steps complete`);
  if (state.phase) words.push(`${state.phase}${since}`);
  else if (state.control === "paused" && since) words.push(`since ${since.slice(2)}`);
  if (state.waiting_for) words.push(`waiting for ${state.waiting_for}`);  // with how much of it is done, and the time left
  if (!state.looping && state.looping !== undefined && state.control === "run") words.push("no loop is running");
  return words.join(" · ");
}

class Controls {
  constructor(view, spec, at) {
    Object.assign(this, { view, spec, at });
    const buttons = [["stop", "Stop after this step"], ["pause", "Pause"], ["resume", "Resume"], ["step", "Single step"], ["checkpoint", "Checkpoint now"]];
    this.buttons = Object.fromEntries(buttons.map(([verb, text]) => [verb, h("button", { type: "button", "data-verb": verb, onclick: () => this.press(verb) }, text)]));
    this.state = h("p", { className: "rlkit-state", "aria-live": "off" });
    this.reply = h("p", { className: "rlkit-note", role: "status" });
    this.reply.hidden = true;
    this.node = h("div", {}, h("div", { className: "rlkit-bar", role: "toolbar", "aria-label": "Run" }, ...Object.values(this.buttons)), this.state, this.reply);
  }

  say(text) {
    this.reply.textContent = text;
    this.reply.hidden = !text;
  }

  async press(verb) {
    const busy = "The kernel is busy with a cell that does not yield: this acts when the cell yields or ends. The kernel's interrupt is safe, and `async for step in run.steps(n)` or run.start(loop) keep the buttons free.";
    const reply = await this.view.store.ask(this.at, "control", { verb }, () => this.say(busy));
    this.say(reply.error ?? reply.said ?? "");
    clearTimeout(this.over);
    if (!reply.error) this.over = setTimeout(() => this.say(""), SAID_MS);
  }

  update() {
    const state = this.view.store.facts[`${this.spec.source} state`];
    const now = Date.now() / 1000 - this.view.store.skew;
    this.state.textContent = stateWords(state, now) + (state?.checkpoint_asked ? " · a checkpoint will be written after this step" : "");
    const looping = Boolean(state?.live && (state.looping ?? true)), paused = ["paused", "pausing"].includes(state?.control);
    const able = { stop: looping && state.control !== "stopping", pause: looping && !paused, resume: looping && state.control !== "run", step: looping, checkpoint: looping };
    for (const [verb, button] of Object.entries(this.buttons)) {
      // Not "disabled": that would take the keyboard's focus away.
      button.setAttribute("aria-disabled", String(!able[verb]));
      button.title = able[verb] ? "" : !state?.live ? "The run is not alive." : !looping ? "No loop is running." : `The run is ${CONTROL_WORDS[state.control] ?? state.control}.`;
    }
  }

  pulse() {
    this.update();
  }

  remove() {
    clearTimeout(this.over);
  }
}

class Health {
  constructor(view, spec, at) {
    Object.assign(this, { view, spec, at, open: null });
    this.chips = h("div", { className: "rlkit-chips" });
    this.about = h("div", { className: "rlkit-about", role: "region", "aria-label": "Explanation" });
    this.about.hidden = true;
    this.made = new Map(spec.gates.map((gate) => [gate.id, h("button", { type: "button", className: "rlkit-chip", "aria-expanded": "false", onclick: () => this.toggle(gate.id) })]));
    this.chips.append(...this.made.values());
    this.node = h("div", {}, this.chips, this.about);
  }

  toggle(id) {
    this.open = this.open === id ? null : id;
    this.update();
  }

  update() {
    const found = this.view.store.facts[`part ${this.at}`] ?? {}, marks = { good: "✓", warn: "!", bad: "✕", none: "·" };
    for (const gate of this.spec.gates) {
      const { level = "none", value = "no data" } = found[gate.id] ?? {}, chip = this.made.get(gate.id);
      chip.dataset.level = level;
      chip.setAttribute("aria-expanded", String(this.open === gate.id));
      chip.replaceChildren(h("b", { "aria-hidden": "true" }, marks[level]), ` ${gate.title} `, h("span", {}, value));
      chip.setAttribute("aria-label", `${gate.title}: ${value} (${{ good: "fine", warn: "look at it", bad: "bad", none: "no data" }[level]})`);
    }
    const gate = this.spec.gates.find((g) => g.id === this.open);
    this.about.hidden = !gate;
    if (gate) this.about.replaceChildren(h("b", {}, gate.title), h("p", {}, gate.why), h("p", {}, h("b", {}, "What to try: "), gate.fix));
  }

  remove() {}
}

class Differences {
  constructor(view, spec) {
    const [a, b] = spec.labels;
    const rows = spec.rows.map(([name, x, y]) => h("tr", {}, h("th", { scope: "row" }, name), h("td", {}, x), h("td", {}, y)));
    this.node = h("div", { className: "rlkit-scroll" }, rows.length
      ? h("table", { className: "rlkit-table" }, h("thead", {}, h("tr", {}, ...["setting", a, b].map((t) => h("th", { scope: "col" }, t)))), h("tbody", {}, ...rows))
      : h("p", { className: "rlkit-note" }, "Their configurations are the same."));
  }

  update() {}

  remove() {}
}
