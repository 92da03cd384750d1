// Timelines and small helpers: of the replay page, which includes this file, and of the dashboard, which loads it.
"use strict";
const COLORS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a6d3b", "#7570b3"];
const NS = "http://www.w3.org/2000/svg";
let allJobs = [];   // set by a page where all timelines show the same jobs
const colorIn = (jobs, job) => COLORS[Math.max(0, jobs.indexOf(job)) % COLORS.length];
const color = job => colorIn(allJobs, job);
const pct = x => (100 * x).toFixed(1) + " %";
const secs = x => x >= 100 ? x.toFixed(0) + " s" : x >= 1 ? x.toFixed(2) + " s" : (1000 * x).toFixed(1) + " ms";
const size = b => b >= 2 ** 30 ? (b / 2 ** 30).toFixed(2) + " GiB" : b >= 2 ** 20 ? (b / 2 ** 20).toFixed(1) + " MiB" : b >= 1024 ? (b / 1024).toFixed(0) + " KiB" : b + " B";
const median = xs => { const s = [...xs].sort((a, b) => a - b); return s.length ? s[Math.floor((s.length - 1) / 2)] : 0; };
function el(name, attrs, parent, text) {
  const e = document.createElementNS(NS, name);
  for (const k in attrs) e.setAttribute(k, attrs[k]);
  if (text !== undefined) e.textContent = text;
  if (parent) parent.appendChild(e);
  return e;
}
function html(name, attrs, parent, text) {
  const e = document.createElement(name);
  for (const k in attrs) e.setAttribute(k, attrs[k]);
  if (text !== undefined) e.textContent = text;
  if (parent) parent.appendChild(e);
  return e;
}
// ── tooltip ──
const tip = document.getElementById("tip");
function hover(node, lines) {
  node.addEventListener("mousemove", ev => {
    const said = lines(ev);
    if (!said.length) { tip.style.opacity = 0; return; }
    tip.replaceChildren(...said.map((t, i) => html(i ? "div" : "b", {}, null, t)));
    tip.style.opacity = 1;
    const w = tip.offsetWidth, h = tip.offsetHeight;
    tip.style.left = Math.min(ev.clientX + 14, innerWidth - w - 8) + "px";
    tip.style.top = Math.min(ev.clientY + 14, innerHeight - h - 8) + "px";
  });
  node.addEventListener("mouseleave", () => { tip.style.opacity = 0; });
}
// ── timelines ──
const LEFT = 108, RIGHT = 12, LANE = 30, GAP = 7;
const views = [];
function niceStep(span, target) {
  const raw = span / target, p = 10 ** Math.floor(Math.log10(raw));
  return p * [1, 2, 5, 10].find(m => m * p >= raw);
}
function patterns(svg, jobs) {
  const defs = el("defs", {}, svg);
  jobs.forEach((job, n) => {
    const p = el("pattern", { id: svg.id + "-w" + n, width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" }, defs);
    el("rect", { width: 6, height: 6, fill: colorIn(jobs, job), opacity: .13 }, p);
    el("rect", { width: 2, height: 6, fill: colorIn(jobs, job), opacity: .55 }, p);
  });
}
function words(i, when) {
  const head = { held: i.job + " on the accelerator", waiting: i.job + " waits for its turn", frozen: i.job + " frozen in a phase", off: i.job + " off the accelerator", swapping: "swap to " + i.job }[i.kind] || i.kind;
  const out = [head + (i.phase && i.kind !== "swapping" ? " · " + i.phase : "")];
  out.push(when(i) + (i.epoch ? `, epoch ${i.epoch}` : ""));
  if (i.bytes) out.push(size(i.bytes) + " moved");
  if (i.text) out.push(i.text);
  return out;
}
class Timeline {
  // lanes: [{name, kind, items: [Interval], marks: [{at, code, text}]}]. options: jobs (colours; default: the
  // page's), strip (one thin lane without axis, drawn with few elements), live (the axis counts back from now)
  constructor(parent, id, lanes, begin, end, options = {}) {
    this.lanes = lanes; this.full = [begin, end]; this.window = [begin, end];
    this.jobs = options.jobs; this.strip = options.strip || 0; this.live = options.live || false;
    this.left = this.strip ? 0 : LEFT; this.right = this.strip ? 0 : RIGHT;
    this.svg = el("svg", { id }, parent);
    if (this.strip) {
      this.svg.setAttribute("height", this.strip); this.svg.setAttribute("aria-hidden", "true");
      hover(this.svg, ev => { const found = this.found(this.at(ev)); return found ? words(found, i => this.when(i)) : []; });
      return;
    }
    const names = { tabindex: 0, role: "img", "aria-label": "timeline; arrow keys pan, plus and minus zoom" };
    for (const k in names) this.svg.setAttribute(k, names[k]);
    this.resize(); this.listen();
    views.push(this);
  }
  resize() { this.svg.setAttribute("height", this.lanes.reduce((h, l) => h + (l.height || LANE) + GAP, 26)); }
  listen() {
    this.svg.addEventListener("wheel", ev => { if (!ev.ctrlKey && !ev.shiftKey) return; ev.preventDefault(); this.zoom(ev.deltaY > 0 ? 1.25 : .8, this.at(ev)); }, { passive: false });
    let drag = null;
    this.svg.addEventListener("pointerdown", ev => { drag = [ev.clientX, ...this.window]; this.svg.setPointerCapture(ev.pointerId); });
    this.svg.addEventListener("pointermove", ev => { if (!drag) return; const d = (drag[0] - ev.clientX) / this.width() * (drag[2] - drag[1]); this.show(drag[1] + d, drag[2] + d); });
    this.svg.addEventListener("pointerup", () => { drag = null; });
    this.svg.addEventListener("dblclick", () => this.show(...this.full));
    this.svg.addEventListener("keydown", ev => {
      const [a, b] = this.window, d = (b - a) * .2, mid = (a + b) / 2;
      const moves = { ArrowLeft: () => this.show(a - d, b - d), ArrowRight: () => this.show(a + d, b + d), "+": () => this.zoom(.8, mid), "=": () => this.zoom(.8, mid), "-": () => this.zoom(1.25, mid), "0": () => this.show(...this.full) };
      if (moves[ev.key]) { ev.preventDefault(); ev.stopPropagation(); moves[ev.key](); }
    });
  }
  names() { return this.jobs || allJobs; }
  width() { return Math.max(50, this.svg.clientWidth - this.left - this.right); }
  at(ev) { const r = this.svg.getBoundingClientRect(), [a, b] = this.window; return a + (ev.clientX - r.left - this.left) / this.width() * (b - a); }
  zoom(f, mid) { const [a, b] = this.window; this.show(mid - (mid - a) * f, mid + (b - mid) * f); }
  show(a, b) {
    const [lo, hi] = this.full, span = Math.min(hi - lo, Math.max(1e-3, b - a));
    a = Math.min(Math.max(a, lo), hi - span);
    this.window = [a, a + span];
    this.draw();
  }
  // Time went on. A window that shows the end goes with it, any other stays.
  advance(begin, end) {
    const [a, b] = this.window, span = b - a, follows = b >= this.full[1] - 1e-6;
    this.full = [begin, end];
    this.window = follows ? [Math.max(begin, end - span), end] : [Math.max(begin, a), Math.max(begin + 1e-3, b)];
  }
  draw() {
    const [a, b] = this.window, w = this.width(), x = t => this.left + (t - a) / (b - a) * w;
    this.svg.replaceChildren();
    if (this.strip) { this.thin(this.lanes[0], x, w); return; }
    patterns(this.svg, this.names());
    const bottom = Number(this.svg.getAttribute("height")) - 20;
    const step = niceStep(b - a, w / 90), zero = this.full[this.live ? 1 : 0];
    for (let t = Math.ceil((a - zero) / step) * step; t <= b - zero + 1e-9; t += step) {
      const px = x(t + zero), label = this.live && Math.abs(t) < 1e-9 ? "now" : +t.toFixed(3) + " s";
      el("line", { x1: px, x2: px, y1: 0, y2: bottom, stroke: "var(--grid)" }, this.svg);
      el("text", { x: px, y: bottom + 14, "text-anchor": label === "now" ? "end" : "middle" }, this.svg, label);
    }
    let y = 4;
    for (const lane of this.lanes) {
      const h = lane.height || LANE;
      const name = el("text", { x: 0, y: y + h / 2 + 4, class: "lane" }, this.svg, lane.name.length > 15 ? lane.name.slice(0, 14) + "…" : lane.name);
      if (lane.name.length > 15) el("title", {}, name, lane.name);
      if (lane.kind === "queue") this.queue(lane, x, y, h); else this.bars(lane, x, y, h, w);
      this.marks(lane, x, y, h);
      y += h + GAP;
    }
  }
  bars(lane, x, y, h, w) {
    const [a, b] = this.window;
    el("rect", { x: this.left, y, width: w, height: h, fill: "var(--grid)", opacity: .5, rx: 3 }, this.svg);
    let painted = -1;
    for (const i of lane.items) {
      if (i.end < a || i.begin > b) continue;
      const x0 = Math.max(this.left, x(i.begin)), x1 = Math.min(this.left + w, x(i.end));
      if (x1 - x0 < .4 && x1 < painted + .4) continue;   // a pixel is enough for what is smaller than one
      painted = x1;
      const thin = i.kind === "waiting" || i.kind === "off" || i.kind === "frozen";
      const r = el("rect", { x: x0, y: thin ? y + h * .3 : y, width: Math.max(.8, x1 - x0), height: thin ? h * .4 : h, rx: x1 - x0 > 6 ? 2.5 : 0, fill: this.fill(i), class: "iv " + i.kind }, this.svg);
      hover(r, () => words(i, i => this.when(i)));
      const label = i.kind === "swapping" ? "" : i.kind === "frozen" ? "frozen" : i.phase;
      if (label && x1 - x0 > 7 * label.length + 8 && (!thin || i.kind === "frozen")) el("text", { x: (x0 + x1) / 2, y: y + h / 2 + 4, "text-anchor": "middle", class: "inbar" }, this.svg, label);
    }
  }
  // One path for each colour: hundreds of strips are redrawn several times a second.
  thin(lane, x, w) {
    const [a, b] = this.window, paths = {}, h = this.strip;
    let painted = -1;
    for (const i of lane.items) {
      if (i.end < a || i.begin > b) continue;
      const x0 = Math.max(0, x(i.begin)), x1 = Math.max(x0 + .8, Math.min(w, x(i.end)));
      if (x1 < painted + .4) continue;
      painted = x1;
      const fill = this.fill(i);
      paths[fill] = (paths[fill] || "") + `M${x0.toFixed(1)} 0H${x1.toFixed(1)}V${h}H${x0.toFixed(1)}Z`;
    }
    for (const fill in paths) el("path", { d: paths[fill], fill }, this.svg);
    this.marks(lane, x, 0, h);
  }
  marks(lane, x, y, h) {
    const [a, b] = this.window;
    for (const m of lane.marks || []) {
      if (m.at < a || m.at > b) continue;
      const px = x(m.at), g = el("path", { d: `M${px - 4} ${y}h8l-3.3 6V${y + h}h-1.4V${y + 6}Z`, fill: "var(--bad)", class: "mark" }, this.svg);
      if (!this.strip) hover(g, () => [m.code.replaceAll("_", " "), m.text]);
    }
  }
  found(t) { return this.lanes[0].items.findLast(i => i.begin <= t && t <= i.end); }
  fill(i) {
    if (i.kind === "swapping") return "var(--swap)";
    if (i.kind === "off") return "var(--off)";
    if (i.kind === "frozen") return "var(--frozen)";
    if (i.kind === "waiting") return `url(#${this.svg.id}-w${this.names().indexOf(i.job)})`;
    return colorIn(this.names(), i.job);
  }
  when(i) {
    const [first, now] = this.full;
    if (!this.live) return `${secs(i.end - i.begin)}, from ${(i.begin - first).toFixed(3)} s`;
    return i.end > now ? `for ${secs(now - i.begin)} by now` : `${secs(i.end - i.begin)}, until ${secs(now - i.end)} ago`;
  }
  queue(lane, x, y, h) {
    const [a, b] = this.window, top = Math.max(1, ...lane.items.map(p => p[1]));
    const yy = n => y + h - n / top * (h - 4), end = this.left + this.width();
    let d = `M${this.left},${yy(0)}`;
    for (const [t, n] of lane.items) {
      if (t > b) break;
      const nx = Math.max(this.left, x(t));
      if (t < a) { d = `M${this.left},${yy(n)}`; continue; }
      d += `H${nx}V${yy(n)}`;
    }
    el("path", { d: d + `H${end}`, fill: "none", stroke: "var(--queue)", "stroke-width": 1.6 }, this.svg);
    el("text", { x: this.left - 8, y: yy(top) + 8, "text-anchor": "end" }, this.svg, String(top));
  }
}
function legend(bar, solo, jobs = allJobs) {
  const l = html("div", { class: "legend" }, bar);
  const item = (bg, text) => { const s = html("span", {}, l); const i = html("i", {}, s); i.style.background = bg; s.append(text); };
  jobs.forEach(j => item(colorIn(jobs, j), j));
  if (!solo) { item("repeating-linear-gradient(45deg, var(--soft) 0 2px, transparent 2px 5px)", "waiting"); item("var(--swap)", "swap"); item("var(--bad)", "trouble"); }
  item("var(--off)", "off the accelerator");
}
function controls(bar, timeline) {
  const b = (text, f) => html("button", { type: "button" }, bar, text).addEventListener("click", f);
  const mid = () => (timeline.window[0] + timeline.window[1]) / 2;
  b("zoom in", () => timeline.zoom(.5, mid())); b("zoom out", () => timeline.zoom(2, mid())); b("all", () => timeline.show(...timeline.full));
}
function lanesOf(g) {
  const marks = (g.decisions || []).filter(d => d.trouble);
  return [
    ...g.jobs.map(job => ({ name: job, items: g.intervals.filter(i => i.job === job && i.kind !== "swapping") })),
    { name: "lock", items: g.intervals.filter(i => i.kind === "held"), marks },
    { name: "swaps", items: g.intervals.filter(i => i.kind === "swapping"), height: 18 },
    { name: "queue", kind: "queue", items: g.queue, height: 34 },
  ];
}
function table(box, head, rows) {
  const t = html("table", {}, box), tr = html("tr", {}, html("thead", {}, t));
  head.forEach(h => html("th", {}, tr, h));
  const body = html("tbody", {}, t);
  rows.forEach(r => { const line = html("tr", {}, body); r.forEach(c => html("td", {}, line, c)); });
  return t;
}
