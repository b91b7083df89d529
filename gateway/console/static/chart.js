// Charts over time, by uPlot.

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** Draw a chart of series {label, color (a CSS variable), step}; returns {update(rows), destroy()}. */
export function chart(element, series, { unit = "", signal, min } = {}) {
  let plot = null;
  let data = [[], ...series.map(() => [])];
  const format = (value) => (value >= 1e6 ? `${value / 1e6}M` : value >= 1e4 ? `${value / 1e3}k` : value.toLocaleString("en-US"));
  function build() {
    plot?.destroy();
    const grid = { stroke: color("--line"), width: 1 };
    const font = `11px ${color("--sans")}`;
    const axis = { stroke: color("--text-3"), font, grid, ticks: { show: false } };
    plot = new window.uPlot({
      width: Math.max(120, element.clientWidth), height: 150, padding: [8, 6, 0, 0], legend: { show: false }, cursor: { drag: { x: false, y: false }, points: { size: 6 } },
      scales: { x: { time: true }, y: { range: (_, low, high) => [Math.min(low ?? 0, min ?? 0), Math.max(high ?? 0, (min ?? 0) + 1) * 1.08] } },
      axes: [{ ...axis, size: 24, space: 70, values: (_, splits) => splits.map((at) => new Date(at * 1000).toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" })) }, { ...axis, size: 46, space: 34, values: (_, splits) => splits.map((value) => (value % 1 && min !== undefined ? "" : format(value) + unit)) }],
      series: [{}, ...series.map((each) => ({ label: each.label, stroke: color(each.color), width: 1.5, fill: each.fill ? `color-mix(in srgb, ${color(each.color)} 12%, transparent)` : undefined, points: { show: false }, spanGaps: false, paths: each.step ? window.uPlot.paths.stepped({ align: 1 }) : undefined }))],
    }, data, element);
  }
  build();
  const observer = new ResizeObserver(() => plot.setSize({ width: Math.max(120, element.clientWidth), height: 150 }));
  observer.observe(element);
  document.addEventListener("theme", build, { signal });
  signal.addEventListener("abort", () => { observer.disconnect(); plot.destroy(); });
  return { update: (rows) => { data = rows; plot.setData(rows); } };
}
