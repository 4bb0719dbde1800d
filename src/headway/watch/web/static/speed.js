// Where the time of a step goes, over time; and the ranks: which one was slow, and when.

import { get, newestOnly } from "./api.js";
import { PHASES, rankRows, table } from "./blocks.js";
import { style } from "./charts.js";
import { item } from "./curves.js";
import { h, replace, select } from "./dom.js";
import { clock, count, percent, seconds, short } from "./format.js";

const CELL_MIN = 3;
const CELL_MAX = 18;
const HEIGHT = 220;
const REFRESH_MS = 5000;

export function speedTab(host, { key }) {
  const breakdown = h("div", { class: "plot" });
  const legend = h("p", { class: "legend" });
  const heat = h("canvas", { role: "img", "aria-label": "ranks over time" });
  const reading = h("p", { class: "soft", role: "status" }, "");
  const failed = h("p", { class: "soft", role: "status" }, "");
  const colors = h("p", { class: "legend", "aria-label": "colors" });
  const ranks = h("div", {});
  let what = "own";
  let plot = null;
  let map = null;
  let timer = null;
  const kinds = [["own", "own time, relative to the median"], ["data", "waiting for data"]];
  const chooser = select("what the colors mean", kinds, what, (value) => {
    what = value;
    read();
  });
  replace(
    host,
    h("section", { class: "card" }, h("h2", {}, "Seconds per step"), breakdown, legend),
    h("section", { class: "card" }, h("h2", {}, "Ranks over the newest log points"), chooser, h("div", { class: "scroll" }, heat), colors, reading, failed),
    h("section", { class: "card" }, h("h2", {}, "Ranks, the slowest first"), ranks),
  );

  const newest = newestOnly();
  async function read() {
    clearTimeout(timer);
    const requests = [get("phases", { run: key, points: 400 }), get("ranks", { run: key, what })];
    await newest.show(Promise.all(requests), ([found, cells]) => {
      plot?.destroy();
      plot = drawPhases(breakdown, legend, found.phases);
      map = cells;
      drawHeat(heat, cells, what);
      replace(colors, [0, 0.3, 1].map((part) => item(colorOf(part), what === "own" ? `${1 + part}×` : percent(part))));
      failed.textContent = "";
    }, (error) => (failed.textContent = error.message));
    timer = null;
  }

  heat.addEventListener("mousemove", (event) => {
    const cell = map && cellAt(heat, map, event);
    if (!cell) return;
    const value = cell.value === null ? "nothing recorded" : what === "own" ? `${cell.value.toFixed(2)}× the median` : percent(cell.value);
    reading.textContent = `rank ${cell.rank}, step ${count(cell.step)} at ${clock(cell.time)}: ${value}`;
  });
  const onTheme = () => read();
  window.addEventListener("theme", onTheme);
  read();
  let step = null;
  return {
    update: (state) => {
      const heads = ["rank", "own time", "data wait", "memory", "GPU", "heat", "host", ""];
      replace(ranks, state.ranks.length ? table(heads, rankRows(state.ranks)) : h("p", { class: "soft" }, "no log point yet"));
      if (step !== null && step !== state.header.step && timer === null) timer = setTimeout(read, REFRESH_MS);
      step = state.header.step;
    },
    close: () => {
      newest.cancel();
      clearTimeout(timer);
      plot?.destroy();
      window.removeEventListener("theme", onTheme);
    },
  };
}

function drawPhases(host, legend, phases) {
  const known = Object.keys(PHASES).filter((phase) => phases[phase]?.high.some((value) => value > 0));
  replace(legend, known.map((phase) => h("span", { class: "item" }, h("i", { class: "key", styles: { background: PHASES[phase][1] } }), PHASES[phase][0])));
  if (!known.length) {
    replace(host, h("p", { class: "soft" }, "no log point yet"));
    return null;
  }
  replace(host);
  const joined = uPlot.join(known.map((phase) => [phases[phase].step, phases[phase].mean]));
  let below = joined[0].map(() => 0);
  const stacked = joined.slice(1).map((column) => (below = column.map((value, at) => below[at] + (value ?? 0))));
  const order = known.map((_, at) => known.length - 1 - at); // the highest first: each covers what is below it
  const grid = { stroke: style("--line"), width: 1 };
  const axis = { stroke: style("--soft"), font: "11px system-ui, sans-serif", grid, ticks: grid };
  return new uPlot({
    width: Math.max(200, host.clientWidth),
    height: HEIGHT,
    legend: { show: false },
    padding: [10, 12, 0, 0],
    cursor: { drag: { x: false, y: false } },
    scales: { x: { time: false }, y: { range: (_, __, high) => [0, high * 1.05 || 1] } },
    axes: [
      { ...axis, size: 28, values: (_, ticks) => ticks.map(short) },
      { ...axis, size: 70, values: (_, ticks) => ticks.map((tick) => (tick ? seconds(tick) : "0")) },
    ],
    series: [{}, ...order.map((at) => ({ stroke: PHASES[known[at]][1], fill: PHASES[known[at]][1], width: 0, points: { show: false } }))],
  }, [joined[0], ...order.map((at) => stacked[at])], host);
}

function layoutOf(canvas, map) {
  const room = Math.max(200, canvas.parentElement.clientWidth - 48);
  const width = Math.min(24, Math.max(2, Math.floor(room / Math.max(1, map.steps.length))));
  const height = Math.min(CELL_MAX, Math.max(CELL_MIN, Math.floor(480 / Math.max(1, map.ranks.length))));
  return { left: 44, bottom: 18, width, height };
}

function drawHeat(canvas, map, what) {
  const { left, bottom, width, height } = layoutOf(canvas, map);
  const scale = window.devicePixelRatio || 1;
  const [wide, high] = [left + width * map.steps.length + 4, height * map.ranks.length + bottom];
  Object.assign(canvas.style, { width: `${wide}px`, height: `${high}px` });
  canvas.width = wide * scale;
  canvas.height = high * scale;
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  map.ranks.forEach((values, rank) => {
    values.forEach((value, at) => {
      pen.fillStyle = value === null ? style("--card") : colorOf(what === "own" ? (value - 1) / 1 : value);
      pen.fillRect(left + at * width, rank * height, Math.max(1, width - 0.5), Math.max(1, height - (height > 4 ? 1 : 0)));
    });
  });
  pen.fillStyle = style("--soft");
  pen.font = "11px system-ui, sans-serif";
  pen.textBaseline = "middle";
  pen.textAlign = "right";
  const every = Math.max(1, Math.ceil(14 / height));
  for (let rank = 0; rank < map.ranks.length; rank += every) pen.fillText(String(rank), left - 6, rank * height + height / 2);
  pen.textAlign = "left";
  if (map.steps.length) pen.fillText(`step ${short(map.steps[0])}`, left, high - bottom / 2);
  pen.textAlign = "right";
  if (map.steps.length > 8) pen.fillText(short(map.steps[map.steps.length - 1]), wide - 4, high - bottom / 2);
}

// From green to red: 0 is the median, 0.3 a straggler, 1 twice as slow.
function colorOf(value) {
  const part = Math.min(1, Math.max(0, value));
  const hue = 160 - 160 * Math.min(1, part * 1.6);
  const light = document.documentElement.dataset.theme === "dark" ? 26 + 26 * part : 84 - 30 * part;
  return `hsl(${hue} ${45 + 40 * part}% ${light}%)`;
}

function cellAt(canvas, map, event) {
  const { left, width, height } = layoutOf(canvas, map);
  const box = canvas.getBoundingClientRect();
  const at = Math.floor((event.clientX - box.left - left) / width);
  const rank = Math.floor((event.clientY - box.top) / height);
  if (!(at in map.steps) || !(rank in map.ranks)) return null;
  return { rank, step: map.steps[at], time: map.times[at], value: map.ranks[rank][at] };
}
