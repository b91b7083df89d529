// Numbers and times for people.

export const number = (value) => (value ?? 0).toLocaleString("en-US", { maximumFractionDigits: value < 10 && value % 1 ? 1 : 0 });

export function duration(ns) {
  if (ns === undefined || ns === null || !Number.isFinite(ns)) return "–";
  const ms = ns / 1e6;
  if (ms < 1) return `${(ns / 1e3).toFixed(0)} µs`;
  if (ms < 10) return `${ms.toFixed(1)} ms`;
  if (ms < 1000) return `${ms.toFixed(0)} ms`;
  if (ms < 60_000) return `${(ms / 1e3).toFixed(ms < 10_000 ? 2 : 1)} s`;
  return ms < 7.2e6 ? `${(ms / 6e4).toFixed(1)} min` : `${(ms / 3.6e6).toFixed(1)} h`;
}

export function clock(ns) {
  return ns ? new Date(ns / 1e6).toLocaleTimeString("en-GB") : "–";
}

export function dateTime(ns) {
  return ns ? new Date(ns / 1e6).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "medium" }) : "–";
}

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  for (; value >= 1024 && at < units.length - 1; at++) value /= 1024;
  return `${at && value < 10 ? value.toFixed(1) : Math.round(value)} ${units[at]}`;
}

export function count(value) {
  if (value >= 1e9) return `${(value / 1e9).toFixed(1)}B`;
  if (value >= 1e6) return `${(value / 1e6).toFixed(1)}M`;
  return number(value);
}

export const percent = (share) => (share > 0 && share < 5e-4) ? "<0.1%" : `${(share * 100).toFixed(share > 0 && share < 0.1 ? 1 : 0)}%`;

/** A short form of a long id, of which the end tells most. */
export const shortId = (id) => (id.length > 14 ? `…${id.slice(-8)}` : id);
