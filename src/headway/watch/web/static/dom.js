// Elements. Text is always set as text, so nothing that a run has written can become markup.

const SVG = "http://www.w3.org/2000/svg";

export function h(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function s(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "styles") Object.assign(element.style, value); // the policy forbids style attributes
    else if (name === "value" || name === "checked") element[name] = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export function replace(host, ...children) {
  host.replaceChildren(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
}

// A part of the page that is redrawn only when its values have changed: selection and focus stay.
export function block(draw, attributes = {}) {
  const host = h("section", attributes);
  let shown;
  const update = (...values) => {
    const now = JSON.stringify(values);
    if (now === shown) return;
    shown = now;
    const found = draw(...values);
    host.hidden = found === null;
    replace(host, found ?? []);
  };
  return { host, update };
}

export function sparkline(values, width = 120, height = 28) {
  const known = values.map((value, at) => [at, value]).filter(([, value]) => typeof value === "number");
  const svg = s("svg", { viewBox: `0 0 ${width} ${height}`, class: "spark", preserveAspectRatio: "none", "aria-hidden": "true" });
  if (known.length < 2) return svg;
  const low = Math.min(...known.map(([, value]) => value));
  const span = Math.max(...known.map(([, value]) => value)) - low || 1;
  const points = known.map(([at, value]) => {
    const x = 1 + (at / (values.length - 1)) * (width - 2);
    return `${x.toFixed(1)},${(height - 2 - ((value - low) / span) * (height - 4)).toFixed(1)}`;
  });
  svg.append(s("polyline", { points: points.join(" ") }));
  return svg;
}

export function pill(state) {
  return h("span", { class: `pill ${state}` }, state);
}

export function search(placeholder, oninput, value = "") {
  return h("input", {
    type: "search", placeholder, value, spellcheck: "false", autocomplete: "off", "aria-label": placeholder,
    oninput: (event) => oninput(event.target.value),
  });
}

// Replaces children only if `key` has changed: an open list stays open.
export function replaceOnce(host, key, make) {
  const now = JSON.stringify(key);
  if (host.dataset.shown === now) return;
  host.dataset.shown = now;
  replace(host, make());
}

export function select(label, options, value, onchange) {
  const element = h(
    "select",
    { "aria-label": label, title: label, onchange: (event) => onchange(event.target.value) },
    options.map(([key, text]) => h("option", { value: key }, text)),
  );
  element.value = value;
  return element;
}
