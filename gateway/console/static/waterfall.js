// Where the time of a request went: its steps through the stages, and the causes that add up to its latency.

import { h } from "./dom.js";
import { duration, percent } from "./format.js";

const mix = (name, share) => `color-mix(in srgb, var(--${name}) ${share}%, var(--panel))`;

/** Causes in their order, as docs/time.md has them, with their colours. */
const CAUSES = {
  http: ["at the gateway, until the request is on the queue", mix("text-3", 60)],
  queue: ["on the requests queue, until admission takes the request", "var(--fairness)"],
  credits: ["in fairness, until a batch has a place", mix("fairness", 55)],
  others_prefill: ["ready to run, while steps computed prompts of others", mix("batching", 60)],
  others_decode: ["ready to run, while other steps of others ran", "var(--batching)"],
  preemption: ["paused or preempted, until the next token", "var(--bad)"],
  weights: ["no step may run: new weights, a pause, released memory", "var(--accent)"],
  recovery: ["from a failure until the next token", mix("bad", 60)],
  unknown: ["before a failure that took the account with it", mix("bad", 30)],
  own_prefill: ["steps that compute its prompt", mix("executor", 60)],
  own_decode: ["steps that give its tokens", "var(--executor)"],
  kv: ["waiting for KV blocks from a tier or another replica", "var(--admission)"],
  overhead: ["the engine's own work and transport: checks, tokenising, planning, gaps", mix("text-3", 35)],
  delivery: ["from the last token to the gateway's answer", "var(--streaming)"],
  slow_client: ["the client does not read its answer", mix("streaming", 55)],
};

/** The name of a cause, as `top` writes it. */
export const causeName = (cause) => cause.replaceAll("_", " ");

const shown = (cause) => ({ name: causeName(cause), about: CAUSES[cause]?.[0] ?? "", color: CAUSES[cause]?.[1] ?? "var(--text-3)" });

const named = (time) => Object.entries(time).filter(([, ns]) => ns > 0).map(([cause, ns]) => ({ ...shown(cause), ns }));
const sum = (found) => found.reduce((all, { ns }) => all + ns, 0);

const bar = (found) => h("div", { class: "bar", "aria-hidden": "true" }, found.map(({ color, ns }) => h("i", { style: { width: `${(ns / sum(found)) * 100}%`, background: color } })));

const table = (found) => h("table", null, h("tbody", null,
  found.map(({ name, about, color, ns }) => h("tr", { title: about }, h("td", null, h("span", { class: "legend" }, h("span", null, h("i", { style: { background: color } }), name))), h("td", { class: "num" }, duration(ns)), h("td", { class: "num muted" }, percent(ns / sum(found))))),
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
  const found = Object.keys(CAUSES).filter((cause) => load[`time_${cause}`]).map((cause) => ({ ...shown(cause), share: load[`time_${cause}`] / 1000 }));
  if (!found.length) return null;
  return h("div", { class: "causes meter" },
    h("div", { class: "bar", role: "img", "aria-label": "Time of the last requests by cause" }, found.map(({ color, share }) => h("i", { style: { width: `${share * 100}%`, background: color } }))),
    h("p", { class: "legend" }, found.map(({ name, about, color, share }) => h("span", { title: about }, h("i", { style: { background: color } }), `${name} ${percent(share)}`))));
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
