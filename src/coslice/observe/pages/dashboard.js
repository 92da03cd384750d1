// Draws the feed: a row for each group, the chosen group beside them, a job's story on request. Only looks.
"use strict";
const feed = new Feed();
const $ = id => document.getElementById(id);
const clock = () => performance.now() / 1000;
const rows = new Map();            // by group: the elements of its row
const dirty = new Set();
const seen = new Set();            // rows on the screen
const page = { order: [], chosen: "", open: false, still: null, story: null, busy: 0, measured: [], link: "connecting", silent_s: 25 };
const TEXT_MS = 120, STRIP_MS = 250, DETAIL_MS = 250, ORDER_MS = 1500;
const span = () => Number($("span").value);
const now = () => page.still ?? feed.now(clock());
const age = x => x >= 100 ? x.toFixed(0) + " s" : x.toFixed(1) + " s";
const text = (node, said) => { if (node.textContent !== said) node.textContent = said; };
const put = (node, name, value) => { if (node.getAttribute(name) !== value) node.setAttribute(name, value); };
const busy = f => (...args) => { const t = performance.now(); try { return f(...args); } finally { page.busy += performance.now() - t; } };

// ── the stream ──
function linked(word, kind) { page.link = word; text($("link"), word); $("link").className = "chip " + kind; }
const ask = (path, options = {}) => {
  const token = sessionStorage.getItem("coslice-token");
  return fetch(path, { ...options, cache: "no-store", headers: token ? { Authorization: `Bearer ${token}` } : {} });
};
// A network that is gone says nothing; an orchestrator that is there does, every ten seconds at least.
async function listen() {
  const stop = new AbortController();
  let last = clock();
  const watch = setInterval(() => { if (clock() - last > page.silent_s) stop.abort(); }, 1000);
  try { await hear(stop, () => { last = clock(); }); } finally { clearInterval(watch); }
}
async function hear(stop, alive) {
  const answer = await ask("/dashboard/events", { signal: stop.signal });
  alive();
  if (answer.status === 401) { await token(await answer.text()); return; }
  if (!answer.ok) throw Object.assign(new Error(), { told: (await answer.text()).trim() });
  const reader = answer.body.getReader(), decoder = new TextDecoder();
  const events = new Events((kind, message) => {
    const told = feed.take(kind, message, clock());
    if (told === null) { stop.abort(); return; }
    told.forEach(name => feed.groups.has(name) ? dirty.add(name) : dirty.delete(name));
    const leader = feed.seats.find(s => s.leads);
    if (feed.orchestrator) linked("live", "good"); else linked(`stands by: ${leader ? leader.address + " leads" : "another orchestrator leads"}`, "");
  });
  const heard = busy(chunk => events.push(decoder.decode(chunk, { stream: true })));
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    alive();
    heard(value);
  }
}
async function follow() {
  for (let pause = 250; ; pause = Math.min(5000, pause * 2)) {
    const before = feed.snapshots;
    let said = "no connection; trying again";
    try { await listen(); } catch (error) { if (error.told) said = error.told; }
    if (feed.snapshots > before) pause = 250;
    linked(said, "bad");
    await new Promise(go => setTimeout(go, pause));   // a fetch tells nobody when a server is back
  }
}
function token(why) {
  $("ask").hidden = false; document.querySelector("main").hidden = true;
  text($("why"), sessionStorage.getItem("coslice-token") ? why : "");
  linked("a token is needed", "bad"); $("token").focus();
  return new Promise(go => $("ask").addEventListener("submit", ev => {
    ev.preventDefault();
    sessionStorage.setItem("coslice-token", $("token").value.trim());
    $("token").value = ""; $("ask").hidden = true; document.querySelector("main").hidden = false;
    go();
  }, { once: true }));
}

// ── rows ──
const eyes = new IntersectionObserver(found => {
  for (const f of found) { const name = f.target.dataset.group; if (f.isIntersecting) { seen.add(name); dirty.add(name); } else seen.delete(name); }
}, { root: $("list"), rootMargin: "60px" });
function makeRow(name) {
  const row = html("div", { class: "row", role: "option", id: "g-" + name, "data-group": name, "aria-selected": "false" });
  const cells = ["name", "state", "", "", "", ""].map(c => html("span", { class: c }, row));
  html("b", {}, cells[0], name); html("i", { class: "out" }, cells[0]); cells[0].title = name;
  const strip = new Timeline(row, "strip-" + name, [{ name: "", items: [] }], 0, 1, { strip: 16, live: true, jobs: [] });
  row.addEventListener("click", () => { choose(name); open(true); });
  eyes.observe(row);
  return { row, cells, strip };
}
function lockItems(g) { return [...g.past, ...g.open].filter(i => i.kind === "held" || i.kind === "swapping").sort((a, b) => a.begin - b.begin); }
const drained = g => g.row.nodes.filter(n => n.out);
const waited = (g, t) => Math.max(0, ...g.row.jobs.filter(j => j.place).map(j => j.waited_s + t - g.told));
function drawRow(name) {
  const g = feed.groups.get(name), r = rows.get(name);
  if (!g || !r) return;
  const t = now(), c = r.cells, busyWith = g.row.state === "held" || g.row.state === "swapping";
  text(c[1], g.row.state === "resident" || g.row.state === "empty" ? "free" : g.row.state); c[1].className = "state " + g.row.state;
  text(c[2], busyWith ? `${g.row.job}, ${age(Math.max(0, t - g.row.since))}` : g.row.state === "resident" ? `(${g.row.job})` : "–");
  text(c[3], g.row.waiting.length ? String(g.row.waiting.length) : "·");
  const w = waited(g, t);
  text(c[4], w ? age(w) : "·"); text(c[5], (100 * feed.duty(g, span(), t)).toFixed(0) + " %");
  const out = drained(g);
  text(c[0].lastChild, out.length ? `${out.length === 1 ? out[0].node : out.length + " nodes"} ${out.some(n => n.out === "draining") ? "draining" : "drained"}` : "");
  r.row.classList.toggle("drained", out.length > 0);
  r.row.classList.toggle("trouble", g.row.trouble.length > 0); put(r.row, "title", [...g.row.trouble, ...out.map(n => `node ${n.node}: ${n.drained}`)].join("\n"));
}
function drawStrip(name) {
  const g = feed.groups.get(name), r = rows.get(name);
  if (!g || !r) return;
  const t = now();
  r.strip.jobs = g.jobs; r.strip.lanes = [{ name: "", items: lockItems(g), marks: g.log.filter(d => d.trouble) }];
  r.strip.full = r.strip.window = [t - span(), t];
  r.strip.draw();
}
function order() {
  const wanted = $("filter").value.trim().toLowerCase(), t = now();
  const matches = g => !wanted || [g.row.group, ...g.row.jobs.map(j => j.job), ...g.row.nodes.flatMap(n => [n.node, n.out])].some(w => w.toLowerCase().includes(wanted));
  const by = { name: () => 0, trouble: g => -g.row.trouble.length, queue: g => -g.row.waiting.length, wait: g => -waited(g, t), duty: g => feed.duty(g, span(), t) }[$("sort").value];
  const natural = new Intl.Collator("en", { numeric: true }).compare;
  const found = [...feed.groups.values()].filter(matches).map(g => [by(g), g.row.group]).sort((a, b) => a[0] - b[0] || natural(a[1], b[1])).map(x => x[1]);
  for (const [name, r] of rows) if (!feed.groups.has(name)) { eyes.unobserve(r.row); r.row.remove(); rows.delete(name); seen.delete(name); }
  if (found.length !== page.order.length || found.some((name, n) => name !== page.order[n]) || $("groups").childElementCount !== found.length) {
    page.order = found;
    for (const name of found) if (!rows.has(name)) rows.set(name, makeRow(name));
    $("groups").replaceChildren(...found.map(name => rows.get(name).row));
  }
  text($("count"), found.length === feed.groups.size ? "" : `${found.length} of ${feed.groups.size} groups`);
  const none = feed.groups.size ? (found.length ? "" : "No group, job or node has this in its name.") : feed.orchestrator ? "No groups yet: an agent brings them (coslice up or coslice agent)." : "";
  text($("empty"), none); $("empty").hidden = !none;
}
function choose(name) {
  if (page.chosen && rows.has(page.chosen)) put(rows.get(page.chosen).row, "aria-selected", "false");
  if (page.chosen !== name) page.story = null;
  page.chosen = name;
  const r = rows.get(name);
  if (!r) return;
  put(r.row, "aria-selected", "true"); put($("groups"), "aria-activedescendant", r.row.id);
  r.row.scrollIntoView({ block: "nearest" });
  if (page.open) detail.build();
}
function move(step) {
  if (!page.order.length) return;
  const at = page.order.indexOf(page.chosen);
  choose(page.order[at < 0 ? 0 : Math.min(page.order.length - 1, Math.max(0, at + step))]);
}
function open(yes) {
  page.open = yes && feed.groups.has(page.chosen);
  $("detail").hidden = !page.open; document.querySelector("main").classList.toggle("narrow", page.open);
  if (page.open) detail.build(); else { page.story = null; $("groups").focus(); }
  drawAll();
}

// ── the chosen group ──
const detail = {
  name: "", parts: {},
  build() {
    if (this.name === page.chosen && $("detail").childElementCount) { this.draw(); return; }
    const box = $("detail"), p = this.parts = {};
    this.name = page.chosen; box.replaceChildren(); box.scrollTop = 0;
    const title = html("div", { class: "title" }, box);
    html("h2", {}, title, this.name); p.state = html("span", { class: "chip" }, title);
    html("button", { type: "button" }, title, "close ( esc )").addEventListener("click", () => open(false));
    p.facts = html("p", { class: "facts" }, box); p.trouble = html("ul", { class: "trouble", hidden: "" }, box);
    const bar = html("div", { class: "bar" }, box);
    const t = now();
    p.line = new Timeline(box, "line", [], t - span(), t, { live: true, jobs: [] });
    views.length = 0; views.push(p.line);
    controls(bar, p.line); p.legend = html("div", { class: "bar" }, box); p.legendOf = null;
    html("h3", {}, box, "Jobs");
    p.jobs = html("tbody", {}, table(box, ["job", "lock", "waits", "state is", "size", "slowdown", "why"], []));
    p.story = html("div", { class: "story", hidden: "", "aria-live": "polite" }, box);
    p.nodesHead = html("h3", {}, box, "Nodes"); p.nodes = html("div", {}, box);
    p.verdictsHead = html("h3", {}, box, "Admission"); p.verdicts = html("div", {}, box);
    html("h3", {}, box, "Decisions, the latest first"); p.log = html("table", {}, html("div", { class: "log" }, box));
    p.rows = new Map(); this.draw(); this.drawStory();
  },
  draw() {
    const g = feed.groups.get(this.name), p = this.parts, t = now();
    if (!g) { open(false); return; }
    const r = g.row, where = { held: `held by ${r.job} for ${age(Math.max(0, t - r.since))}`, swapping: `swapping in ${r.job} for ${age(Math.max(0, t - r.since))}`, resident: `free; ${r.job} was the last`, empty: "free" }[r.state];
    text(p.state, where); p.state.className = "chip " + (r.state === "held" ? "good" : "");
    text(p.facts, `epoch ${r.epoch} · policy ${r.policy} · ${r.swaps} swaps, ${size(r.moved)} moved · held duty ${pct(feed.duty(g, span(), t))}` + (r.admission && r.admission !== "off" ? ` · admission: ${r.admission}` : ""));
    p.trouble.hidden = !r.trouble.length;
    if (p.trouble.dataset.said !== r.trouble.join("\n")) { p.trouble.dataset.said = r.trouble.join("\n"); p.trouble.replaceChildren(...r.trouble.map(said => html("li", {}, null, said))); }
    this.timeline(g, t); this.jobs(g, t); this.nodes(r); this.words(g, t);
  },
  timeline(g, t) {
    const line = this.parts.line, shown = g.jobs.slice(-20);
    const items = [...g.past, ...g.open].sort((a, b) => a.begin - b.begin);
    line.jobs = g.jobs; line.lanes = lanesOf({ jobs: shown, intervals: items, queue: [...g.queue, [t, g.row.waiting.length]], decisions: g.log });
    if (this.parts.span !== span()) { this.parts.span = span(); line.full = line.window = [t - span(), t]; }
    line.advance(t - span(), t); line.resize(); line.draw();
    const names = g.jobs.join("\n");
    if (this.parts.legendOf !== names) { this.parts.legendOf = names; this.parts.legend.replaceChildren(); legend(this.parts.legend, false, shown); }
  },
  jobs(g, t) {
    const p = this.parts, live = new Set();
    for (const job of g.row.jobs) {
      live.add(job.job);
      let r = p.rows.get(job.job);
      if (!r) {
        const tr = html("tr", {}, p.jobs), first = html("td", {}, tr), dot = html("i", {}, first), name = html("button", { type: "button", title: "its story" }, first, job.job);
        dot.style.background = colorIn(g.jobs, job.job);
        name.addEventListener("click", () => tell(this.name, job.job));
        p.rows.set(job.job, r = { tr, cells: [1, 2, 3, 4, 5, 6].map(() => html("td", {}, tr)) });
      }
      const lost = job.lost_left_s === null ? "" : `connection lost, ${Math.max(0, job.lost_left_s - (t - g.told)).toFixed(0)} s left`;
      const said = [[job.lock, lost, job.door].filter(x => x).join("; ") || "–", job.place ? `${job.place}. for ${age(job.waited_s + t - g.told)}` : "–", job.fault ? "faulted" : job.where || "nowhere", job.bytes ? size(job.bytes) : "–", job.slowdown ? job.slowdown.toFixed(2) + "×" : "–", job.fault || job.reason || job.door_reason];
      said.forEach((s, n) => text(r.cells[n], s));
      r.cells[0].className = lost || job.lock.startsWith("frozen") || (job.door && !job.door.endsWith("probation")) ? "warn" : ""; r.cells[2].className = job.fault ? "warn" : "";
    }
    for (const [job, r] of p.rows) if (!live.has(job)) { r.tr.remove(); p.rows.delete(job); }
  },
  nodes(r) {
    const p = this.parts, said = JSON.stringify(r.nodes);
    if (p.nodesSaid === said) return;
    p.nodesSaid = said; p.nodes.replaceChildren();
    if (!r.nodes.length) { html("p", { class: "warn" }, p.nodes, "No node serves this group: start an agent that offers it."); return; }
    const of = (used, all) => all ? `${size(used)} of ${size(all)}` : "–";
    const t = table(p.nodes, ["node", "agent", "device", "host memory", "disk"], r.nodes.map(n => [n.node, (n.attached ? "attached" : "not attached") + (n.drained ? ", " + n.drained : ""), of(n.device_used, n.device_budget), of(n.host_used, n.host_budget) + (n.short ? ", short" : ""), of(n.disk_used, n.disk_budget)]));
    [...t.tBodies[0].rows].forEach((tr, n) => { if (!r.nodes[n].attached || r.nodes[n].drained) tr.cells[1].className = "warn"; if (r.nodes[n].short) tr.cells[3].className = "warn"; });
  },
  words(g, t) {
    const p = this.parts, verdicts = g.row.verdicts.slice(-12).reverse(), log = g.log.slice(-60).reverse();
    p.verdictsHead.hidden = !verdicts.length;
    if (p.verdictsSaid !== verdicts.join("\n")) { p.verdictsSaid = verdicts.join("\n"); p.verdicts.replaceChildren(...verdicts.map(v => html("p", { class: "hint" }, null, v))); }
    p.log.replaceChildren();
    for (const d of log) { const tr = html("tr", {}, p.log); html("td", {}, tr, age(Math.max(0, t - d.at)) + " ago"); html("td", d.trouble ? { class: "warn" } : {}, tr, d.text); }
  },
  drawStory() {
    const p = this.parts, s = page.story;
    if (!p.story) return;
    p.story.hidden = !s;
    if (s) p.story.replaceChildren(html("h3", {}, null, `The story of ${s.job}`), ...s.lines.map(line => html("p", {}, null, line)));
  },
};
async function tell(group, job) {
  page.story = { group, job, lines: ["…"], at: clock() };
  await refreshStory();
  detail.parts.story.scrollIntoView({ block: "nearest" });
}
async function refreshStory() {
  const s = page.story;
  try {
    const answer = await ask("/dashboard/story?" + new URLSearchParams({ group: s.group, job: s.job }));
    const said = await answer.json();
    s.lines = said.lines.length ? said.lines : [said.error];
  } catch (error) { s.lines = [`cannot be told now: ${error.message}`]; }
  if (page.story === s) detail.drawStory();
}

// ── drawing ──
function figures() {
  const t = clock(), all = [...feed.groups.values()].map(g => g.row), of = state => all.filter(r => r.state === state).length;
  page.measured.push({ t, busy: page.busy, updates: feed.updates, changes: feed.changes });
  if (page.measured.length > 12) page.measured.shift();   // the last six seconds
  const from = page.measured[0], passed = Math.max(.001, t - from.t), per = x => (x / passed).toFixed(0);
  const trouble = all.filter(r => r.trouble.length).length, out = new Set(all.flatMap(r => r.nodes.filter(n => n.out).map(n => n.node)));
  const by = feed.seats.filter(s => !s.leads).map(s => s.address), leader = feed.orchestrator && feed.seats.find(s => s.leads);
  text($("seats"), leader ? `${leader.address} leads for ${age(Math.max(0, feed.now(t) - leader.since))} (term ${leader.term}); standing by: ${by.join(", ") || "nobody"}` : "");
  $("seats").className = leader && !by.length ? "warn" : "soft";
  const said = [["groups", all.length], ["held", of("held")], ["swapping", of("swapping")], ["jobs waiting", all.reduce((n, r) => n + r.waiting.length, 0)], ["nodes drained", out.size], ["in trouble", trouble, trouble > 0], ["updates/s", per(feed.updates - from.updates)], ["gaps", feed.gaps, feed.gaps > 0]];
  if ($("figures").childElementCount !== said.length) $("figures").replaceChildren(...said.map(([word]) => { const d = html("div"); html("dt", {}, d, word); html("dd", {}, d); return d; }));
  said.forEach(([, value, bad], n) => { const dd = $("figures").children[n].lastChild; text(dd, String(value)); dd.className = bad ? "bad" : ""; });
  page.share = (page.busy - from.busy) / 10 / passed;
  text($("foot"), `orchestrator ${feed.orchestrator || "–"} · ${feed.updates} updates of groups in ${feed.changes} messages (${per(feed.changes - from.changes)}/s), ${feed.snapshots} snapshot(s), ${feed.gaps} gap(s) · this page's scripts use ${page.share.toFixed(0)} % of a core · read-only`);
}
const last = { text: 0, strip: 0, detail: 0, order: 0, figures: 0, story: 0 };
const due = (what, t, ms) => { if (t - last[what] < ms) return false; last[what] = t; return true; };
function drawAll() { for (const k in last) last[k] = 0; }
const frame = busy(t => {
  if (due("order", t, ORDER_MS)) order();
  if (page.still === null || last.still !== page.still) {
    last.still = page.still;
    if (due("text", t, TEXT_MS)) { for (const name of seen) if (dirty.delete(name) || t % 1000 < TEXT_MS) drawRow(name); }
    if (due("strip", t, STRIP_MS)) seen.forEach(drawStrip);
    if (page.open && due("detail", t, DETAIL_MS)) detail.draw();
  }
  if (due("figures", t, 500)) figures();
  if (page.story && due("story", t, 2000)) refreshStory();
});
function loop(t) { frame(t); requestAnimationFrame(loop); }
function pause() {
  page.still = page.still === null ? feed.now(clock()) : null;
  put($("pause"), "aria-pressed", String(page.still !== null)); text($("pause"), page.still === null ? "pause" : "go on");
}
function sortOtherwise() { $("sort").selectedIndex = ($("sort").selectedIndex + 1) % $("sort").options.length; order(); }
function back() {
  if (page.story) { page.story = null; detail.drawStory(); } else if (page.open) open(false); else { $("filter").value = ""; order(); }
}
addEventListener("keydown", ev => {
  if (ev.ctrlKey || ev.metaKey || ev.altKey || $("help").open) return;
  const typing = ev.target.matches("input, select"), onButton = ev.target.matches("button");
  if (ev.key === "Escape") { if (typing) ev.target.blur(); back(); ev.preventDefault(); return; }
  if (typing) { if (ev.key === "Enter" && ev.target === $("filter")) { order(); $("groups").focus(); move(0); } return; }
  const keys = { ArrowDown: () => move(1), j: () => move(1), ArrowUp: () => move(-1), k: () => move(-1), PageDown: () => move(15), PageUp: () => move(-15), Home: () => move(-1e6), End: () => move(1e6), "/": () => $("filter").focus(), s: sortOtherwise, "?": () => $("help").showModal() };
  if (!onButton) { keys[" "] = pause; keys.Enter = () => { if (!page.chosen) move(0); open(true); }; }
  if (keys[ev.key]) { ev.preventDefault(); keys[ev.key](); }
});
$("filter").addEventListener("input", order); $("sort").addEventListener("change", order);
$("span").addEventListener("change", () => { text($("strip-head"), "who held it, last " + $("span").selectedOptions[0].text); drawAll(); });
$("pause").addEventListener("click", pause); $("keys").addEventListener("click", () => $("help").showModal());
addEventListener("resize", drawAll);
$("groups").focus();
requestAnimationFrame(loop);
follow();
document.documentElement.dataset.ready = "1";
