// The tabs with text: settings, alone or beside another run's; diagnostics; logs.

import { get, newestOnly } from "./api.js";
import { table } from "./blocks.js";
import { h, replace, search, select } from "./dom.js";
import { count, setting } from "./format.js";

const FOLLOW_MS = 2000;

export function settingsTable(found, { only = false, filter = "" } = {}) {
  const wanted = filter.toLowerCase();
  const rows = found.rows.filter((row) => (!only || row.differs) && (row.name.toLowerCase().includes(wanted) || row.values.some((value) => setting(value).toLowerCase().includes(wanted))));
  if (!rows.length) return h("p", { class: "soft" }, found.rows.length ? "nothing to show" : "no settings were recorded");
  const heads = ["setting", ...(found.runs.length > 1 ? found.runs : ["value"])];
  return h("div", { class: "scroll" }, table(heads, rows.map((row) => [
    h("td", {}, h("code", {}, row.name)),
    ...row.values.map((value, at) => h("td", { class: row.differs ? "differs" : "" }, row.has[at] ? setting(value) : h("span", { class: "soft" }, "not set"))),
  ])));
}

export function settingsTab(host, { key }) {
  const body = h("div", {});
  const code = h("div", {});
  let found = null;
  let other = "";
  const view = { only: false, filter: "" };
  const draw = () => {
    if (!found) return;
    replace(body, settingsTable(found, view));
    replace(code, found.code.map((each, at) => [h("h2", {}, found.runs.length > 1 ? `Code of ${found.runs[at]}` : "Code"), codeOf(each)]).flat());
  };
  const newest = newestOnly();
  const read = () => newest.show(get("settings", { run: other ? [key, other] : [key] }), (settings) => {
    found = settings;
    draw();
  }, (error) => replace(body, h("p", { class: "bad" }, error.message)));
  const only = h("input", { type: "checkbox", onchange: (event) => ((view.only = event.target.checked), draw()) });
  const controls = h("div", { class: "controls" }, search("find a setting", (text) => ((view.filter = text), draw())));
  replace(host, h("section", { class: "card" }, h("h2", {}, "Settings"), controls, body), h("section", { class: "card" }, code));
  read();
  get("runs").then((runs) => {
    const others = runs.filter((run) => run.key !== key);
    if (!others.length) return;
    const options = [["", "compare with…"], ...others.map((run) => [run.key, run.id])];
    controls.append(
      select("compare with", options, "", (value) => ((other = value), read())),
      h("label", {}, only, "only what differs"),
    );
  }).catch(() => {});
  return { update: () => {}, close: () => {} };
}

function codeOf(code) {
  const state = `${code.commit}${code.branch ? ` on ${code.branch}` : ""}${code.dirty ? ", with uncommitted changes" : ""}`;
  return h("div", {},
    code.command && h("pre", {}, code.command),
    h("p", {}, state),
    code.diff.length ? h("details", {}, h("summary", {}, "uncommitted changes"), h("pre", { class: "diff" }, code.diff.map((line) => h("span", {
      class: line.startsWith("+") ? "added" : line.startsWith("-") ? "removed" : "",
    }, `${line}\n`)))) : null);
}

// Returns lines of text in which each match of a search is marked.
function marked(lines, wanted) {
  if (!wanted) return [lines.join("\n")];
  const lower = wanted.toLowerCase();
  return lines.flatMap((line) => {
    const parts = [];
    let at = 0;
    for (let next = line.toLowerCase().indexOf(lower); next >= 0; next = line.toLowerCase().indexOf(lower, at)) {
      parts.push(line.slice(at, next), h("mark", {}, line.slice(next, next + lower.length)));
      at = next + lower.length;
    }
    return [...parts, `${line.slice(at)}\n`];
  });
}

export function diagnosticsTab(host, { key }) {
  const body = h("pre", {}, "reading…");
  let lines = [];
  let wanted = "";
  const draw = () => replace(body, marked(lines.filter((line) => line.toLowerCase().includes(wanted.toLowerCase())), wanted));
  replace(host, h("section", { class: "card" }, h("h2", {}, "The machine and its software"), h("div", { class: "controls" }, search("find", (text) => ((wanted = text), draw()))), body));
  get("diagnostics", { run: key }).then((found) => {
    lines = found.lines.length ? found.lines : ["nothing was recorded"];
    draw();
  }, (error) => replace(body, error.message));
  return { update: () => {}, close: () => {} };
}

export function logTab(host, { key }) {
  const body = h("pre", { class: "log", tabindex: "0" }, "reading…");
  const names = h("span", {});
  const note = h("span", { class: "soft" });
  const earlier = h("button", { type: "button", hidden: true, onclick: () => readEarlier() }, "earlier lines");
  let view = { name: undefined, search: "" };
  let shown = { lines: [], begin: 0, leftOut: 0, names: "" };
  let timer = null;
  const newest = newestOnly();

  const draw = () => {
    const atEnd = body.scrollTop + body.clientHeight >= body.scrollHeight - 20;
    replace(body, shown.lines.length ? marked(shown.lines, view.search) : view.search ? "no line has that text" : "nothing was written");
    if (atEnd) body.scrollTop = body.scrollHeight;
    earlier.hidden = !shown.begin;
    const found = count(shown.lines.length);
    const all = shown.leftOut ? `the newest ${found} of ${count(shown.lines.length + shown.leftOut)} lines` : `${found} lines`;
    note.textContent = view.search ? all : "";
  };
  const request = (end) => get("log", { run: key, name: view.name, search: view.search || undefined, end });
  const fail = (error) => {
    shown = { ...shown, lines: [], begin: 0, leftOut: 0 };
    replace(body, error.message);
    earlier.hidden = true;
  };
  const read = async () => {
    clearTimeout(timer);
    const isNewest = await newest.show(request(), (found) => {
      if (found.names.join() !== shown.names) drawNames(found);
      const isSame = shown.lines.length && shown.lines[shown.lines.length - 1] === found.lines[found.lines.length - 1] && shown.lines.length >= found.lines.length;
      if (!isSame || view.search) {
        shown = { lines: found.lines, begin: found.begin, leftOut: found.left_out, names: found.names.join() };
        draw();
      }
    }, fail);
    if (isNewest) timer = setTimeout(read, FOLLOW_MS);
  };
  const drawNames = (found) => {
    const options = found.names.map((name) => [name, name === "job" ? "the job" : `rank ${name}`]);
    replace(names, select("whose log", options, found.name, (name) => change({ name })));
  };
  const change = (changes) => {
    view = { ...view, ...changes };
    shown = { ...shown, lines: [], begin: 0, leftOut: 0 };
    read();
  };
  const readEarlier = () => {
    clearTimeout(timer); // new lines would scroll away the earlier ones
    newest.show(request(shown.begin), (found) => {
      const height = body.scrollHeight;
      shown = { ...shown, lines: [...found.lines, ...shown.lines], begin: found.begin, leftOut: shown.leftOut + found.left_out };
      draw();
      body.scrollTop = body.scrollHeight - height;
    }, (error) => (note.textContent = error.message)); // the lines stay, and so does the button
  };
  replace(host, h("section", { class: "card" }, h("div", { class: "controls" }, names, search("find in the log", (text) => change({ search: text })), earlier, note), body));
  read();
  return { update: () => {}, close: () => (newest.cancel(), clearTimeout(timer)) };
}
