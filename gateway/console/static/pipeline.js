// The pipeline as it is: its lanes, stages and links, the batch, KV, tenants, speculation and weights.

import { h, put } from "./dom.js";
import { bytes, clock, count, duration, number, percent } from "./format.js";
import { chart } from "./chart.js";
import { feed } from "./feed.js";
import { causeShares } from "./waterfall.js";

const LATE_S = 5;
/** From here on an epoch is a time: Redis gives them by its clock. */
const LEAST_TIME_MS = 1e12;
const DEEP = 256;

const split = (role) => { const [stage, replica] = role.split("."); return [stage, Number(replica ?? 0)]; };
const sum = (stages, stage, name) => Object.entries(stages).reduce((all, [role, { load }]) => all + (split(role)[0] === stage && Number(load[name]) || 0), 0);

/** Numbers of messages by sender, as a stage reports them: "fairness=12,client=3". */
export function receivedOf(report) {
  const found = {};
  for (const each of (report?.load.received ?? "").split(",").filter(Boolean)) {
    const at = each.lastIndexOf("=");
    found[each.slice(0, at)] = Number(each.slice(at + 1));
  }
  return found;
}

/** Messages a second from one role to a report's stage; null if unknown. */
export function rateOf(now, before, from, seconds) {
  if (!now || !before || now.incarnation !== before.incarnation || seconds <= 0) return null;
  const change = (receivedOf(now)[from] ?? 0) - (receivedOf(before)[from] ?? 0);
  return change < 0 ? null : change / seconds;
}

/** The state of a stage: bad, warn or good, and why. */
export function stateOf(report) {
  if (report.problem) return ["bad", report.problem];
  if (report.age_s > LATE_S) return ["bad", `silent for ${Math.round(report.age_s)} s`];
  if (report.load.held) return ["warn", report.load.held];
  return ["good", ""];
}

function facts(role, report) {
  const { load } = report;
  switch (split(role)[0]) {
    case "admission": return [number(load.in_flight), "in flight", [load.recovering && `${number(load.recovering)} recovering`, load.responses !== undefined && `${number(load.response_hits)} answers from the cache`]];
    case "fairness": return [number(load.queued), "queued", [`${number(load.credits)} places`, load.paused && `${number(load.paused)} paused`, load.preemptions && `${number(load.preemptions)} preempted`]];
    case "batching": return [number(load.running), "running", [load.waiting && `${number(load.waiting)} waiting`, load.step_age_s > 2 && `step since ${load.step_age_s} s`]];
    case "executor": return [`v${load.weight_version ?? 0}`, "weights", [[load.device, load.dtype].filter(Boolean).join(" · "), [load.parameters && `${count(load.parameters)} params`, load.steps !== undefined && `${number(load.steps)} steps`].filter(Boolean).join(" · ")]];
    default: return [number(load.tokens_per_s), "tokens/s", [load.ttft_ms_p50 !== undefined && `first token ${duration(load.ttft_ms_p50 * 1e6)}`, load.open && `${number(load.open)} open`]];
  }
}

function stageCard(role, report, lane) {
  const [stage, replica] = split(role);
  if (!report) return h("div", { class: "stage bad" }, h("div", { class: "name" }, role), h("p", { class: "problem" }, "no process runs it"));
  const [state, why] = stateOf(report);
  // In one process, its number says nothing at each stage.
  const apart = new Set(Object.values(lane.stages).map((each) => `${each.pid}@${each.host}`)).size > 1;
  const [big, unit, more] = facts(role, report);
  const kind = lane.roles[replica];
  const badge = kind && kind !== "both" && (stage === "batching" || stage === "executor") ? h("span", { class: "tag" }, kind) : null;
  const ranks = stage === "executor" && report.load.rank_bytes ? String(report.load.rank_bytes).split(",") : [];
  return h("div", { class: `stage ${state === "good" ? "" : state}`, style: { "--tone": `var(--${stage})` }, role: "group", "aria-label": `${role}: ${why || "ready"}` },
    h("div", { class: "name" }, h("span", null, role.replace(".", " ")), badge, h("span", { class: `dot ${state}`, title: why || report.state })),
    h("div", { class: "big" }, big, " ", h("small", null, unit)),
    more.filter(Boolean).map((each) => h("div", { class: "facts-line" }, each)),
    ranks.length > 0 && h("div", { class: "ranks" }, ranks.map((each, rank) => h("span", { title: `rank ${rank}` }, `${rank}: ${bytes(Number(each))}`))),
    why && h("p", { class: "problem" }, why),
    apart && h("div", { class: "facts-line ellipsis", title: `process ${report.pid} on ${report.host}` }, `${report.pid}@${report.host}`));
}

function linkView(from, to, now, before, seconds) {
  const rate = rateOf(now, before, from, seconds);
  const depth = now?.load.inbox;
  const label = `${from} to ${to}: ${rate === null ? "rate unknown" : `${number(rate)} messages a second`}, ${depth ?? "unknown"} waiting`;
  return h("div", { class: `link${depth > DEEP ? " full" : rate > 0 ? " moving" : ""}`, role: "img", "aria-label": label, title: label },
    h("span", { class: "only-narrow" }, `${from} to ${to}`), h("span", null, rate === null ? "–" : `${rate >= 10 ? Math.round(rate) : rate.toFixed(rate ? 1 : 0)}/s`), h("span", { class: "wire" }), h("span", null, depth ? `${number(depth)} waiting` : "\u00a0"));
}

function laneView(lane, earlier, seconds) {
  const replicas = [...new Set(Object.keys(lane.stages).map((role) => split(role)[1]).concat(0))].sort((a, b) => a - b);
  const at = (stage, replica) => (replica ? `${stage}.${replica}` : stage);
  const before = earlier?.stages ?? {};
  const place = (element, column, row, rows = 1) => { element.style.gridColumn = String(column); element.style.gridRow = `${row} / span ${rows}`; return element; };
  const link = (from, to) => linkView(from, to, lane.stages[to], before[to], seconds);
  const all = replicas.length;
  const flow = h("div", { class: "flow" }, place(stageCard("admission", lane.stages.admission, lane), 1, 1, all), place(link("admission", "fairness"), 2, 1, all), place(stageCard("fairness", lane.stages.fairness, lane), 3, 1, all));
  replicas.forEach((replica, index) => {
    const [batching, executor] = [at("batching", replica), at("executor", replica)];
    flow.append(place(link("fairness", batching), 4, index + 1), place(stageCard(batching, lane.stages[batching], lane), 5, index + 1), place(link(batching, executor), 6, index + 1),
      place(stageCard(executor, lane.stages[executor], lane), 7, index + 1), place(link(executor, "streaming"), 8, index + 1));
  });
  flow.append(place(stageCard("streaming", lane.stages.streaming, lane), 9, 1, all));
  const held = Object.values(lane.stages).map((each) => each.load.held).find(Boolean);
  return h("section", { class: "panel lane" },
    h("header", null, h("h2", null, `Lane ${lane.lane}`), lane.model && h("span", { class: "tag" }, lane.model), h("span", { class: `tag ${lane.ready ? (held ? "warn" : "good") : "bad"}` }, lane.ready ? (held ? `ready, ${held}` : "ready") : "not ready"),
      h("span", { class: "muted small" }, `${lane.epoch > LEAST_TIME_MS ? `since ${clock(lane.epoch * 1e6)}` : `epoch ${lane.epoch}`}${all > 1 ? `, ${all} replicas` : ""}`), !lane.ready && h("span", { class: "error small" }, lane.reason),
      lane.rivals.map((each) => h("span", { class: "tag bad" }, `two processes run ${each}`))),
    flow);
}

const meter = (name, parts, total, text) => h("div", { class: "meter" }, h("div", { class: "line" }, h("span", null, name), h("span", null, text)),
  h("div", { class: "bar", role: "img", "aria-label": `${name}: ${text}` }, parts.map(([value, color]) => h("i", { style: { width: `${total ? Math.min(100, (value / total) * 100) : 0}%`, background: color } }))));

function capacity(lanes) {
  const all = (stage, name) => lanes.reduce((found, lane) => found + sum(lane.stages, stage, name), 0);
  const [running, most] = [all("batching", "running"), all("executor", "max_batch_size")];
  const [free, total, cached, pinned] = ["kv_free", "kv_total", "kv_cached", "kv_pinned"].map((name) => all("batching", name));
  const used = total - free;
  const held = Math.max(0, used - pinned);
  const rows = [
    meter("Batch", [[running, "var(--batching)"]], most, most ? `${number(running)} of ${number(most)} samples running` : `${number(running)} samples wait for an executor`),
    meter("KV on the device", [[held, "var(--executor)"], [pinned, "var(--fairness)"], [cached, "color-mix(in srgb, var(--executor) 40%, var(--panel))"]], total, `${number(used)} of ${number(total)} blocks used, ${number(cached)} cached${pinned ? `, ${number(pinned)} pinned` : ""}`),
  ];
  const snapshots = all("batching", "state_snapshots_total");
  if (snapshots) rows.push(meter("State snapshots", [[all("batching", "state_snapshots"), "var(--executor)"]], snapshots, `${number(all("batching", "state_snapshots"))} of ${number(snapshots)}`));
  for (const [tier, name] of [["host", "KV in host memory"], ["disk", "KV on disk"]]) {
    const most = all("batching", `kv_${tier}_total`);
    if (most) rows.push(meter(name, [[all("batching", `kv_${tier}`), "var(--streaming)"]], most, `${number(all("batching", `kv_${tier}`))} of ${number(most)} blocks`));
  }
  const drafted = all("executor", "draft_tokens");
  const speculates = lanes.some((lane) => Object.values(lane.stages).some(({ load }) => load.draft_tokens !== undefined));
  if (speculates) {
    const accepted = all("executor", "accepted_tokens");
    const drafts = all("executor", "drafts");
    rows.push(meter("Speculation", [[accepted, "var(--accent)"]], drafted, drafted ? `${percent(accepted / drafted)} of drafted tokens accepted, ${(1 + accepted / Math.max(1, drafts)).toFixed(1)} tokens a step` : "nothing drafted yet"));
  }
  return rows;
}

function tenants(list, inFlight) {
  const total = list.reduce((all, each) => all + each.tokens, 0);
  if (!list.length) return h("p", { class: "muted" }, inFlight ? "The requests in flight came another way: by another gateway, or by the bus. Tenants are counted where they come in." : "No tenant has used this gateway in the last minute.");
  return list.slice(0, 8).map((each) => meter(each.tenant, [[each.tokens, "var(--fairness)"]], total, `${percent(total ? each.tokens / total : 0)} · ${number(each.tokens)} tokens${each.running ? ` · ${number(each.running)} running` : ""}${each.waiting ? ` · ${number(each.waiting)} waiting` : ""}`));
}

const tile = (name, value, unit) => h("div", { class: "tile" }, h("span", null, name), h("b", null, value, unit && h("small", null, ` ${unit}`)));

const panel = (title, ...content) => h("section", { class: "panel" }, h("header", null, h("h2", null, title)), h("div", { class: "body" }, content));

/** Ranges of the charts, in minutes. */
const RANGES = { "10 min": 10, "1 h": 60, "6 h": 360, "24 h": 1440 };

/** The charts over time, their range, and what their axes show. */
function charts(signal) {
  let minutes = 10;
  const note = h("span", { class: "muted small", role: "status" });
  const chips = Object.entries(RANGES).map(([name, each]) => h("button", { type: "button", "aria-pressed": String(each === minutes), onclick: () => { minutes = each; for (const chip of chips) chip.setAttribute("aria-pressed", String(chip.textContent === name)); draw(); } }, name));
  const plots = [
    ["Tokens per second", [{ label: "tokens/s", color: "--streaming", fill: true }], [1]],
    ["Requests and samples", [{ label: "in flight", color: "--admission" }, { label: "not started", color: "--fairness" }, { label: "running", color: "--batching" }], [2, 3, 4]],
    ["KV blocks", [{ label: "used", color: "--executor", fill: true }], [5]],
    ["Version of the weights", [{ label: "version", color: "--accent", step: true }], [7], { level: true }],
  ].map(([title, series, picks, options]) => {
    const element = h("div", { class: "chart", role: "img", "aria-label": title });
    const legend = h("div");
    const panel = h("section", { class: "panel" }, h("header", null, h("h2", null, title), h("span", { class: "spacer" }), legend), h("div", { class: "body" }, element));
    return { title, series, picks, options, element, legend, panel };
  });
  const zone = Intl.DateTimeFormat().resolvedOptions().timeZone;
  function draw() {
    const { from, until, step, points, began } = feed.during(minutes);
    const times = points.map(([at]) => at / 1000);
    for (const { plot, picks } of plots) plot.update(times, picks.map((pick) => points.map((point) => point[pick] ?? null)), from / 1000, until / 1000);
    const first = points[0]?.[0];
    const since = began ? `, means of a minute before the gateway's start at ${clock(began * 1e6)}` : "";
    const said = `${step === 1000 ? "a point a second" : "means of a minute"}${since}, ${zone}${first && first - from > 3 * step ? `; ${feed.whole ? "begins with the gateway, at" : "known since"} ${clock(first * 1e6)}` : ""}`;
    if (note.textContent !== said) note.textContent = said;
  }
  const element = h("section", { class: "over-time", "aria-label": "Charts" }, h("div", { class: "row" }, h("h2", null, "Over time"), h("div", { class: "chips", role: "group", "aria-label": "Range" }, chips), note), h("div", { class: "grid charts" }, plots.map(({ panel }) => panel)));
  /** Begin, once the elements are on the page. */
  function start() {
    for (const each of plots) {
      each.plot = chart(each.element, each.title, each.series, { signal, ...each.options });
      each.legend.replaceWith(each.plot.legend);
    }
    feed.on(() => { draw(); feed.history().then((read) => { if (read && !signal.aborted) draw(); }, () => {}); }, signal);
  }
  return [element, start];
}

export function render(root, { signal }) {
  const banner = h("div", { role: "alert" });
  const tiles = h("div", { class: "tiles" });
  const lanes = h("div", { class: "page-lanes grid", style: { "grid-template-columns": "minmax(0, 1fr)" } });
  const meters = h("div", { class: "stack grid", style: { "grid-template-columns": "minmax(0, 1fr)", gap: "14px" } });
  const shares = h("div", { class: "grid", style: { "grid-template-columns": "minmax(0, 1fr)", gap: "14px" } });
  const spent = panel("Where the time of the last requests went");
  spent.hidden = true;
  const [plots, start] = charts(signal);
  const asOf = h("span", { class: "muted small", role: "status" });
  const state = h("div", { class: "state-now", hidden: true }, tiles, lanes, h("div", { class: "grid" }, panel("Capacity", meters), panel("Tenants, last minute at this gateway", shares)), spent);
  put(root, h("div", { class: "page" }, h("header", null, h("h1", null, "Pipeline"), asOf), banner, state, plots));
  start();
  let known_ms = 0;
  /** Grey out what is no longer known to be so. */
  const age = () => {
    const old = feed.state === "lost" || !feed.latest?.status;
    state.classList.toggle("old", old);
    const text = old && known_ms ? `as of ${clock(known_ms * 1e6)}` : "";
    if (asOf.textContent !== text) asOf.textContent = text;
  };
  feed.addEventListener("state", age, { signal });

  feed.on((snapshot) => {
    const { status } = snapshot;
    const before = feed.before;
    const alerts = [];
    if (!status) alerts.push(["bad", "Bus unreachable", snapshot.problem]);
    else {
      // Where no lane works, that is why nothing goes on.
      if (!status.ready) alerts.push(["bad", "Not ready", status.reason]);
      else if (status.progress.status === "stalled") alerts.push(["bad", "Stalled", status.progress.reason]);
      else if (status.progress.reason) alerts.push(["warn", "Held", status.progress.reason]);
      else if (status.held) alerts.push(["warn", "Held", `${status.held}${status.held.includes("paused") ? "; resume with nano-inference resume" : ""}`]);
      if (status.dead_letters) alerts.push(["warn", "Dead letters", `${number(status.dead_letters)} requests were given up; see Operations`]);
    }
    const said = JSON.stringify(alerts);
    if (banner.dataset.said !== said) {
      banner.dataset.said = said;
      put(banner, alerts.map(([kind, title, text]) => h("div", { class: `banner ${kind}` }, h("b", null, title), h("span", null, text))));
      banner.hidden = !alerts.length;
    }
    if (status) known_ms = snapshot.at_ms;
    age();
    if (!status) return;
    state.hidden = false;
    const all = (stage, name) => status.lanes.reduce((found, lane) => found + sum(lane.stages, stage, name), 0);
    const first = status.lanes.map((lane) => lane.stages.streaming?.load).filter((load) => load?.ttft_ms_p50 !== undefined);
    put(tiles, tile("Tokens/s", number(all("streaming", "tokens_per_s"))), tile("In flight", number(status.in_flight)), tile("Waiting", number(status.waiting), snapshot.gateway.waiting ? `and ${number(snapshot.gateway.waiting)} here` : ""),
      tile("Not started", number(status.queue_length)), tile("First token", first.length ? duration(Math.max(...first.map((load) => load.ttft_ms_p50)) * 1e6) : "–", first.length ? `median, p95 ${duration(Math.max(...first.map((load) => load.ttft_ms_p95)) * 1e6)}` : ""),
      tile("Preempted", number(all("fairness", "preemptions"))));
    const seconds = before ? (snapshot.at_ms - before.at_ms) / 1000 : 0;
    const earlier = (lane) => before?.status?.lanes.find((each) => each.lane === lane.lane && each.model === lane.model);
    put(lanes, status.lanes.map((lane) => laneView(lane, earlier(lane), seconds)), !status.lanes.length && h("div", { class: "panel empty" }, status.reason));
    put(meters, capacity(status.lanes));
    const times = status.lanes.map((lane) => lane.stages.streaming && causeShares(lane.stages.streaming.load)).filter(Boolean);
    spent.hidden = !times.length;
    put(spent.lastChild, times);
    put(shares, tenants(snapshot.tenants, status.in_flight));
  }, signal);
}

