// Charts over time, by uPlot.

import { h, put } from "./dom.js";
import { number } from "./format.js";

const HEIGHT = 150;
const DAY_S = 86_400;
/** Seconds between marks of the time axis; whole numbers between those of the other. */
const TIMES = [1, 5, 10, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10_800, 14_400, 21_600, 43_200, DAY_S];
const WHOLE = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11].flatMap((zeros) => [1, 2, 5].map((digit) => digit * 10 ** zeros));

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const short = (value) => (Math.abs(value) >= 1e6 ? `${value / 1e6}M` : Math.abs(value) >= 1e4 ? `${value / 1e3}k` : number(value));

/** A moment on an axis: the day at midnight, seconds where they count. */
function moment(at_s, exact) {
  const at = new Date(at_s * 1000);
  if (!exact && !at.getHours() && !at.getMinutes()) return at.toLocaleDateString("en-GB", { day: "numeric", month: "short" });
  return at.toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit", ...(exact ? { second: "2-digit" } : {}) });
}

/** Draw a chart of series {label, color (a CSS variable), step, fill}, all of one unit; `level`: not from 0 on. Returns {legend, update(times, values, from, until), say(text)}. */
export function chart(element, title, series, { unit = "", signal, level = false } = {}) {
  let plot = null;
  let data = [[], ...series.map(() => [])];
  let [from, until, exact] = [0, 1, true];
  const values = series.map(() => h("b", { class: "num" }, "–"));
  const time = h("span", { class: "num muted" });
  const legend = h("div", { class: "legend" }, time, series.map((each, index) => h("span", null, h("i", { style: { background: `var(${each.color})` } }), each.label, values[index])));
  /** Show the values at the pointer, else the latest. */
  function read() {
    const at = plot?.cursor.idx ?? null;
    const place = at ?? data[0].length - 1;
    put(time, at === null ? "" : moment(data[0][at], exact));
    series.forEach((_, index) => { const value = data[index + 1][place]; put(values[index], value === null || value === undefined ? "–" : `${number(value)}${unit}`); });
  }
  function build() {
    plot?.destroy();
    const axis = { stroke: color("--text-3"), font: `11px ${color("--sans")}`, grid: { stroke: color("--line"), width: 1 }, ticks: { show: false } };
    const range = (_, low, high) => (level ? [Math.max(0, (low ?? 0) - 1), (high ?? 0) + 1] : [0, Math.max(high ?? 0, 1) * 1.08]);
    plot = new window.uPlot({
      width: Math.max(120, element.clientWidth), height: HEIGHT, padding: [8, 26, 0, 0], legend: { show: false },
      cursor: { drag: { x: false, y: false }, points: { size: 6 }, sync: { key: "time" } }, hooks: { setCursor: [read] },
      scales: { x: { time: true, range: () => [from, until] }, y: { range } },
      axes: [{ ...axis, size: 24, space: 66, incrs: TIMES, values: (_, splits) => splits.map((each) => moment(each, exact)) }, { ...axis, size: 46, space: 26, incrs: WHOLE, values: (_, splits) => splits.map((value) => short(value) + unit) }],
      series: [{}, ...series.map((each) => ({ label: each.label, stroke: color(each.color), width: 1.5, fill: each.fill ? `color-mix(in srgb, ${color(each.color)} 12%, transparent)` : undefined, points: { show: () => data[0].length < 4, size: 5 }, spanGaps: false, paths: each.step ? window.uPlot.paths.stepped({ align: 1 }) : undefined }))],
    }, data, element);
  }
  build();
  const observer = new ResizeObserver(() => plot.setSize({ width: Math.max(120, element.clientWidth), height: HEIGHT }));
  observer.observe(element);
  document.addEventListener("theme", build, { signal });
  signal.addEventListener("abort", () => { observer.disconnect(); plot.destroy(); });
  return {
    legend,
    update(times, columns, start, end) {
      [from, until, exact] = [start, end, end - start < DAY_S / 24];
      data = [times, ...columns];
      plot.setData(data);
      read();
      const said = series.map((each, index) => { const known = columns[index].filter((value) => value !== null && value !== undefined); return known.length ? `${each.label} ${number(known.at(-1))}${unit}, at most ${number(Math.max(...known))}${unit}` : `${each.label} unknown`; });
      element.setAttribute("aria-label", `${title}, ${moment(from, exact)} to ${moment(until, exact)}: ${said.join("; ")}`);
    },
  };
}
