// The live state: one stream of snapshots for all views of this tab, none while the tab is hidden.

import { call, events, json, pause } from "./api.js";

const SECONDS = 600;
const SECOND_MS = 1000;
const MINUTE_MS = 60_000;
/** Steps between two points from which on something is missing. */
const MISSED = 3.5;

class Feed extends EventTarget {
  latest = null;
  before = null;
  seconds = [];
  minutes = [];
  state = "connecting";
  /** Whether the points are all that the gateway has, from its start on. */
  whole = false;
  #stop = null;
  #read_ms = 0;

  start() {
    document.addEventListener("visibilitychange", () => (document.hidden ? this.#close() : this.#open()));
    if (!document.hidden) this.#open();
  }

  restart() {
    this.#close();
    this.#open();
  }

  /** Call a function with each snapshot until the signal aborts; at once with the latest. */
  on(listener, signal) {
    this.addEventListener("snapshot", () => listener(this.latest), { signal });
    if (this.latest) listener(this.latest);
  }

  #close() {
    this.#stop?.abort();
    this.#stop = null;
  }

  async #open() {
    if (this.#stop) return;
    const stop = (this.#stop = new AbortController());
    let failures = 0;
    while (!stop.signal.aborted) {
      try {
        const response = await call("console/events", { signal: stop.signal });
        for await (const event of events(response)) {
          if (stop.signal.aborted) return;
          failures = 0;
          this.#take(event);
        }
        // The gateway ends a stream after a minute, so that a revoked key ends, too.
      } catch (error) {
        if (stop.signal.aborted) return;
        failures += 1;
        this.#is(error.status === 401 || error.status === 403 ? "refused" : "lost");
        if (this.state === "refused") { this.#stop = null; return; }
      }
      if (failures) await pause(Math.min(5000, 400 * 2 ** failures) * (0.75 + Math.random() / 2), stop.signal);
    }
  }

  /** Read what was before this page, and what it has missed, if that may be news: at most once a minute, but after a gap. Returns whether it did. */
  async history() {
    const [last, before] = [this.seconds.at(-1)?.[0] ?? 0, this.seconds.at(-2)?.[0] ?? 0];
    if (last - before < MISSED * SECOND_MS && Date.now() - this.#read_ms < MINUTE_MS) return false;
    this.#read_ms = Date.now();
    const { seconds, minutes } = await json("console/history").catch((error) => { this.#read_ms = 0; throw error; });
    const until = seconds.at(-1)?.[0] ?? 0;
    this.whole = seconds.length > 0;
    // Empty for a key of some models, whose own points are all that there is.
    this.seconds = [...seconds, ...this.seconds.filter(([at]) => at > until)].slice(-SECONDS);
    this.minutes = minutes;
    return true;
  }

  /** Return the points of the last so many minutes: a point a second up to ten, else one a minute, and one a minute before the first second. Where some are missing there is an empty one. */
  during(minutes) {
    const step = minutes * 60 <= SECONDS || !this.minutes.length ? SECOND_MS : MINUTE_MS;
    const until = this.seconds.at(-1)?.[0] ?? Date.now();
    const from = until - minutes * MINUTE_MS;
    const seconds = step === SECOND_MS ? this.seconds.filter(([at]) => at >= from) : [];
    const means = this.minutes.filter(([at]) => at >= from && (!seconds.length || at < seconds[0][0] - MINUTE_MS));
    const points = [];
    const began = seconds[0]?.[0] ?? Infinity;
    for (const point of [...means, ...seconds]) {
      const before = points.at(-1)?.[0];
      // The minute in which the gateway began has no mean here.
      const [missed, next] = before >= began ? [MISSED * SECOND_MS, SECOND_MS] : [(point[0] === began ? 2.5 : 1.5) * MINUTE_MS, MINUTE_MS];
      if (before && point[0] - before > missed) points.push([before + next]);
      points.push(point);
    }
    return { from, until, step, points, began: means.length && seconds.length ? began : 0 };
  }

  #take({ data }) {
    this.before = this.latest;
    this.latest = JSON.parse(data);
    this.seconds.push(pointOf(this.latest));
    if (this.seconds.length > SECONDS) this.seconds.shift();
    this.#is("live");
    this.dispatchEvent(new Event("snapshot"));
  }

  #is(state) {
    if (state !== this.state) {
      this.state = state;
      this.dispatchEvent(new Event("state"));
    }
  }
}

/** The same point as the gateway's: time, tokens/s, in flight, not started, running, KV used and in all, weight version. */
export function pointOf({ at_ms: at, status }) {
  if (!status) return [at];
  let rate = 0, running = 0, free = 0, total = 0, version = 0;
  for (const lane of status.lanes) {
    for (const { load } of Object.values(lane.stages)) {
      rate += load.tokens_per_s ?? 0;
      running += load.running ?? 0;
      free += load.kv_free ?? 0;
      total += load.kv_total ?? 0;
      version = Math.max(version, load.weight_version ?? 0);
    }
  }
  return [at, rate, status.in_flight, status.queue_length, running, total - free, total, version];
}

/** What a model does before its first answer, "tiny is loading, 45 %"; "" if it has a lane that works, or for another reason has none. */
export function loadingOf(status, model) {
  const lanes = (status?.lanes ?? []).filter((lane) => !lane.model || lane.model === model);
  if (lanes.some((lane) => lane.ready)) return "";
  const starting = lanes.flatMap((lane) => Object.entries(lane.stages)).filter(([role, { state }]) => role.startsWith("executor") && state === "starting");
  if (!starting.length && status?.models?.[model] !== "loading") return "";
  const shares = starting.map(([, { load }]) => load.loaded).filter((share) => share !== undefined);
  return `${model || "The model"} is loading${shares.length ? `, ${Math.floor(Math.min(...shares) * 100)} %` : ""}`;
}

export const feed = new Feed();
