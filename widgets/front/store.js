// What the browser has of a run: the kernel's tables, filled by packed columns and by rows.

let versions = 0;

class Table {
  constructor() {
    this.columns = {};
    this.names = [];
    this.labels = [];
    this.n = 0;
    this.version = 0;  // grows with every change
    this.counted = {};  // column -> [rows, how many of them were not finite]
  }

  room(name, n) {
    const old = this.columns[name];
    if (old && old.length >= n) return old;
    const grown = new Float64Array(Math.max(256, 2 * n)).fill(NaN);
    if (old) grown.set(old.subarray(0, this.n));
    return (this.columns[name] = grown);
  }

  get(name) {
    const column = this.columns[name];
    return column ? column.subarray(0, this.n) : null;
  }

  last(name) {
    const column = this.get(name);
    return column && this.n ? column[this.n - 1] : NaN;
  }

  // How many values of a column were not finite.
  bad(name) {
    const [rows, before] = this.counted[name] ?? [0, 0], column = this.columns[name];
    let bad = before;
    for (let i = rows; i < this.n; i++) if (column[i] === Infinity) bad++;
    this.counted[name] = [this.n, bad];
    return bad;
  }

  // Rows of float64 from row `from` on; everything behind is replaced.
  append(about, view) {
    if (about.from < this.n) this.counted = {};
    if (about.columns) this.names = about.columns;
    if (about.labels) this.labels = about.labels;
    const rows = about.n - about.from, width = this.names.length;
    const bytes = view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength);
    const values = new Float64Array(bytes);
    this.names.forEach((name, c) => {
      const column = this.room(name, about.n);
      for (let r = 0; r < rows; r++) column[about.from + r] = values[r * width + c];
      column.fill(NaN, about.n, Math.max(this.n, about.n));
    });
    this.n = about.n;
    this.version = ++versions;
  }

  async fill(about, views) {
    this.names = about.columns;
    this.labels = about.labels;
    this.n = about.n;
    for (let c = 0; c < this.names.length; c++) {
      const planes = await inflate(views[c]), n = about.n, width = about.exact[c] ? 8 : 4;
      const bytes = new Uint8Array(n * width), shift = about.exact[c] ? 0 : 1;  // the lowest byte of a float32 stayed behind
      for (let k = 0; k + shift < width; k++) for (let i = 0; i < n; i++) bytes[i * width + k + shift] = planes[k * n + i];
      const values = about.exact[c] ? new Float64Array(bytes.buffer) : new Float32Array(bytes.buffer);
      this.room(this.names[c], n).set(values);
    }
    this.version = ++versions;
  }
}

const GONE = "The kernel of this view is gone, or was restarted: run its cell again.";

// One a model: the views of a widget on a page share it.
class Store {
  constructor(model) {
    this.model = model;
    this.views = new Set();
    this.pending = new Map();
    this.asks = 0;
    this.clear();
    this.queue = Promise.resolve();
    this.heard = Date.now();
    model.on("msg:custom", (content, buffers) => {
      this.heard = Date.now();
      // Unpacking waits, and rows must come in order.
      this.queue = this.queue.then(() => this.take(content, buffers ?? []).catch((error) => console.error("rlkit", error)));
    });
    this.beat = setInterval(() => this.alive(), 5000);
  }

  clear() {
    this.tables = {};
    this.facts = {};
    this.generation = null;
    this.skew = 0;
  }

  // A comm ends with its kernel, when that is restarted; from then on it throws, and the view keeps what it has.
  say(kind, more = {}) {
    if (this.lost) return;
    try {
      this.model.send({ kind, page: page.id, ...more });
    } catch (error) {
      this.lost = String(error);
      for (const reply of this.pending.values()) reply({ error: GONE });
      this.pending.clear();
    }
  }

  // Ask for everything. JupyterLab sends the first message of a comm to the thread that runs cells; said again it goes to one that is free.
  // The kernel answers one of those that have the same `nonce`.
  hello() {
    this.said = Date.now();
    this.waiting = { library: lacksLibrary(), nonce: Math.random() };
    this.repeat(this.waiting, 0);
  }

  repeat(hello, times) {
    if (this.waiting !== hello || !this.views.size) return;
    this.say("hello", hello);
    if (times < 4) setTimeout(() => this.repeat(hello, times + 1), 700 * 2 ** times);
  }

  alive() {
    if (!page.ready && Date.now() - page.asked > 15000 && !document.hidden) this.hello();
    else if (Date.now() - (this.said ?? 0) > 14000) {
      this.said = Date.now();
      this.say("alive");
    }
    for (const view of this.views) view.pulse();
  }

  // Seconds since the kernel was last heard, when it was asked since.
  silence() {
    const silent = (Date.now() - this.heard) / 1000;
    return silent > 25 ? silent : 0;
  }

  // The kernel answers {ok...} or {error}; `slow` is called when it has not after a moment.
  ask(part, what, more = {}, slow = null) {
    const id = ++this.asks;
    this.say("ask", { id, part, what, ...more });
    if (this.lost) return Promise.resolve({ error: GONE });
    const timer = slow && setTimeout(slow, 800);
    return new Promise((resolve) => this.pending.set(id, (reply) => (clearTimeout(timer), resolve(reply))));
  }

  async take(content, buffers) {
    const { kind } = content;
    if (kind === "library") await takeLibrary(buffers[0]);
    else if (kind === "picture") writeBack(this.model, content);
    else if (kind === "reply") {
      this.pending.get(content.id)?.(content);
      this.pending.delete(content.id);
    } else if (kind === "start") {
      this.waiting = null;
      this.clear();
      this.generation = content.generation;
      let at = 0;
      for (const [name, about] of Object.entries(content.tables)) {
        const table = (this.tables[name] = new Table());
        await table.fill(about, buffers.slice(at, (at += about.columns.length)));
      }
      this.news(content.facts, true);
    } else if (kind === "tick" && this.generation !== null) {
      if (content.generation !== this.generation) return this.hello();
      let at = 0;
      for (const [name, about] of Object.entries(content.tables)) {
        const table = (this.tables[name] ??= new Table());
        if (about.from > table.n) return this.hello();  // a message was lost
        table.append(about, buffers[at++]);
      }
      this.news(content.facts, Object.keys(content.tables).length > 0);
    }
  }

  news(facts, data) {
    Object.assign(this.facts, facts);
    for (const key of Object.keys(facts)) if (key.endsWith(" state") && facts[key].now) this.skew = Date.now() / 1000 - facts[key].now;
    for (const view of this.views) view.changed(data);
  }

  attach(view) {
    this.views.add(view);
    if (this.generation === null) this.hello();
    else {
      this.said = 0;
      this.alive();
    }
  }

  detach(view, removed) {
    this.views.delete(view);
    if (this.views.size) return;
    this.say("bye", { removed });
    clearInterval(this.beat);
    stores.delete(this.model);
  }
}

// Put the static picture into the notebook's output that has its mark. JupyterLab's widget manager knows the notebook; others may not.
function writeBack(model, { mark, data }) {
  const cells = model.widget_manager?.context?.model?.cells;
  for (let c = 0; c < (cells?.length ?? 0); c++) {
    const outputs = cells.get(c).outputs;
    for (let i = 0; i < (outputs?.length ?? 0); i++)
      if (String(outputs.get(i).data["text/html"] ?? "").includes(mark)) outputs.set(i, { output_type: "display_data", data, metadata: {} });
  }
}

const stores = new Map();
