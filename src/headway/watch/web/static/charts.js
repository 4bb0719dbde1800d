// Curves, drawn by uPlot: the mean of each part of a curve, a band from its smallest to its largest value, and on top
// a moving average.

import { duration, number, short } from "./format.js";

export const COLORS = ["#3b82f6", "#f59e0b", "#10b981", "#ef4444", "#8b5cf6", "#06b6d4", "#ec4899", "#84cc16"];
const HEIGHT = 220;
const POINTS = 500;

export const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// An exponential moving average without initial bias. It decays by distance and not by point, so that a curve with few
// points, such as one of validations, does not lag more.
export function smoothed(x, values, smoothing) {
  const unit = (x[x.length - 1] - x[0]) / POINTS || 1;
  let total = 0;
  let weight = 0;
  return values.map((value, at) => {
    const decay = smoothing ** (at ? Math.max(0, x[at] - x[at - 1]) / unit : 1);
    total = decay * total + (1 - decay) * value;
    weight = decay * weight + (1 - decay);
    return weight ? total / weight : value;
  });
}

export function axisValues(curve, axis) {
  if (axis === "time") return curve.time.map((time) => time - curve.began);
  return axis === "samples" && curve.samples ? curve.samples : curve.step;
}

// uPlot needs x to grow: two points of a clock that was set back are one.
function growing(columns) {
  const keep = [];
  let last = -Infinity;
  columns[0].forEach((x, at) => {
    if (x > last) {
      keep.push(at);
      last = x;
    }
  });
  return keep.length === columns[0].length ? columns : columns.map((column) => keep.map((at) => column[at]));
}

const translucent = (color, alpha) =>
  color + Math.round(alpha * 255).toString(16).padStart(2, "0");

function tablesOf(curves, view) {
  const positive = (values) => (view.log ? values.map((value) => (value > 0 ? value : null)) : values);
  return curves.map((curve) => {
    const x = axisValues(curve, view.axis);
    const main = view.smoothing ? smoothed(x, curve.mean, view.smoothing) : curve.mean;
    const columns = [main, curve.mean, curve.high, curve.low].map(positive);
    return growing([x, ...columns]);
  });
}

function seriesOf(curves, view) {
  const found = [{}];
  const bands = [];
  for (const curve of curves) {
    const at = found.length;
    const dash = curve.dashed ? [6, 4] : undefined;
    const hidden = { points: { show: false }, spanGaps: true };
    found.push(
      { label: curve.label, stroke: curve.color, width: 2, dash, spanGaps: true, points: { size: 4, show: curve.step.length < 40 } },
      { stroke: view.smoothing ? translucent(curve.color, 0.35) : "transparent", width: 1, ...hidden },
      { stroke: "transparent", width: 0, ...hidden },
      { stroke: "transparent", width: 0, ...hidden },
    );
    bands.push({ series: [at + 2, at + 3], fill: translucent(curve.color, 0.13) });
  }
  return { series: found, bands };
}

const formatX = (axis) => (axis === "time" ? duration : short);

function options(host, curves, view, hooks) {
  const ink = style("--soft");
  const grid = { stroke: style("--line"), width: 1 };
  const font = "11px system-ui, sans-serif";
  const { series, bands } = seriesOf(curves, view);
  return {
    width: Math.max(200, host.clientWidth),
    height: HEIGHT,
    series,
    bands,
    legend: { show: false },
    padding: [10, 12, 0, 0],
    scales: {
      x: { time: false, range: view.range ? () => view.range : undefined },
      y: { distr: view.log ? 3 : 1 },
    },
    axes: [
      { stroke: ink, font, grid, ticks: grid, size: 28, label: view.axis, labelSize: 16, labelFont: font, labelGap: 0, values: (_, ticks) => ticks.map(formatX(view.axis)) },
      { stroke: ink, font, grid, ticks: grid, size: 60, values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : number(tick, 3))) },
    ],
    cursor: { sync: { key: "curves" }, drag: { x: true, y: false, setScale: false }, focus: { prox: 24 }, bind: { dblclick: () => null } },
    hooks: {
      setSelect: [
        (plot) => {
          if (plot.select.width < 4) return;
          const [from, to] = [plot.select.left, plot.select.left + plot.select.width].map((x) => plot.posToVal(x, "x"));
          plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
          hooks.zoom([from, to]);
        },
      ],
      setCursor: [(plot) => hooks.point(plot.cursor.idx === null ? null : readings(plot, curves))],
    },
  };
}

// What is under the cursor: the value of each curve at or before it.
function readings(plot, curves) {
  const x = plot.posToVal(plot.cursor.left, "x");
  const values = curves.map((_, number) => {
    const column = plot.data[1 + 4 * number];
    let at = plot.cursor.idx;
    while (at > 0 && (column[at] === null || column[at] === undefined)) at -= 1;
    return column[at] ?? null;
  });
  return { x, values };
}

// Draws curves into `host`; a redraw with the same settings keeps the plot.
export class CurveChart {
  constructor(host, hooks) {
    this.host = host;
    this.hooks = hooks;
    this.plot = null;
    this.kind = "";
    host.addEventListener("dblclick", () => hooks.zoom(null));
    this.observer = new ResizeObserver(() => this.plot?.setSize({ width: Math.max(200, host.clientWidth), height: HEIGHT }));
    this.observer.observe(host);
  }

  draw(curves, view) {
    const shown = curves.filter((curve) => curve.step.length);
    const hasPositive = shown.some((curve) => curve.mean.some((value) => value > 0));
    const used = { ...view, log: view.log && hasPositive };
    const kind = JSON.stringify([shown.map((each) => [each.label, each.color, each.step.length < 40]), used, document.documentElement.dataset.theme]);
    const tables = tablesOf(shown, used);
    const data = tables.length ? (tables.length > 1 ? uPlot.join(tables) : tables[0]) : [[]];
    if (this.plot && kind === this.kind) {
      this.plot.setData(data);
      return;
    }
    this.plot?.destroy();
    this.kind = kind;
    this.plot = shown.length ? new uPlot(options(this.host, shown, used, this.hooks), data, this.host) : null;
  }

  close() {
    this.observer.disconnect();
    this.plot?.destroy();
  }
}
