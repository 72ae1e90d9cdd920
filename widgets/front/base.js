// Small things that every part uses: elements, colours, numbers, plotly.js once a page.

// Okabe and Ito's colours, told apart by colour-blind readers; on dark ground the lighter ones come first.
const COLORS = {
  light: ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#666666"],
  dark: ["#56B4E9", "#E69F00", "#2FC79A", "#CC79A7", "#F0E442", "#D55E00", "#BBBBBB"],
};
const DASHES = ["solid", "dash", "dot", "dashdot", "longdash"];
const PHASE_COLOR = { rollout: 0, reward: 4, update: 2, sync: 3, reference: 5, checkpoint: 1, other: 6 };

function h(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(props)) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key in node && key !== "list" && key !== "form") node[key] = value;
    else node.setAttribute(key, value);
  }
  node.append(...children.flat().filter((c) => c !== null && c !== undefined));
  return node;
}

const put = (node, ...children) => node.replaceChildren(...children.flat().filter((c) => c !== null && c !== undefined));

function number(v) {
  if (v === null || v === undefined || Number.isNaN(v)) return "–";
  if (!Number.isFinite(v)) return "not finite";
  const a = Math.abs(v);
  if (a === 0) return "0";
  if (a >= 1e6) return v.toExponential(2);
  if (a >= 999.5) return Math.round(v).toLocaleString("en-US");
  return a >= 1e-3 ? String(Number(v.toPrecision(3))) : v.toExponential(2);
}

function duration(seconds) {
  const s = Math.max(0, Math.round(seconds));
  if (s < 90) return `${s} s`;
  if (s < 5400) return `${Math.floor(s / 60)} min ${s % 60} s`;
  return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
}

const gib = (bytes) => (Number.isFinite(bytes) ? (bytes / 2 ** 30).toFixed(1) : "–");

// The theme of what the element lies on: JupyterLab's variables where there are any, else the page's own colours.
function theme(el) {
  const style = getComputedStyle(el);
  const of = (name, other) => style.getPropertyValue(name).trim() || other;
  const ink = of("--jp-ui-font-color1", style.color || "#222");
  const ground = of("--jp-layout-color0", "");
  const dark = ground ? luminance(ground) < 0.4 : luminance(ink) > 0.6;
  return {
    dark, ink, ground: ground || (dark ? "#111" : "#fff"),
    faint: of("--jp-ui-font-color2", dark ? "#aaa" : "#666"),
    line: of("--jp-border-color2", dark ? "#444" : "#ddd"),
    font: of("--jp-ui-font-family", "system-ui, sans-serif"),
    colors: dark ? COLORS.dark : COLORS.light,
    key: [ink, ground, dark].join(),
  };
}

function luminance(color) {
  const canvas = (luminance.canvas ??= Object.assign(document.createElement("canvas"), { width: 1, height: 1 }).getContext("2d", { willReadFrequently: true }));
  canvas.clearRect(0, 0, 1, 1);
  canvas.fillStyle = color;
  canvas.fillRect(0, 0, 1, 1);
  const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
  return a === 0 ? 1 : (0.2126 * r + 0.7152 * g + 0.0722 * b) / 255;
}

const withAlpha = (hex, alpha) => hex + Math.round(alpha * 255).toString(16).padStart(2, "0");

async function inflate(view) {
  const stream = new Blob([view]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

// plotly.js is one for the page, whatever the number of views; it comes over the comm of the first.
const page = (window.__rlkit ??= (() => {
  const one = { id: Math.random().toString(36).slice(2), asked: 0 };
  one.plotly = new Promise((resolve) => (one.loaded = resolve));
  return one;
})());

// Whether a view should ask for it: nobody has yet, or whom was asked did not answer.
function lacksLibrary() {
  if (page.ready || Date.now() - page.asked < 15000) return false;
  page.asked = Date.now();
  return true;
}

async function takeLibrary(buffer) {
  if (page.ready) return;
  page.ready = true;
  const text = new TextDecoder().decode(await inflate(buffer));
  // Neither a page's AMD loader nor CommonJS may take it: it is called as a plain function.
  const module = { exports: {} };
  new Function("module", "exports", "define", text).call(window, module, module.exports, undefined);
  page.loaded(module.exports.newPlot ? module.exports : window.Plotly);
}
