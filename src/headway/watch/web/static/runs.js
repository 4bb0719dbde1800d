// The list of runs: states, sparklines, settings that differ; filter, sort, and select runs to overlay.

import { live, remember, remembered } from "./api.js";
import { h, pill, replace, replaceOnce, search, select, sparkline } from "./dom.js";
import { clock, count, duration, number, setting } from "./format.js";

const MAX_SETTINGS = 4;
const MAX_METRICS = 2;
export const MAX_OVERLAID = 8;

// "lr>0.001 model.depth=12 failed": each word must match; one without a comparison is searched in names and states.
export function matches(run, text) {
  return text.trim().split(/\s+/).filter(Boolean).every((word) => {
    const found = word.match(/^([^=<>!]+)(<=|>=|!=|=|<|>)(.+)$/);
    if (!found) {
      const all = [run.id, run.name, run.state, run.why, run.job ?? "", ...Object.entries(run.settings).map(([name, value]) => `${name}=${setting(value)}`)];
      return all.some((each) => each.toLowerCase().includes(word.toLowerCase()));
    }
    const [, name, how, wanted] = found;
    const value = valueOf(run, name);
    if (value === undefined) return how === "!=";
    const [a, b] = [Number(value), Number(wanted)];
    const numeric = value !== null && value !== "" && typeof value !== "boolean" && Number.isFinite(a) && Number.isFinite(b);
    if (how === "=") return numeric ? a === b : String(value) === wanted;
    if (how === "!=") return numeric ? a !== b : String(value) !== wanted;
    return numeric && { "<": a < b, ">": a > b, "<=": a <= b, ">=": a >= b }[how];
  });
}

function valueOf(run, name) {
  if (name in run.settings) return run.settings[name];
  if (name in run.metrics) return run.metrics[name].last;
  if (["state", "name", "step", "job", "sweep"].includes(name)) return run[name] ?? "";
  const ending = Object.keys(run.settings).filter((each) => each.endsWith(`.${name}`));
  return ending.length === 1 ? run.settings[ending[0]] : undefined;
}

export function differing(runs) {
  const values = new Map();
  for (const run of runs) {
    for (const [name, value] of Object.entries(run.settings)) values.set(name, (values.get(name) ?? new Set()).add(JSON.stringify(value)));
  }
  return [...values].filter(([name, found]) => found.size > 1 || runs.some((run) => !(name in run.settings))).map(([name]) => name);
}

// The names of all metrics, in the order in which runs list them.
export function metricNames(runs) {
  return [...new Set(runs.flatMap((run) => Object.keys(run.metrics)))];
}

export const score = (metric) => (metric ? (typeof metric.best === "number" ? metric.best : metric.last) : null);

const KINDS = { min: "lowest", max: "highest" };

// Whether `score` is the lowest, the highest or the last value of a metric.
const kindOf = (name, runs) => KINDS[runs.find((run) => run.metrics[name])?.metrics[name].better] ?? "last";

const isBusy = (run) => Number(["running", "queued"].includes(run.state));

function ordered(runs, sort) {
  if (sort === "newest") return [...runs].sort((a, b) => isBusy(b) - isBusy(a) || b.created - a.created);
  const direction = runs.find((run) => run.metrics[sort])?.metrics[sort].better === "max" ? -1 : 1;
  const value = (run) => {
    const found = score(run.metrics[sort]);
    return typeof found === "number" ? direction * found : Infinity;
  };
  return [...runs].sort((a, b) => value(a) - value(b));
}

export function showRuns(main, { title }) {
  title("");
  let runs = null;
  let view = { sort: "newest", ...remembered("runs", {}), filter: "" };
  let visible = [];
  const chosen = new Set();
  const tools = h("div", { class: "controls" });
  const body = h("div", {}, h("p", { class: "soft" }, "reading runs…"));
  const actions = h("div", { class: "actions", hidden: true });
  const note = h("span", { class: "soft" });
  const sorter = h("span", {});
  const change = (changes) => {
    view = { ...view, ...changes };
    remember("runs", { sort: view.sort }); // a filter that is remembered would hide runs
    draw();
  };
  tools.append(search("filter: name, state, lr>0.001", (filter) => change({ filter }), view.filter), sorter, note);
  replace(main, h("div", { class: "title" }, h("h1", {}, "Runs")), tools, actions, body);

  const draw = () => {
    if (!runs) return;
    const names = metricNames(runs);
    const options = [["newest", "running, then newest"], ...names.map((name) => [name, `by ${name}`])];
    const sort = names.includes(view.sort) ? view.sort : "newest";
    replaceOnce(sorter, [options, sort], () => select("sort", options, sort, (chosen) => change({ sort: chosen })));
    const shown = ordered(runs.filter((run) => matches(run, view.filter)), sort);
    note.textContent = shown.length === runs.length ? `${count(runs.length)} runs` : `${count(shown.length)} of ${count(runs.length)} runs`;
    visible = shown;
    drawActions(shown);
    if (!runs.length) replace(body, h("p", {}, "There is no run here yet. Start one: ", h("code", {}, "headway run train.py")));
    else replace(body, list(shown, names, runs));
  };

  const drawActions = (shown) => {
    const keys = shown.filter((run) => chosen.has(run.key)).map((run) => run.key);
    const joined = keys.map(encodeURIComponent).join("/");
    const sweeps = [...new Set(shown.map((run) => run.sweep).filter(Boolean))];
    actions.hidden = keys.length < 2 && !sweeps.length;
    replace(actions,
      keys.length > 1 && h("a", { class: "button", href: `#/compare/${encodeURIComponent(joined)}` }, `overlay ${keys.length > MAX_OVERLAID ? `the first ${MAX_OVERLAID} of ` : ""}${keys.length} runs`),
      keys.length > 1 && h("a", { class: "button", href: `#/sweep/${encodeURIComponent(`of/${joined}`)}` }, "settings against a metric"),
      sweeps.slice(0, 12).map((id) => h("a", { class: "button", href: `#/sweep/${encodeURIComponent(id)}` }, `sweep ${id}`)));
  };

  const list = (shown, names, all) => {
    const settings = differing(all).slice(0, MAX_SETTINGS);
    const metrics = [...new Set([...(view.sort === "newest" ? [] : [view.sort]), ...names])].filter((name) => names.includes(name)).slice(0, MAX_METRICS);
    const heads = ["", "state", "run", "", ...metrics.map((name) => `${kindOf(name, all)} ${name}`), "step", "time", ...settings, "created"];
    return h("div", { class: "scroll" }, h("table", { class: "runs" },
      h("thead", {}, h("tr", {}, heads.map((text) => h("th", {}, text)))),
      h("tbody", {}, shown.map((run) => row(run, metrics, settings)))));
  };

  const row = (run, metrics, settings) => {
    const box = h("input", {
      type: "checkbox", checked: chosen.has(run.key), "aria-label": `choose ${run.id}`,
      onchange: (event) => {
        if (event.target.checked) chosen.add(run.key);
        else chosen.delete(run.key);
        drawActions(visible);
      },
    });
    const spark = run.metrics[metrics[0]] ?? Object.values(run.metrics)[0];
    return h("tr", { "data-key": run.key },
      h("td", {}, box),
      h("td", { title: run.why }, pill(run.state)),
      h("td", {}, h("a", { href: `#/run/${encodeURIComponent(run.key)}` }, h("b", {}, run.name), h("small", {}, run.id.slice(run.name.length))), run.why && h("div", { class: "soft why" }, run.why)),
      h("td", {}, spark ? sparkline(spark.spark) : run.is_read ? null : h("span", { class: "soft" }, "reading…")),
      metrics.map((name) => h("td", { class: "number", "data-name": name, title: run.metrics[name] ? `last ${number(run.metrics[name].last)}` : "" }, number(score(run.metrics[name])))),
      h("td", { class: "number", "data-name": "step" }, count(run.step)),
      h("td", { class: "number", "data-name": "time" }, duration(run.seconds)),
      settings.map((name) => h("td", { "data-name": name }, name in run.settings ? setting(run.settings[name]) : "")),
      h("td", { class: "soft", "data-name": "created" }, clock(run.created)));
  };

  return live(null, (found) => {
    runs = found;
    draw();
  });
}
