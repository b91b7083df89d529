// The live state: one stream of snapshots for all views of this tab, none while the tab is hidden.

import { call, events, pause } from "./api.js";

const POINTS = 600;

class Feed extends EventTarget {
  latest = null;
  before = null;
  points = [];
  state = "connecting";
  #stop = null;

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

  #take({ name, data }) {
    const found = JSON.parse(data);
    if (name === "history") {
      const last = this.points.at(-1)?.[0] ?? 0;
      // After a new connection the own points go on.
      this.points = [...(found.length ? found.filter((each) => each[0] > last) : []), ...this.points].sort((a, b) => a[0] - b[0]).slice(-POINTS);
      return;
    }
    this.before = this.latest;
    this.latest = found;
    this.points.push(pointOf(found));
    if (this.points.length > POINTS) this.points.shift();
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

/** The same point as the gateway's: time, tokens/s, in flight, queued, running, KV used and in all, weight version. */
export function pointOf({ at_ms: at, status }) {
  if (!status) return [at, null, null, null, null, null, null, null];
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

export const feed = new Feed();
