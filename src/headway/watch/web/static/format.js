// Numbers, times and sizes as people read them.

export const number = (value, digits = 4) => {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  if (value !== 0 && (Math.abs(value) < 1e-4 || Math.abs(value) >= 1e7)) return value.toExponential(2);
  if (Number.isInteger(value)) return count(value);
  return String(Number(value.toPrecision(digits)));
};

export const count = (value) =>
  value === null || value === undefined ? "–" : Math.round(value).toLocaleString("en-US");

export const percent = (value, digits = 0) =>
  value === null || value === undefined ? "–" : `${(100 * value).toFixed(digits)}%`;

export const duration = (seconds) => {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "–";
  const s = Math.max(0, Math.round(seconds));
  if (s < 60) return `${s}s`;
  if (s < 3600) return `${Math.floor(s / 60)}m${String(s % 60).padStart(2, "0")}s`;
  if (s < 86400) return `${Math.floor(s / 3600)}h${String(Math.floor((s % 3600) / 60)).padStart(2, "0")}m`;
  return `${Math.floor(s / 86400)}d${String(Math.floor((s % 86400) / 3600)).padStart(2, "0")}h`;
};

export const seconds = (value) => {
  if (value === null || value === undefined) return "–";
  return value >= 1 ? `${value.toFixed(2)} s` : `${(1000 * value).toFixed(1)} ms`;
};

export const bytes = (value) => {
  if (value === null || value === undefined) return "–";
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  let at = 0;
  while (value >= 1000 && at < units.length - 1) {
    value /= 1000;
    at += 1;
  }
  return `${at && value < 100 ? value.toFixed(1) : Math.round(value)} ${units[at]}`;
};

export const clock = (moment, now = Date.now() / 1000) => {
  const at = new Date(moment * 1000);
  const day = at.toDateString() === new Date(now * 1000).toDateString();
  const pad = (value) => String(value).padStart(2, "0");
  const time = `${pad(at.getHours())}:${pad(at.getMinutes())}`;
  return day ? `${time}:${pad(at.getSeconds())}` : `${pad(at.getMonth() + 1)}-${pad(at.getDate())} ${time}`;
};

export const short = (value) => {
  const size = Math.abs(value);
  for (const [limit, unit] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (size >= limit) return `${Number((value / limit).toPrecision(4))}${unit}`;
  }
  return String(Number(value.toPrecision(4)));
};

export const plural = (value, word) => `${count(value)} ${word}${value === 1 ? "" : "s"}`;

export const setting = (value) => String(value); // as in the file: to be copied
