// The completions behind the curves: a step, a prompt of it, its group; and one prompt through the steps.

const LEAST = 5;  // tokens that the sampler expected least are named
const FOLLOW_MS = 5000;  // a new step is fetched at most so often
const FILTERS = [["all", "all groups"], ["wrong", "with a wrong answer"], ["unparsed", "with an unparsed answer"], ["truncated", "with a truncated answer"], ["no_spread", "without spread"]];

class Rollouts {
  constructor(view, spec, at) {
    Object.assign(this, { view, spec, at, step: null, follow: true, loading: null, prompt: null, groups: [] });
    this.input = h("input", { type: "number", min: 0, "aria-label": "Step", onchange: () => this.changed(), onkeydown: (e) => this.enter(e) });
    const move = (d) => () => this.go((this.step ?? 0) + d);
    this.filter = h("select", { onchange: () => this.list() }, ...FILTERS.map(([v, t]) => h("option", { value: v }, t)));
    const newest = h("button", { type: "button", onclick: () => this.newest() }, "Newest");
    this.said = h("p", { className: "rlkit-note", role: "status" });
    this.groupsNode = h("div", { className: "rlkit-groups", role: "listbox", "aria-label": "Prompts of the step", tabIndex: 0, onkeydown: (e) => this.key(e) });
    this.detail = h("div", { className: "rlkit-detail" });
    this.node = h("div", {},
      h("div", { className: "rlkit-bar" },
        h("button", { type: "button", "aria-label": "Step before", onclick: move(-1) }, "◀"), h("label", {}, "step ", this.input),
        h("button", { type: "button", "aria-label": "Step after", onclick: move(1) }, "▶"), newest, h("label", {}, "show ", this.filter)),
      this.said, h("div", { className: "rlkit-split" }, this.groupsNode, this.detail));
  }

  last() {
    const steps = this.view.store.tables[`${this.spec.source} steps`]?.get("step");
    return steps?.length ? steps[steps.length - 1] : null;
  }

  update() {
    const last = this.last();
    if (last === null) return this.say("No step is complete yet.");
    this.input.max = last;
    // The list does not change under the reader's hand, nor while a group is read.
    const read = this.prompt || this.groupsNode.matches(":hover, :focus-within") || this.input === document.activeElement;
    const soon = Date.now() - (this.asked ?? 0) < FOLLOW_MS;
    if (this.step === null || (this.follow && this.step !== last && !read && this.loading === null && !soon)) this.go(last, true);
  }

  // Follow the run again.
  newest() {
    this.prompt = null;
    this.detail.replaceChildren();
    this.go(this.last(), true);
  }

  pulse() {
    if (this.follow && this.node.isConnected && !this.node.closest("details:not([open])")) this.update();
  }

  say(text) {
    this.said.textContent = text;
    this.said.hidden = !text;
  }

  async go(step, follow = false) {
    const last = this.last();
    if (last === null || !Number.isFinite(step)) return;
    this.step = Math.max(0, Math.min(last, step));
    this.follow = follow;
    this.input.value = this.step;
    const asked = (this.loading = this.step);
    this.asked = Date.now();
    const reply = await this.view.store.ask(this.at, "step", { step: this.step }, () => this.say("Waiting for the kernel, which is busy with a cell…"));
    if (asked !== this.loading) return;
    this.loading = null;
    this.groups = reply.groups ?? [];
    this.listed = asked;  // the step that the groups are of
    this.say(reply.error ?? "");
    if (this.prompt && !this.groups.some((g) => g.prompt === this.prompt)) {
      this.prompt = null;
      this.detail.replaceChildren();
    }
    this.list();
    if (this.prompt) this.open(this.prompt);
  }

  list() {
    const keep = this.filter.value, shown = this.groups.filter((g) => keep === "all" || g[keep]);
    this.shown = shown;
    const drawn = JSON.stringify([shown, this.groups.length]);
    if (drawn === this.drawn) return this.mark();  // new nodes under a finger that is down would take its click away
    this.drawn = drawn;
    this.groupsNode.replaceChildren(...shown.map((g) => h("button", {
      type: "button", role: "option", tabIndex: -1, className: "rlkit-group", "aria-selected": String(g.prompt === this.prompt), onclick: () => this.open(g.prompt),
    }, h("span", { className: "rlkit-q" }, g.question), h("span", { className: "rlkit-marks" },
      `reward ${number(g.reward)}`, g.wrong ? ` · ${g.wrong} wrong` : "", g.unparsed ? ` · ${g.unparsed} unparsed` : "", g.truncated ? ` · ${g.truncated} truncated` : "", g.no_spread ? " · no spread" : ""))));
    if (this.groups.length && !shown.length) this.groupsNode.replaceChildren(h("p", { className: "rlkit-note" }, "No group of this step is so."));
  }

  // Which of the groups is open.
  mark() {
    for (const [i, node] of [...this.groupsNode.children].entries()) node.setAttribute("aria-selected", String(this.shown[i]?.prompt === this.prompt));
  }

  // The field of the step was left, perhaps after Enter.
  changed() {
    if (Number(this.input.value) !== this.step) this.go(Number(this.input.value));
  }

  // Enter in the field of the step: JupyterLab would take it for the cell.
  enter(event) {
    if (event.key !== "Enter") return;
    event.preventDefault();
    event.stopPropagation();
    this.go(Number(this.input.value));
  }

  key(event) {
    const at = this.shown?.findIndex((g) => g.prompt === this.prompt) ?? -1;
    const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: (this.shown?.length ?? 0) - 1 }[event.key];
    if (to === undefined || !this.shown?.[to]) return;
    event.preventDefault();
    event.stopPropagation();
    this.open(this.shown[to].prompt);
  }

  async open(prompt) {
    Object.assign(this, { prompt, step: this.listed, loading: null, follow: false });
    this.input.value = this.step;
    this.mark();
    const reply = await this.view.store.ask(this.at, "group", { step: this.listed, prompt }, () => this.say("Waiting for the kernel, which is busy with a cell…"));
    if (prompt !== this.prompt) return;
    this.say("");
    if (reply.error) return this.detail.replaceChildren(h("p", { className: "rlkit-note" }, reply.error));
    const across = h("div", {}), more = h("button", { type: "button", onclick: () => this.across(prompt, across, more) }, "This prompt in other steps");
    this.detail.replaceChildren(
      h("p", { className: "rlkit-question" }, reply.question), h("p", {}, "answer ", h("b", {}, reply.answer ?? "–"), " ", more),
      across, ...reply.samples.map((s) => this.sample(s)));
  }

  sample(s) {
    const facts = [`reward ${number(s.reward)}`, ...Object.entries(s.parts).map(([k, v]) => `${k} ${number(v)}`), s.advantage === null ? null : `advantage ${number(s.advantage)}`, `${s.n_tokens} tokens`, s.finish_reason === "length" ? "truncated" : s.finish_reason, s.extracted ? `read as ${s.extracted}` : null];
    const inside = h("div", {}), tokens = h("details", { ontoggle: () => tokens.open && !inside.firstChild && this.tokens(s, inside) }, h("summary", {}, "tokens and log-probs"), inside);
    return h("article", { className: "rlkit-sample", "data-verdict": s.verdict ?? "none" },
      h("header", {}, h("b", {}, s.verdict ?? "not graded"), " ", facts.filter(Boolean).join(" · ")), h("pre", { tabIndex: 0 }, s.response || "(empty)"), tokens);
  }

  // Underlined the thicker, the less the sampler expected the token. A token that is only a part of a character is shown by its id.
  async tokens(s, into) {
    into.append(h("p", { className: "rlkit-note" }, "Waiting for the kernel…"));
    const reply = await this.view.store.ask(this.at, "tokens", { step: s.step, row: s.row });
    if (reply.error) return into.replaceChildren(h("p", { className: "rlkit-note" }, reply.error));
    const { tokens, logprobs, texts } = reply, shown = (i) => texts[i] ?? `‹${tokens[i]}›`;
    const least = tokens.map((_, i) => i).filter((i) => logprobs[i] !== null).sort((a, b) => logprobs[a] - logprobs[b]).slice(0, LEAST);
    const words = least.map((i) => `${JSON.stringify(shown(i))} (token ${i + 1}) ${number(logprobs[i])}`).join(", ");
    into.replaceChildren(
      h("p", { className: "rlkit-tokens" }, ...tokens.map((id, i) => h("span", { title: `token ${i + 1}, id ${id}, log-prob ${number(logprobs[i])}`, style: `border-bottom-width:${Math.min(6, 1 + Math.abs(logprobs[i] ?? 0)).toFixed(1)}px` }, shown(i)))),
      h("p", { className: "rlkit-note" }, words ? `Least expected, by log-prob: ${words}. ` : "", reply.said));
  }

  async across(prompt, into, button) {
    button.textContent = "Looking…";
    const reply = await this.view.store.ask(this.at, "across", { prompt });
    button.textContent = "This prompt in other steps";
    if (reply.error) return into.replaceChildren(h("p", { className: "rlkit-note" }, reply.error));
    into.replaceChildren(h("p", { className: "rlkit-note" }, reply.said), h("div", { className: "rlkit-across" }, ...reply.steps.map((step) => h("section", {}, h("h4", {}, `step ${step.step} · reward ${number(step.reward)}`), ...step.samples.map((s) => this.sample(s))))));
  }

  remove() {}
}
