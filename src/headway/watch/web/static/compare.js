// Several runs: their curves on top of each other, and the settings in which they differ.

import { get, live } from "./api.js";
import { CurveGrid } from "./curves.js";
import { h, replace } from "./dom.js";
import { MAX_OVERLAID, metricNames } from "./runs.js";
import { settingsTable } from "./texts.js";

export function keysOf(text) {
  return text.split("/").filter(Boolean).map((part) => {
    try {
      return decodeURIComponent(part);
    } catch {
      return part;
    }
  });
}

// What is different about each run: the end of its id, or its whole key.
function labelOf(key, keys) {
  const end = key.slice(key.lastIndexOf("-") + 1);
  return keys.filter((other) => other.endsWith(`-${end}`)).length === 1 && end ? `${key.split("-")[0]} ${end}` : key;
}

export function showCompare(main, { key, title }) {
  const keys = keysOf(key).slice(0, MAX_OVERLAID);
  title(`${keys.length} runs`);
  const grid = new CurveGrid(keys.map((each) => ({ key: each, label: labelOf(each, keys) })));
  const settings = h("div", {}, "reading…");
  replace(main,
    h("div", { class: "title" }, h("h1", {}, `${keys.length} runs`)),
    grid.host,
    h("section", { class: "card" }, h("h2", {}, "Settings that differ"), settings));
  get("settings", { run: keys }).then(
    (found) => replace(settings, settingsTable(found, { only: true })),
    (error) => replace(settings, h("p", { class: "bad" }, error.message)),
  );
  const stop = live(null, (runs) => grid.update(metricNames(runs.filter((run) => keys.includes(run.key)))));
  return () => {
    stop();
    grid.close();
  };
}
