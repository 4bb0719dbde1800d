// The panels of curves of one run or of several: controls, zoom, and what is read from the server.

import { get, remember, remembered } from "./api.js";
import { COLORS, CurveChart, axisValues } from "./charts.js";
import { h, replace, search, select } from "./dom.js";
import { duration, number, short } from "./format.js";

const PANELS = 12;
const POINTS = 500;
const REFRESH_MS = 2000;
const NAMES_PER_REQUEST = 32;
const NAMES_LENGTH = 6000; // the server refuses a query of more than 8192 bytes

// Training and validation of the same metric share a panel.
const groupOf = (name) => name.replace(/^(train|val|validation|test)\//, "");

function group(names) {
  const found = new Map();
  for (const name of names) {
    const key = groupOf(name);
    found.set(key, [...(found.get(key) ?? []), name]);
  }
  return found;
}

// Splits the names of metrics into parts that fit into a request.
function requestParts(names) {
  const parts = [];
  let length = 0;
  for (const name of names) {
    const more = `&${new URLSearchParams({ metric: name })}`.length;
    length += more;
    if (!parts.length || length > NAMES_LENGTH || parts[parts.length - 1].length === NAMES_PER_REQUEST) {
      parts.push([]);
      length = more;
    }
    parts[parts.length - 1].push(name);
  }
  return parts;
}

export class CurveGrid {
  // runs: [{key, label}]; with several, a color is a run, and validation is dashed
  constructor(runs) {
    this.runs = runs;
    this.names = [];
    this.view = { axis: "step", smoothing: 0.6, log: false, ...remembered("curves", {}), range: null };
    this.filter = "";
    this.showAll = false;
    this.panels = new Map();
    this.known = new Map(); // curves by run and metric
    this.timer = null;
    this.isWhole = true;
    this.panelHost = h("div", { class: "panels" });
    this.none = h("p", { class: "soft" });
    this.note = h("span", { class: "soft" });
    this.more = h("button", { type: "button", hidden: true, onclick: () => this.set({}, () => (this.showAll = true)) });
    this.unzoom = h("button", { type: "button", hidden: true, onclick: () => this.zoom(null) }, "reset zoom");
    this.legend = h("div", { class: "legend" });
    this.host = h("div", { class: "curves" }, this.controls(), this.legend, this.panelHost, this.none, this.more);
    this.onTheme = () => this.draw();
    window.addEventListener("theme", this.onTheme);
  }

  controls() {
    const axes = [["step", "by step"], ["time", "by time"], ["samples", "by samples"]];
    const slider = h("input", {
      type: "range", min: 0, max: 0.99, step: 0.01, value: this.view.smoothing, "aria-label": "smoothing",
      oninput: (event) => this.set({ smoothing: Number(event.target.value) }),
    });
    const log = h("input", {
      type: "checkbox", checked: this.view.log, "aria-label": "log scale",
      onchange: (event) => this.set({ log: event.target.checked }),
    });
    return h(
      "div",
      { class: "controls" },
      search("find a metric", (text) => this.set({}, () => (this.filter = text))),
      select("x axis", axes, this.view.axis, (axis) => this.set({ axis, range: null }, () => this.read())),
      h("label", {}, "smoothing", slider),
      h("label", {}, log, "log scale"),
      this.unzoom,
      this.note,
    );
  }

  set(changes, also = () => {}) {
    Object.assign(this.view, changes);
    const { axis, smoothing, log } = this.view;
    remember("curves", { axis, smoothing, log });
    also();
    this.draw();
  }

  // Called with the names of all metrics whenever there may be new values.
  update(names) {
    const isNew = names.join("\n") !== this.names.join("\n");
    this.names = names;
    if (isNew) this.draw();
    if (this.timer === null) this.read();
  }

  shownGroups() {
    const wanted = this.filter.toLowerCase();
    const all = [...group(this.names)].filter(([, names]) => names.some((name) => name.toLowerCase().includes(wanted)));
    this.more.hidden = this.showAll || all.length <= PANELS;
    this.more.textContent = `show all ${all.length} panels`;
    return this.showAll ? all : all.slice(0, PANELS);
  }

  async read() {
    if (this.timer !== null) {
      this.again = true; // one request at a time
      return;
    }
    this.timer = 0;
    const begin = performance.now();
    const metric = this.shownGroups().flatMap(([, names]) => names);
    try {
      const whole = await Promise.all(this.runs.map((run) => this.readRun(run, metric)));
      this.isWhole = whole.every(Boolean);
      this.note.textContent = this.isWhole ? "" : "a sample of a long run; reading the rest…";
      this.draw();
    } catch (error) {
      this.note.textContent = String(error.message ?? error);
    }
    const pause = Math.max(REFRESH_MS, 5 * (performance.now() - begin)); // less often on a slow connection
    this.timer = setTimeout(() => {
      this.timer = null;
      if (this.again || !this.isWhole) {
        this.again = false;
        this.read();
      }
    }, pause);
  }

  // Returns whether all of a long run was read, and not a sample of it.
  async readRun(run, metric) {
    const [from, to] = this.stepsOf(run);
    const found = await Promise.all(
      requestParts(metric).map((names) => get("curves", { run: run.key, metric: names, points: POINTS, from, to })),
    );
    for (const part of found) {
      for (const curve of part.curves) this.know(run, curve, part.began ?? 0);
    }
    return found.every((part) => part.is_whole);
  }

  know(run, curve, began) {
    const id = `${run.key}\n${curve.name}`;
    const before = this.known.get(id);
    this.known.set(id, { ...curve, began, all: this.view.range ? before?.all : curve });
  }

  // Returns the steps of a run that are in the visible range.
  stepsOf(run) {
    const range = this.view.range;
    if (!range) return [undefined, undefined];
    if (this.view.axis === "step") return [Math.max(0, Math.floor(range[0])), Math.max(0, Math.ceil(range[1]))];
    const curves = [...this.known].filter(([id]) => id.startsWith(`${run.key}\n`)).map(([, curve]) => curve);
    const longest = curves.reduce((a, b) => ((b.all ?? b).step.length > ((a?.all ?? a)?.step.length ?? 0) ? b : a), null);
    if (!longest) return [undefined, undefined];
    const whole = { ...(longest.all ?? longest), began: longest.began };
    const x = axisValues(whole, this.view.axis);
    const inside = whole.step.filter((_, at) => x[at] >= range[0] && x[at] <= range[1]);
    return inside.length ? [inside[0], inside[inside.length - 1]] : [undefined, undefined];
  }

  zoom(range) {
    this.view.range = range;
    this.unzoom.hidden = range === null;
    this.draw();
    this.again = true;
    clearTimeout(this.timer);
    this.timer = null;
    this.read();
  }

  draw() {
    const groups = this.shownGroups();
    const wanted = new Set(groups.map(([key]) => key));
    for (const [key, panel] of this.panels) {
      if (!wanted.has(key)) {
        panel.chart.close();
        panel.host.remove();
        this.panels.delete(key);
      }
    }
    groups.forEach(([key, names], at) => {
      if (!this.panels.has(key)) this.panels.set(key, this.panel(key));
      const panel = this.panels.get(key);
      if (this.panelHost.children[at] !== panel.host) this.panelHost.insertBefore(panel.host, this.panelHost.children[at] ?? null);
      panel.draw(names);
    });
    this.none.hidden = groups.length > 0;
    this.none.textContent = this.names.length ? "no metric has that name" : "no metric yet";
    const several = this.runs.length > 1;
    replace(this.legend, several ? this.runs.map((run, at) => item(COLORS[at % COLORS.length], run.label, `#/run/${encodeURIComponent(run.key)}`)) : []);
  }

  panel(key) {
    const body = h("div", { class: "plot" });
    const legend = h("figcaption", {});
    const host = h("figure", { class: "panel", "data-metric": key }, h("h3", {}, key), legend, body);
    let shown = [];
    let empty = []; // the labels of curves without a point, such as those of a run that has only NaN
    const say = (reading) => {
      const x = reading && (this.view.axis === "time" ? duration(reading.x) : short(Math.round(reading.x)));
      const items = shown.map((curve, at) => {
        const value = reading ? reading.values[at] : curve.last;
        return item(curve.color, `${curve.label} `, null, number(value), curve.dashed);
      });
      const gone = empty.length ? h("span", { class: "soft" }, `no finite value: ${empty.join(", ")}`) : [];
      replace(legend, items, gone, x ? h("span", { class: "soft" }, `${this.view.axis} ${x}`) : []);
    };
    const chart = new CurveChart(body, { zoom: (range) => this.zoom(range), point: say });
    const draw = (names) => {
      const several = this.runs.length > 1;
      const found = this.runs.flatMap((run, runAt) =>
        names.map((name, nameAt) => {
          const curve = this.known.get(`${run.key}\n${name}`);
          if (!curve) return null;
          const color = COLORS[(several ? runAt : nameAt) % COLORS.length];
          const label = several ? (names.length > 1 ? `${run.label}: ${name}` : run.label) : name;
          return { ...curve, color, label, dashed: several && nameAt > 0 };
        }),
      );
      shown = found.filter((curve) => curve !== null);
      chart.draw(shown, this.view);
      empty = this.view.range ? [] : shown.filter((curve) => !curve.step.length).map((curve) => curve.label);
      shown = shown.filter((curve) => curve.step.length);
      say(null);
    };
    return { host, chart, draw };
  }

  close() {
    clearTimeout(this.timer);
    window.removeEventListener("theme", this.onTheme);
    for (const panel of this.panels.values()) panel.chart.close();
  }
}

export function item(color, label, href = null, value = null, dashed = false) {
  const key = h("i", { class: dashed ? "key dashed" : "key", styles: dashed ? { borderColor: color } : { background: color } });
  const text = href ? h("a", { href }, label) : label;
  return h("span", { class: "item" }, key, text, value === null ? null : h("b", {}, value));
}
