// Where the time of a request went: its steps through the stages, and the causes that add up to its latency.

import { h } from "./dom.js";
import { duration, percent } from "./format.js";

const mix = (name, share) => `color-mix(in srgb, var(--${name}) ${share}%, var(--panel))`;

/** Causes in their order, with their names and colours. */
export const CAUSES = {
  http: ["HTTP", mix("text-3", 60)],
  queue: ["queue", "var(--fairness)"],
  credits: ["waiting for a place in the batch", mix("fairness", 55)],
  others_prefill: ["others' prefill", mix("batching", 60)],
  others_decode: ["others' decode", "var(--batching)"],
  preemption: ["preempted", "var(--bad)"],
  weights: ["weight updates", "var(--accent)"],
  recovery: ["recovery", mix("bad", 60)],
  unknown: ["before a failure", mix("bad", 30)],
  own_prefill: ["own prefill", mix("executor", 60)],
  own_decode: ["own decode", "var(--executor)"],
  kv: ["waiting for KV", "var(--admission)"],
  overhead: ["between the stages", mix("text-3", 35)],
  delivery: ["delivery", "var(--streaming)"],
  slow_client: ["slow client", mix("streaming", 55)],
};

const named = (time) => Object.entries(time).filter(([, ns]) => ns > 0).map(([cause, ns]) => ({ name: CAUSES[cause]?.[0] ?? cause, color: CAUSES[cause]?.[1] ?? "var(--text-3)", ns }));
const sum = (found) => found.reduce((all, { ns }) => all + ns, 0);

const bar = (found) => h("div", { class: "bar", "aria-hidden": "true" }, found.map(({ color, ns }) => h("i", { style: { width: `${(ns / sum(found)) * 100}%`, background: color } })));

const table = (found) => h("table", null, h("tbody", null,
  found.map(({ name, color, ns }) => h("tr", null, h("td", null, h("span", { class: "legend" }, h("span", null, h("i", { style: { background: color } }), name))), h("td", { class: "num" }, duration(ns)), h("td", { class: "num muted" }, percent(ns / sum(found))))),
  h("tr", null, h("th", { scope: "row" }, "together"), h("td", { class: "num" }, duration(sum(found))), h("td", { class: "num muted" }, percent(1)))));

/** A bar and a table of causes: {cause: ns}. */
export function causes(time) {
  const found = named(time);
  return found.length ? h("div", { class: "causes meter" }, bar(found), table(found)) : null;
}

/** The same with the table folded. */
export function foldedCauses(time) {
  const found = named(time);
  return found.length ? h("details", { class: "causes" }, h("summary", null, `At the gateway ${duration(sum(found))}, by cause`, bar(found)), table(found)) : null;
}

/** A bar and a legend of causes by their shares, in per mille, as streaming reports them of its last requests. */
export function causeShares(load) {
  const found = Object.keys(CAUSES).filter((cause) => load[`time_${cause}`]).map((cause) => ({ name: CAUSES[cause][0], color: CAUSES[cause][1], share: load[`time_${cause}`] / 1000 }));
  if (!found.length) return null;
  return h("div", { class: "causes meter" },
    h("div", { class: "bar", role: "img", "aria-label": "Time of the last requests by cause" }, found.map(({ color, share }) => h("i", { style: { width: `${share * 100}%`, background: color } }))),
    h("p", { class: "legend" }, found.map(({ name, color, share }) => h("span", null, h("i", { style: { background: color } }), `${name} ${percent(share)}`))));
}

/** Steps on one axis: {name, start, end, color, note}. */
export function waterfall(steps) {
  const from = Math.min(...steps.map((each) => each.start));
  const to = Math.max(...steps.map((each) => each.end));
  const width = Math.max(1, to - from);
  return h("div", { class: "fall", role: "list" }, steps.map(({ name, start, end, color }) => h("div", { class: "step", role: "listitem" },
    h("span", { class: "ellipsis" }, name),
    h("span", { class: "track", title: `from ${duration(start - from)} to ${duration(end - from)}` }, h("i", { style: { left: `${((start - from) / width) * 100}%`, width: `${((end - start) / width) * 100}%`, background: color } })),
    h("span", { class: "num" }, duration(end - start)))));
}

/** The steps of a request: at the gateway, and in each stage. */
export function stepsOf({ request, detail }) {
  const end = request.ended_ns || Date.now() * 1e6;
  const steps = [{ name: "gateway", start: request.arrived_ns, end: request.began_ns || end, color: "var(--text-3)" }];
  for (const { stage, start_ns: start, end_ns: stop } of detail.timings?.stages ?? []) {
    steps.push({ name: stage, start, end: stop || end, color: `var(--${stage.split(".")[0]}, var(--accent))` });
  }
  if (!detail.timings && request.began_ns) steps.push({ name: "pipeline", start: request.began_ns, end, color: "var(--executor)" });
  return steps;
}
