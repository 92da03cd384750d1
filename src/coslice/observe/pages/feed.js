// What the orchestrator tells, as the page keeps it. Nothing here draws.
"use strict";
const KEPT = 800, KEPT_S = 900;

class Feed {
  constructor() {
    this.groups = new Map(); this.seq = null; this.orchestrator = ""; this.seats = []; this.offset = null;
    this.snapshots = 0; this.changes = 0; this.updates = 0; this.gaps = 0; this.begun = 0;
  }
  // One event. Returns the names of the groups it told of; null: something is missing, only a snapshot helps.
  take(kind, m, clock) {
    if (kind === "change" && m.seq !== this.seq + 1) {
      if (m.seq <= this.seq) return [];   // told already
      this.gaps += 1;
      return null;
    }
    this.seq = m.seq; this.orchestrator = m.orchestrator; this.seats = m.seats ?? [];
    this.sync(m.now, clock);
    if (kind === "snapshot") {
      this.snapshots += 1; this.begun = m.now;
      const before = [...this.groups.keys()];
      this.groups = new Map();
      m.groups.forEach(t => this.tell(t));
      return [...new Set([...before, ...this.groups.keys()])];
    }
    this.changes += 1; this.updates += m.groups.length;
    m.groups.forEach(t => this.tell(t));
    for (const name of m.gone) this.groups.delete(name);
    return [...m.groups.map(t => t.row.group), ...m.gone];
  }
  tell(t) {
    let g = this.groups.get(t.row.group);
    if (!g) this.groups.set(t.row.group, g = { past: [], queue: [], log: [], jobs: [] });
    g.row = t.row;
    g.told = this.now_told;
    g.open = t.open.map(i => ({ ...i, end: Infinity }));
    g.past.push(...t.past); g.queue.push(...t.queue); g.log.push(...t.log);
    const old = this.now_told - KEPT_S;
    let drop = Math.max(0, g.past.length - KEPT);
    while (drop < g.past.length && g.past[drop].end < old) drop++;
    if (drop > 40) g.past.splice(0, drop);
    if (g.queue.length > KEPT) g.queue.splice(0, g.queue.length - KEPT);
    if (g.log.length > 200) { const cut = g.log.length - 100; g.log = [...g.log.slice(0, cut).filter(d => d.trouble).slice(-50), ...g.log.slice(cut)]; }
    this.colours(g);
  }
  // The order of a group's jobs is the order of their colours: who is there keeps its place.
  colours(g) {
    const here = new Set(g.row.jobs.map(j => j.job));
    for (const i of g.open) here.add(i.job);
    if (g.jobs.length > 30) { for (const i of g.past) here.add(i.job); g.jobs = g.jobs.filter(j => here.has(j)); }
    for (const i of g.past.slice(-50)) here.add(i.job);
    for (const job of here) if (job && !g.jobs.includes(job)) g.jobs.push(job);
  }
  // The orchestrator's clock by ours. A message is never early: the quickest one tells best.
  sync(now, clock) {
    this.now_told = now;
    const offset = now - clock;
    this.offset = this.offset === null || Math.abs(offset - this.offset) > 5 ? offset : Math.max(offset, this.offset - .002);
  }
  now(clock) { return this.offset === null ? 0 : Math.max(this.now_told, clock + this.offset); }
  // Since when the timeline of this group is known.
  since(g) { return Math.min(this.begun, ...[g.past[0], ...g.open].filter(i => i).map(i => i.begin)); }
  duty(g, span, now) {
    const a = Math.max(this.since(g), now - span);
    let held = 0;
    for (const i of [...g.past, ...g.open]) if (i.kind === "held") held += Math.max(0, Math.min(now, i.end) - Math.max(a, i.begin));
    return now > a ? Math.min(1, held / (now - a)) : 0;
  }
}

// Splits a text/event-stream into its events, whatever pieces it comes in.
class Events {
  constructor(heard) { this.heard = heard; this.rest = ""; }
  push(text) {
    const blocks = (this.rest + text).split("\n\n");
    this.rest = blocks.pop();
    for (const block of blocks) {
      let kind = "message"; const data = [];
      for (const line of block.split("\n")) {
        if (line.startsWith("event: ")) kind = line.slice(7);
        else if (line.startsWith("data: ")) data.push(line.slice(6));
      }
      if (data.length) this.heard(kind, JSON.parse(data.join("\n")));
    }
  }
}
