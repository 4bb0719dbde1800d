// Images, figures, histograms and texts that a run has logged, the newest first.

import { get, newestOnly } from "./api.js";
import { h, replace, replaceOnce, s, search, select } from "./dom.js";
import { count, number } from "./format.js";

export function mediaTab(host, { key }) {
  const names = h("span", {});
  const note = h("span", { class: "soft" });
  const grid = h("div", { class: "media" });
  let view = { name: "", search: "" };
  let step = null;
  let shown = "";

  const newest = newestOnly();
  const read = () => newest.show(get("media", { run: key, ...view }), (found) => {
    const options = [["", "all names"], ...found.names.map((name) => [name, name])];
    replaceOnce(names, [options, view.name], () => select("name", options, view.name, (name) => change({ name })));
    const many = found.count > found.items.length ? `the newest ${found.items.length} of ${count(found.count)}` : `${count(found.count)}`;
    note.textContent = found.note && found.items.length ? `${many}; ${found.note}` : many;
    const now = JSON.stringify([found.items, found.note, view]);
    if (now === shown) return;
    shown = now;
    replace(grid, found.items.length ? found.items.map((item) => card(key, item)) : h("p", { class: "soft" }, why(found.note, view)));
  }, (error) => {
    shown = "";
    replace(grid, h("p", { class: "bad" }, error.message));
  });
  const change = (changes) => {
    view = { ...view, ...changes };
    read();
  };
  replace(host, h("section", { class: "card" }, h("div", { class: "controls" }, names, search("find in names and captions", (text) => change({ search: text })), note), grid));
  read();
  return {
    update: (state) => {
      if (step !== null && step !== state.header.step) read();
      step = state.header.step;
    },
    close: newest.cancel,
  };
}

function why(note, view) {
  if (note) return note;
  if (view.name || view.search) return "Nothing has that name, or that text in its name or caption.";
  return "Nothing was logged: self.log_image, log_figure, log_histogram and log_text do that.";
}

function card(run, item) {
  const file = `/api/media/file?${new URLSearchParams({ run, file: item.file })}`;
  const body = h("div", {});
  const say = (text) => replace(body, h("p", { class: "soft" }, text));
  if (item.too_large) {
    say(`${count(Math.round(item.bytes / 2 ** 20))} MiB are too large for this page: media/${item.file} in the run directory`);
  } else if (item.kind === "image" || item.kind === "figure") {
    const image = h("img", {
      src: file, loading: "lazy", alt: item.caption || item.name, width: item.width || null, height: item.height || null,
    });
    image.addEventListener("error", () => say("it cannot be read"));
    replace(body, h("a", { href: file, target: "_blank", rel: "noopener" }, image));
  } else {
    get("media/file", { run, file: item.file }).then(
      (found) => replace(body, item.kind === "text" ? h("pre", {}, found.text) : histogram(found)),
      () => say("it cannot be read"),
    );
  }
  const place = `step ${count(item.step)}${item.rank ? `, rank ${item.rank}` : ""}`;
  return h("figure", { class: `panel ${item.kind}` }, h("h3", {}, item.name), body,
    h("figcaption", {}, h("span", { class: "soft" }, place), item.caption));
}

function histogram({ edges, counts, non_finite: bad }) {
  const [width, height] = [320, 140];
  const most = Math.max(1, ...counts);
  const span = edges[edges.length - 1] - edges[0] || 1;
  const bars = counts.map((value, at) => s("rect", {
    x: (((edges[at] - edges[0]) / span) * width).toFixed(2), width: Math.max(0.5, ((edges[at + 1] - edges[at]) / span) * width - 0.5).toFixed(2),
    y: (height * (1 - value / most)).toFixed(2), height: ((height * value) / most).toFixed(2), class: "bar",
  }, s("title", {}, `${number(edges[at])} to ${number(edges[at + 1])}: ${count(value)}`)));
  return h("div", {}, s("svg", { viewBox: `0 0 ${width} ${height}`, class: "bars" }, bars),
    h("p", { class: "soft ends" }, h("span", {}, number(edges[0])), bad ? `${count(bad)} not finite` : "", h("span", {}, number(edges[edges.length - 1]))));
}
