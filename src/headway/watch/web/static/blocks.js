// The blocks of a run: the same, from the same files, that `headway watch` shows in a terminal.

import { h, pill, sparkline } from "./dom.js";
import { bytes, clock, count, duration, number, percent, plural, seconds } from "./format.js";

export const PHASES = {
  data: ["waiting for data", "#eab308"],
  compute: ["forward and backward", "#10b981"],
  optimizer: ["optimizer", "#06b6d4"],
  wait: ["waiting for other ranks", "#d946ef"],
  validation: ["validation", "#3b82f6"],
  checkpoint: ["saving", "#94a3b8"],
  other: ["other", "#64748b"],
};
const RISK_S = 3600;
const HOT_C = 85;

export function failure(record, key) {
  if (!record) return null;
  const where = [
    record.rank === null ? null : `rank ${record.rank}`,
    record.host ? `on ${record.host}` : null,
    record.step === null ? null : `at step ${count(record.step)}`,
  ].filter(Boolean);
  const lines = record.traceback.length ? record.traceback : [record.error];
  const log = record.rank === null ? null : `#/run/${encodeURIComponent(key)}/log`;
  return [
    h("h2", {}, `The first failure: ${where.join(" ")}`),
    h("p", { class: "error" }, record.error || lines[lines.length - 1]),
    h("pre", {}, lines.join("\n")),
    log && h("a", { href: log }, "the logs"),
  ];
}

export function header(head, hasFailure) {
  const facts = [
    head.epoch && `epoch ${head.epoch}${head.max_epochs ? ` of ${head.max_epochs}` : ""}`,
    head.stage && `stage ${head.stage}`,
    head.attempts && `attempt ${head.attempts}`,
    head.job && `job ${head.job}`,
    `${plural(head.nodes, "node")} × ${Math.max(1, Math.floor(head.world_size / head.nodes))} ${head.device}`.trim(),
    `began ${clock(head.began)}`,
  ].filter(Boolean);
  return [
    h(
      "div",
      { class: "title" },
      h("h1", {}, head.name, h("small", {}, head.id.slice(head.name.length))),
      pill(head.state),
      head.silent_s !== null && h("span", { class: "pill silent" }, `silent for ${duration(head.silent_s)}`),
    ),
    progress(head),
    h("p", { class: "soft" }, facts.join(" · ")),
    head.why && !hasFailure && h("p", { class: `why ${head.state}` }, head.why),
  ];
}

function progress(head) {
  const steps = head.step === null ? "no step yet" : `step ${count(head.step)}${head.total_steps ? ` of ${count(head.total_steps)}` : ""}`;
  const attempts = head.attempts > 1 ? ` in ${head.attempts} attempts` : "";
  const times = [head.eta_s === null ? null : `ETA ${duration(head.eta_s)}`, `elapsed ${duration(head.elapsed_s)}${attempts}`];
  return h(
    "div",
    { class: "progress" },
    h("b", {}, steps),
    head.progress === null ? null : h("div", { class: "track", role: "progressbar", "aria-valuenow": Math.round(100 * head.progress) },
      h("i", { class: head.state, styles: { width: `${100 * head.progress}%` } })),
    head.progress === null ? null : h("span", {}, percent(head.progress)),
    h("span", {}, times.filter(Boolean).join(" · ")),
  );
}

function tile(label, value, note = null, extra = null, level = "") {
  return h("div", { class: `tile ${level}` }, h("span", { class: "soft" }, label), h("b", {}, value), note && h("small", {}, note), extra);
}

export function tiles(state) {
  const { learning, speed, header: head, safety } = state;
  const found = learning.slice(0, 2).map((curve) => {
    const best = curve.best === null ? null : `best ${number(curve.best)} at ${count(curve.best_step)}`;
    const bad = curve.non_finite ? `${count(curve.non_finite)} not finite` : best;
    return tile(curve.name, number(curve.last), bad, sparkline(curve.spark), curve.non_finite ? "bad" : "");
  });
  if (speed.samples_per_s) {
    const each = head.world_size > 1 ? `${count(speed.samples_per_s / head.world_size)} per rank` : null;
    found.push(tile("samples/s", count(speed.samples_per_s), each));
  }
  if (speed.step_median_s !== null) {
    found.push(tile("step, median", seconds(speed.step_median_s), `p95 ${seconds(speed.step_p95_s)}`));
  }
  if (typeof speed.mfu === "number") found.push(tile("MFU", percent(speed.mfu)));
  if (speed.planned_step_s && speed.step_median_s) {
    const ratio = speed.planned_step_s / speed.step_median_s;
    const late = head.eta_s === null ? null : lateness(ratio, head.eta_s);
    found.push(tile("of planned speed", percent(ratio), late, null, ratio < 0.9 ? "warn" : ""));
  }
  found.push(saved(head, safety));
  return h("div", { class: "tiles" }, found);
}

function lateness(ratio, eta_s) {
  const change = eta_s * (1 - ratio);
  return Math.abs(change) < 60 ? "as planned" : `${duration(Math.abs(change))} ${change > 0 ? "later" : "earlier"} than planned`;
}

function saved(head, safety) {
  const limit = safety.limit_left_s === null ? null : `time limit in ${duration(safety.limit_left_s)}`;
  const isRunning = head.state === "running";
  if (safety.step === null) return tile("checkpoint", "none yet", limit, null, isRunning ? "warn" : "");
  const size = safety.size_bytes === null ? null : `${bytes(safety.size_bytes)} in ${(safety.save_s ?? 0).toFixed(1)} s`;
  if (!isRunning) return tile("newest checkpoint", `step ${count(safety.step)}`, limit ?? size);
  return tile("at risk", duration(safety.age_s), limit ?? `saved step ${count(safety.step)}`, null, safety.age_s > RISK_S ? "warn" : "");
}

export function shares(speed) {
  const known = Object.keys(PHASES).filter((phase) => (speed.shares[phase] ?? 0) > 0);
  if (!known.length) return null;
  const ordered = [...known].sort((a, b) => speed.shares[b] - speed.shares[a]);
  return [
    h("h2", {}, "Where a step goes"),
    h("div", { class: "stack" }, known.map((phase) => h("i", {
      title: `${PHASES[phase][0]} ${percent(speed.shares[phase], 1)}`,
      styles: { width: `${100 * speed.shares[phase]}%`, background: PHASES[phase][1] },
    }))),
    h("p", { class: "legend" }, ordered.map((phase) => h("span", { class: "item" },
      h("i", { class: "key", styles: { background: PHASES[phase][1] } }), PHASES[phase][0], h("b", {}, percent(speed.shares[phase]))))),
  ];
}

export function table(heads, rows, name = "") {
  return h("div", { class: "scroll" }, h("table", { class: name },
    h("thead", {}, h("tr", {}, heads.map((text) => h("th", {}, text)))),
    h("tbody", {}, rows.map((cells) => h("tr", {}, cells.map((cell) => (cell instanceof HTMLTableCellElement ? cell : h("td", {}, cell))))))));
}

export function rankRows(ranks) {
  return ranks.map((row) => {
    const gpu = row.gpu ?? {};
    const notes = [row.is_straggler && "straggler", gpu.throttling?.length && `throttled: ${gpu.throttling[0]}`].filter(Boolean);
    return [
      String(row.rank),
      h("td", { class: row.is_straggler ? "bad" : "" }, row.relative === null ? "–" : `${row.relative.toFixed(2)}×`),
      h("td", { class: row.data_share > 0.1 ? "warn" : "" }, percent(row.data_share)),
      bytes(gpu.memory_used ?? row.memory_peak),
      percent(gpu.utilization),
      h("td", { class: gpu.temperature >= HOT_C ? "bad" : "" }, gpu.temperature === undefined ? "–" : `${gpu.temperature} °C`),
      row.host,
      h("td", { class: "bad" }, notes.join(", ")),
    ];
  });
}

export function slowest(ranks, total, stragglers) {
  if (total < 2) return null;
  const rows = rankRows(ranks.slice(0, 5)).map((cells) => [cells[0], cells[1], cells[2], cells[6]]);
  const named = stragglers.length ? h("p", { class: "bad" }, `straggler: rank ${stragglers.slice(0, 4).join(", ")}`) : null;
  return [h("h2", {}, `Slowest of ${count(total)} ranks`), named, table(["rank", "own time", "data wait", "host"], rows)];
}

export function data(rows) {
  const lines = rows.map((row) => {
    const parts = [
      row.cache_hits === null ? null : `cache hits ${percent(row.cache_hits)}`,
      row.bad === null ? null : `${count(row.bad)} bad`,
      ...row.mixture.slice(0, 8).map(([name, share, target]) => `${name} ${percent(share, 1)} (target ${percent(target, 1)})`),
    ].filter(Boolean);
    return h("li", {}, h("b", {}, row.name), ` ${count(row.samples)} samples${parts.length ? `, ${parts.join(", ")}` : ""}`);
  });
  return lines.length ? [h("h2", {}, "Data of rank 0"), h("ul", {}, lines)] : null;
}

export function devices(nodes, total) {
  if (!nodes.length) return null;
  const gpus = nodes.flatMap((node) => node.gpus);
  const most = (values) => (values.length ? Math.max(...values) : null);
  const used = gpus.filter((gpu) => gpu.utilization !== undefined);
  const slowed = gpus.filter((gpu) => gpu.throttling.length);
  const heat = most(gpus.filter((gpu) => gpu.temperature !== undefined).map((gpu) => gpu.temperature));
  const items = [
    gpus.length && `${plural(gpus.length, "GPU")}${used.length ? `, ${percent(used.reduce((sum, gpu) => sum + gpu.utilization, 0) / used.length)} busy` : ""}`,
    heat !== null && `up to ${heat} °C`,
    slowed.length && `${slowed.length} throttled (${slowed[0].throttling[0]})`,
    gpus.some((gpu) => gpu.ecc_errors) && `${gpus.filter((gpu) => gpu.ecc_errors).length} with ECC errors`,
    nodes.some((node) => node.cpu !== undefined) && `CPU ${percent(most(nodes.filter((node) => node.cpu !== undefined).map((node) => node.cpu)))}`,
    `memory ${percent(most(nodes.filter((node) => node.memory_total).map((node) => (node.memory_used ?? 0) / node.memory_total)))}`,
    ...[["disk", "disk_read"], ["network", "network_received"]].map(([what, name]) =>
      nodes.some((node) => node[name] !== undefined) && `${what} ${bytes(nodes.reduce((sum, node) => sum + (node[name] ?? 0), 0))}/s`),
  ].filter(Boolean);
  const note = total > nodes.length ? ` (${nodes.length} of ${count(total)} nodes)` : "";
  return [h("h2", {}, `Devices${note}`), h("ul", {}, items.map((text) => h("li", {}, text)))];
}

export function messages(list) {
  const shown = [...list].reverse().slice(0, 30);
  const rows = shown.map((message) => h("li", { class: message.kind },
    h("time", {}, clock(message.time)), h("b", {}, message.kind), message.rank ? ` rank ${message.rank}:` : "", ` ${message.text}`));
  return [h("h2", {}, "Messages"), rows.length ? h("ul", { class: "messages" }, rows) : h("p", { class: "soft" }, "none")];
}
