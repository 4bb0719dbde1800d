// Routes the part of the address after # to a page.

import { remember, remembered } from "./api.js";
import { h, replace } from "./dom.js";
import { showCompare } from "./compare.js";
import { showRun } from "./run.js";
import { showRuns } from "./runs.js";
import { showSweep } from "./sweep.js";

const main = document.getElementById("main");
const place = document.getElementById("place");
let leave = () => {};
let shown = "";

function route() {
  const [page, first = "", second = ""] = location.hash.replace(/^#\/?/, "").split("/").map(decode);
  const here = `${page}/${first}`;
  if (page === "run" && here === shown) {
    main.dispatchEvent(new CustomEvent("tab", { detail: second }));
    return;
  }
  leave();
  shown = here;
  window.scrollTo(0, 0);
  replace(main);
  const title = (text) => {
    document.title = text ? `${text} · headway` : "headway";
    replace(place, text ? h("span", {}, text) : []);
  };
  title("");
  const pages = { run: showRun, compare: showCompare, sweep: showSweep };
  leave = (pages[page] ?? showRuns)(main, { key: first, tab: second, title });
}

function decode(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  window.dispatchEvent(new Event("theme"));
}

const dark = window.matchMedia("(prefers-color-scheme: dark)");
setTheme(remembered("theme", null) ?? (dark.matches ? "dark" : "light"));
document.getElementById("theme").addEventListener("click", () => {
  const theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  remember("theme", theme);
  setTheme(theme);
});
window.addEventListener("hashchange", route);
route();
