// A sweep: a metric against each setting that differs between its runs, and the runs from best to worst.

import { live } from "./api.js";
import { h, pill, replace, replaceOnce, s, select } from "./dom.js";
import { keysOf } from "./compare.js";
import { number, setting } from "./format.js";
import { MAX_OVERLAID, differing, metricNames } from "./runs.js";

const [WIDTH, HEIGHT, LEFT, BOTTOM] = [360, 220, 56, 34];

export function showSweep(main, { key, title }) {
  const chosen = key.startsWith("of/") ? keysOf(key.slice(3)) : null;
  title(chosen ? `${chosen.length} runs` : `sweep ${key}`);
  let runs = [];
  let view = { metric: null, which: "best" };
  const tools = h("div", { class: "controls" });
  const plots = h("div", { class: "panels" });
  const missing = h("p", { class: "soft" });
  const rows = h("div", {});
  replace(main, h("div", { class: "title" }, h("h1", {}, chosen ? "Settings against a metric" : `Sweep ${key}`)), tools, plots, missing, h("section", { class: "card" }, rows));

  const value = (run) => {
    const metric = run.metrics[view.metric];
    const found = metric && (view.which === "best" && metric.best !== null ? metric.best : metric.last);
    return typeof found === "number" ? found : null;
  };
  const draw = () => {
    const names = metricNames(runs);
    const usual = names.find((name) => /^(val|test|eval)/.test(name) && runs.some((run) => run.metrics[name]?.better)) ?? names[0];
    if (!names.includes(view.metric)) view.metric = usual ?? null;
    const set = (changes) => {
      view = { ...view, ...changes };
      draw();
    };
    replaceOnce(tools, [names, view, runs.map((run) => run.key)], () => [
      select("metric", names.map((name) => [name, name]), view.metric, (metric) => set({ metric })),
      select("which value", [["best", "best value"], ["last", "newest value"]], view.which, (which) => set({ which })),
      h("span", { class: "soft" }, `${runs.length} runs`),
      runs.length > 1 && h("a", { class: "button", href: `#/compare/${encodeURIComponent(runs.slice(0, MAX_OVERLAID).map((run) => encodeURIComponent(run.key)).join("/"))}` }, runs.length > MAX_OVERLAID ? `overlay curves of the first ${MAX_OVERLAID}` : "overlay curves"),
    ]);
    const settings = differing(runs);
    const better = runs.find((run) => run.metrics[view.metric])?.metrics[view.metric].better;
    const sorted = [...runs].sort((a, b) => ((value(a) ?? Infinity) - (value(b) ?? Infinity)) * (better === "max" ? -1 : 1));
    const known = sorted.filter((run) => value(run) !== null);
    replace(plots, settings.length ? settings.map((name) => scatter(name, known, value, view.metric)) : h("p", { class: "soft" }, "the settings of these runs do not differ"));
    const without = sorted.filter((run) => value(run) === null).map((run) => run.id);
    replace(missing, settings.length && view.metric && without.length ? `not drawn, for ${view.metric} has no finite value: ${without.join(", ")}` : "");
    replace(rows, h("div", { class: "scroll" }, h("table", {},
      h("thead", {}, h("tr", {}, ["run", "state", view.metric ?? "", ...settings].map((text) => h("th", {}, text)))),
      h("tbody", {}, [...known, ...sorted.filter((run) => value(run) === null)].map((run, at) => h("tr", { class: at === 0 && better ? "best" : "" },
        h("td", {}, h("a", { href: `#/run/${encodeURIComponent(run.key)}` }, run.id)), h("td", {}, pill(run.state)),
        h("td", { class: "number" }, number(value(run))), settings.map((name) => h("td", {}, name in run.settings ? setting(run.settings[name]) : ""))))))));
  };
  return live(null, (found) => {
    runs = found.filter((run) => (chosen ? chosen.includes(run.key) : run.sweep === key || run.id === key));
    draw();
  });
}

// Places of the values of a setting from 0 to 1: numbers to scale (or their logarithms), others beside each other.
function scaleOf(values) {
  const numbers = values.map((value) => (typeof value === "boolean" || value === null || value === "" ? NaN : Number(value)));
  if (numbers.every(Number.isFinite)) {
    const [low, high] = [Math.min(...numbers), Math.max(...numbers)];
    const log = low > 0 && high / low >= 9;
    const at = (value) => (log ? Math.log(value) : value);
    const span = at(high) - at(low) || 1;
    const ticks = [...new Set(numbers)].sort((a, b) => a - b).map((value) => [(at(value) - at(low)) / span, number(value, 3)]);
    return { place: (value) => (at(Number(value)) - at(low)) / span, ticks, note: log ? " (log)" : "" };
  }
  const names = [...new Set(values.map(setting))].sort();
  const part = (index) => (names.length > 1 ? index / (names.length - 1) : 0.5);
  return { place: (value) => part(names.indexOf(setting(value))), ticks: names.map((name, at) => [part(at), name.slice(0, 12)]), note: "" };
}

function scatter(name, runs, value, metric) {
  const shown = runs.filter((run) => name in run.settings);
  const scale = scaleOf(shown.map((run) => run.settings[name]));
  const values = shown.map(value);
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const x = (run) => LEFT + 10 + scale.place(run.settings[name]) * (WIDTH - LEFT - 24);
  const y = (at) => 12 + (1 - (at - low) / (high - low || 1)) * (HEIGHT - BOTTOM - 24);
  const svg = s("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, class: "scatter", role: "img", "aria-label": `${metric} against ${name}` });
  for (const part of shown.length ? [low, (low + high) / 2, high] : []) {
    svg.append(s("line", { x1: LEFT, x2: WIDTH - 4, y1: y(part), y2: y(part), class: "grid" }), s("text", { x: LEFT - 6, y: y(part) + 4, "text-anchor": "end" }, number(part, 3)));
  }
  const every = Math.ceil(scale.ticks.length / 6);
  scale.ticks.filter((_, at) => at % every === 0).forEach(([place, text]) => {
    const anchor = place === 0 ? "start" : place === 1 ? "end" : "middle";
    svg.append(s("text", { x: LEFT + 10 + place * (WIDTH - LEFT - 24), y: HEIGHT - 14, "text-anchor": anchor }, text));
  });
  shown.map((run, at) => [run, at]).reverse().forEach(([run, at]) => { // the best one on top
    const dot = s("circle", { cx: x(run).toFixed(1), cy: y(value(run)).toFixed(1), r: at === 0 ? 6 : 4.5, class: at === 0 ? "dot first" : "dot" },
      s("title", {}, `${run.id}\n${name} = ${setting(run.settings[name])}\n${metric} = ${number(value(run))}`));
    dot.addEventListener("click", () => (location.hash = `#/run/${encodeURIComponent(run.key)}`));
    svg.append(dot);
  });
  return h("figure", { class: "panel", "data-setting": name }, h("h3", {}, `${name}${scale.note}`), svg);
}
