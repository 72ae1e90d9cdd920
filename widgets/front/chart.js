// A figure drawn by plotly.js, with no more points than it has pixels.

// Indices of the points to draw between two indices: of each pixel's points the lowest and the highest, in order. -1 is a gap.
function decimate(y, from, to, pixels) {
  const count = to - from, out = [];
  const step = Math.max(1, count / Math.max(1, pixels));
  if (step < 3) {
    for (let i = from; i < to; i++) out.push(Number.isFinite(y[i]) ? i : -1);
    return out;
  }
  for (let start = from; start < to; start += step) {
    let low = -1, high = -1, gap = false;
    const end = Math.min(to, start + step);
    for (let i = Math.ceil(start); i < end; i++) {
      if (!Number.isFinite(y[i])) gap = true;
      else {
        if (low < 0 || y[i] < y[low]) low = i;
        if (high < 0 || y[i] > y[high]) high = i;
      }
    }
    if (gap) out.push(-1);
    if (low >= 0) out.push(Math.min(low, high));
    if (low >= 0 && high !== low) out.push(Math.max(low, high));
  }
  return out;
}

// The first index whose value is at least x; values do not fall.
function lowerBound(values, x) {
  let a = 0, b = values.length;
  while (a < b) {
    const m = (a + b) >> 1;
    if (values[m] < x) a = m + 1;
    else b = m;
  }
  return a;
}

// Exponential moving average without the bias of its start; gaps stay gaps.
function smooth(y, weight) {
  if (!weight) return y;
  const out = new Float64Array(y.length);
  let sum = 0, norm = 0;
  for (let i = 0; i < y.length; i++) {
    if (!Number.isFinite(y[i])) out[i] = y[i];
    else {
      sum = weight * sum + (1 - weight) * y[i];
      norm = weight * norm + (1 - weight);
      out[i] = sum / norm;
    }
  }
  return out;
}

// Charts are drawn one a frame, so that the page stays quick under many, and only those in sight.
const drawQueue = new Set();

function drawSoon(chart) {
  if (!drawQueue.size) requestAnimationFrame(drawNext);
  drawQueue.add(chart);
}

function drawNext() {
  const [chart] = drawQueue;
  drawQueue.delete(chart);
  if (drawQueue.size) requestAnimationFrame(drawNext);
  chart?.now();
}

class Chart {
  constructor(title, { height = 190 } = {}) {
    this.title = title;
    this.range = null;  // of x, when the reader has zoomed
    this.plot = h("div", { className: "rlkit-plot", tabIndex: 0, role: "img", style: `height:${height}px`, onkeydown: (e) => this.key(e) });
    this.head = h("div", { className: "rlkit-chart-head" });
    this.node = h("figure", { className: "rlkit-chart" }, this.head, this.plot);
    this.drawing = this.inSight = false;
    this.due = null;
    this.sight = new IntersectionObserver((seen) => {
      this.inSight = seen[seen.length - 1].isIntersecting;
      if (this.inSight && this.due) drawSoon(this);
    }, { rootMargin: "200px" });
    this.sight.observe(this.plot);
  }

  // traces: [{name, x, y, color, dash, band, fill, stack}], x and y as long as each other. `version` tells data that differ apart: what is
  // drawn already is not drawn again, since a browser beside the run takes its cores.
  draw(traces, options = {}) {
    this.last = [traces, options];
    const { plot } = this, key = JSON.stringify([{ ...options, shapes: null }, this.range, plot.clientWidth, plot.clientHeight, traces.map((t) => [t.name, t.color, t.dash, Boolean(t.band)])]);
    if (options.version !== undefined && key === this.drawn) return void (this.due = null);
    const shown = traces.filter((t) => t.y && t.y.length);
    this.describe(shown, options);
    this.due = [shown, options, key];
    if (this.inSight) drawSoon(this);
  }

  // One frame's work: the newest that is to be drawn.
  now() {
    if (!this.due || this.drawing || !page.ready || !this.plot.isConnected || !this.plot.clientWidth) return;
    const [shown, options, key] = this.due;
    this.due = null;
    this.drawing = true;
    page.plotly.then((Plotly) => this.react(Plotly, shown, options)).then(() => (this.drawn = key)).finally(() => {
      this.drawing = false;
      if (this.due && this.inSight) drawSoon(this);
    });
  }

  redraw() {
    if (this.last) this.draw(...this.last);
  }

  describe(traces, { unit = "" } = {}) {
    const parts = traces.map((t) => [t, lastFinite(t.raw ?? t.y)]);
    const bad = traces.reduce((sum, t) => sum + (t.bad ?? 0), 0);
    put(this.head,
      h("span", { className: "rlkit-chart-title" }, this.title),
      ...parts.map(([t, v]) => h("span", { className: "rlkit-value", style: `color:${t.color}`, title: t.name }, `${parts.length > 1 ? t.name + " " : ""}${number(v)}${unit}`)),
      parts.length ? null : h("span", { className: "rlkit-note" }, "nothing logged yet"),
      ...(bad ? [h("span", { className: "rlkit-flag", title: "NaN or infinite values; they are gaps in the curve" }, `⚠ ${bad} not finite`)] : []),
    );
    const words = parts.map(([t, v]) => `${t.name} ${number(v)}${unit}`).join(", ");
    this.plot.setAttribute("aria-label", `${this.title}: ${words || "nothing logged yet"}. Arrow keys move, plus and minus zoom, Home shows all.`);
  }

  async react(Plotly, traces, { log = false, time = false, unit = "", shapes = [], yrange = null, xrange = null, xtitle = "" } = {}) {
    const look = theme(this.plot), width = this.plot.clientWidth, data = [];
    const range = this.range ?? xrange;
    for (const t of traces) {
      let from = 0, to = t.x.length;
      if (range) {
        from = Math.max(0, lowerBound(t.x, range[0]) - 1);
        to = Math.min(to, lowerBound(t.x, range[1]) + 1);
      }
      const at = decimate(t.y, from, to, width);
      const x = at.map((i) => (i < 0 ? null : time ? new Date(t.x[i] * 1000) : t.x[i])), pick = (y) => at.map((i) => (i < 0 ? null : y[i]));
      if (t.band) data.push({ type: "scatter", mode: "lines", line: { width: 0 }, hoverinfo: "skip", fill: "toself", fillcolor: withAlpha(t.color, 0.18), ...outline(t, at, x) });
      const one = at.filter((i) => i >= 0).length < 2;
      data.push({
        type: "scatter", x, y: pick(t.y), name: t.name, mode: one ? "markers" : "lines", connectgaps: false,
        line: { color: t.color, width: 1.6, dash: t.dash ?? "solid" }, marker: { color: t.color },
        hovertemplate: `%{y:.4g}${unit}<extra>${t.name}</extra>`,
        ...(t.stack ? { stackgroup: t.stack, fillcolor: withAlpha(t.color, 0.5) } : {}),
      });
      const flagged = t.bad ? badPoints(t, from, to) : [];
      if (flagged.length)
        data.push({
          type: "scatter", mode: "markers", x: flagged.map((v) => (time ? new Date(v * 1000) : v)), y: flagged.map(() => 0.02), yaxis: "y2",
          marker: { symbol: "x", size: 7, color: look.dark ? "#ff8a80" : "#b00020" }, hovertemplate: `${t.name} was not finite<extra></extra>`,
        });
    }
    const axis = { gridcolor: look.line, linecolor: look.line, zerolinecolor: look.line, tickfont: { size: 10 }, automargin: false };
    // Both sizes are told: with "autosize" a plot keeps its first width when the page gets narrower.
    await Plotly.react(this.plot, data, {
      width, height: this.plot.clientHeight, margin: { l: 44, r: 8, t: 4, b: xtitle || time ? 34 : 22 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false, hovermode: "x unified",
      font: { color: look.ink, family: look.font, size: 11 }, hoverlabel: { bgcolor: look.ground, font: { color: look.ink } }, uirevision: 1,
      xaxis: { ...axis, type: time ? "date" : "linear", nticks: Math.max(2, Math.floor(width / (time ? 90 : 45))), ...(time ? { tickformat: "%H:%M:%S" } : {}), ...(range ? { range: time ? range.map((v) => new Date(v * 1000)) : range } : { autorange: true }), title: xtitle ? { text: xtitle, font: { size: 10 }, standoff: 4 } : undefined },
      yaxis: { ...axis, type: log ? "log" : "linear", ...(yrange ? { range: yrange } : { autorange: true }), exponentformat: "power", nticks: 6 },
      yaxis2: { overlaying: "y", range: [0, 1], visible: false, fixedrange: true }, shapes,
    }, { displayModeBar: false, responsive: false, doubleClick: false });
    if (!this.listening) {
      this.listening = true;
      this.plot.on("plotly_relayout", (e) => this.zoomed(e));
      this.plot.on("plotly_doubleclick", () => this.zoom(null));
    }
    this.Plotly = Plotly;
  }

  zoomed(event) {
    const a = event["xaxis.range[0]"] ?? event["xaxis.range"]?.[0], b = event["xaxis.range[1]"] ?? event["xaxis.range"]?.[1];
    if (a === undefined || b === undefined) return;
    const value = (v) => (this.last[1].time ? new Date(v).getTime() / 1000 : Number(v));
    this.zoom([value(a), value(b)]);
  }

  zoom(range) {
    this.range = range;
    this.redraw();
    this.onzoom?.(range);
  }

  // Keys: left and right move, + and - zoom, Home shows all.
  key(event) {
    const xs = (this.last?.[0] ?? []).map((t) => t.x).filter((x) => x && x.length);
    if (!xs.length) return;
    const whole = [Math.min(...xs.map((x) => x[0])), Math.max(...xs.map((x) => x[x.length - 1]))];
    const [a, b] = this.range ?? whole, width = b - a, middle = (a + b) / 2;
    const moves = {
      ArrowLeft: [a - width / 5, b - width / 5], ArrowRight: [a + width / 5, b + width / 5],
      "+": [middle - width / 4, middle + width / 4], "=": [middle - width / 4, middle + width / 4], "-": [middle - width, middle + width], Home: null,
    };
    if (!(event.key in moves)) return;
    event.preventDefault();
    event.stopPropagation();
    this.zoom(moves[event.key]);
  }

  remove() {
    this.sight.disconnect();
    if (this.Plotly) this.Plotly.purge(this.plot);
    this.node.remove();
  }
}

// The outline of a band, one closed piece for each stretch without a gap.
function outline(t, at, xs) {
  const x = [], y = [];
  let piece = [];
  const close = () => {
    if (x.length && piece.length) x.push(null), y.push(null);
    for (const k of piece) x.push(xs[k]), y.push(t.y[at[k]] + t.band[at[k]]);
    for (const k of piece.reverse()) x.push(xs[k]), y.push(t.y[at[k]] - t.band[at[k]]);
    piece = [];
  };
  at.forEach((i, k) => (i >= 0 && Number.isFinite(t.band[i]) ? piece.push(k) : close()));
  close();
  return { x, y };
}

function lastFinite(y) {
  for (let i = y.length - 1; i >= 0; i--) if (Number.isFinite(y[i])) return y[i];
  return NaN;
}

function badPoints(t, from, to) {
  const out = [];
  for (let i = from; i < to && out.length < 300; i++) if ((t.raw ?? t.y)[i] === Infinity) out.push(t.x[i]);
  return out;
}
