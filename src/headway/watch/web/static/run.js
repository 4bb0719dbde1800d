// The page of one run.

import { get, live } from "./api.js";
import * as blocks from "./blocks.js";
import { CurveGrid } from "./curves.js";
import { block, h, replace } from "./dom.js";
import { mediaTab } from "./media.js";
import { speedTab } from "./speed.js";
import { diagnosticsTab, logTab, settingsTab } from "./texts.js";

const TABS = {
  curves: ["Curves", curvesTab],
  speed: ["Speed and ranks", speedTab],
  settings: ["Settings", settingsTab],
  diagnostics: ["Diagnostics", diagnosticsTab],
  log: ["Log", logTab],
  media: ["Media", mediaTab],
};

// A tab is made with (host, context) and returns {update(state), close()}.
function curvesTab(host, { key }) {
  const grid = new CurveGrid([{ key, label: key }]);
  replace(host, grid.host);
  return {
    update: (state) => grid.update(state.learning.map((curve) => curve.name)),
    close: () => grid.close(),
  };
}

export function showRun(main, { key, tab, title }) {
  const parts = {
    failure: block((record) => blocks.failure(record, key), { class: "failure", role: "alert" }),
    header: block(blocks.header, { class: "header" }),
    tiles: block((state) => blocks.tiles(state)),
    shares: block(blocks.shares, { class: "card" }),
    slowest: block(blocks.slowest, { class: "card" }),
    data: block(blocks.data, { class: "card" }),
    devices: block(blocks.devices, { class: "card" }),
    messages: block(blocks.messages, { class: "card" }),
  };
  const tabs = h("nav", { class: "tabs", role: "tablist" });
  const body = h("div", { class: "tab" });
  const side = h("aside", {}, parts.shares.host, parts.slowest.host, parts.data.host, parts.devices.host, parts.messages.host);
  for (const part of Object.values(parts)) part.host.hidden = true;
  const content = h("div", { class: "columns" }, h("div", { class: "wide" }, tabs, body), side);
  const waiting = h("p", { class: "soft" }, "reading the run…");
  replace(main, waiting, parts.failure.host, parts.header.host, parts.tiles.host, content);
  let state = null;
  let open = null;

  const choose = (name) => {
    const chosen = name in TABS ? name : "curves";
    open?.close();
    replace(tabs, Object.entries(TABS).map(([each, [text]]) => h("a", {
      href: `#/run/${encodeURIComponent(key)}/${each}`, role: "tab", "aria-selected": String(each === chosen),
    }, text)));
    replace(body);
    open = TABS[chosen][1](body, { key });
    if (state) open.update(state);
  };

  const show = (found) => {
    waiting.remove();
    state = found;
    title(found.header.id);
    parts.failure.update(found.failure);
    parts.header.update(found.header, found.failure !== null);
    parts.tiles.update({ learning: found.learning.slice(0, 2), speed: found.speed, header: found.header, safety: found.safety });
    parts.shares.update(found.speed);
    parts.slowest.update(found.ranks.slice(0, 5), found.rank_count, found.stragglers);
    parts.data.update(found.data);
    parts.devices.update(found.nodes, found.node_count);
    parts.messages.update(found.messages);
    open.update(found);
  };

  const onTab = (event) => choose(event.detail);
  main.addEventListener("tab", onTab);
  choose(tab);
  const stop = live(key, show, () => replace(main, h("p", {}, "This run is gone.")));
  get("run", { run: key }).catch((error) => {
    stop();
    replace(main, h("p", { class: "bad" }, `${error.message}: ${key}`), h("a", { href: "#/" }, "all runs"));
  });
  return () => {
    main.removeEventListener("tab", onTab);
    stop();
    open?.close();
  };
}
