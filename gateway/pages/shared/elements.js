// Functions that create elements; text is always inserted as text, never as HTML.

export const byId = (id) => document.getElementById(id);

// make("button", { class: "primary", type: "button", onclick: go }, "Go", icon)
export function make(name, settings = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(settings)) {
    if (value === undefined || value === null || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else element.setAttribute(key, value === true ? "" : value);
  }
  const absent = [undefined, null, false, ""];
  element.append(...children.flat(2).filter((child) => !absent.includes(child)));
  return element;
}

export function button(text, onclick, settings = {}) {
  return make("button", { type: "button", onclick, ...settings }, text);
}

export function pill(text, tone = "") {
  return make("span", { class: `pill ${tone}` }, text);
}

// A bar that shows a share; text beside it contains the number.
export function bar(part, whole, tone = "") {
  const fill = make("span", { class: `fill ${tone}` });
  fill.style.inlineSize = `${whole > 0 ? Math.min(100, (100 * part) / whole) : 0}%`;
  return make("span", { class: "bar", "aria-hidden": "true" }, fill);
}

export function amount(count) {
  return count.toLocaleString("en-US");
}

export function several(count, one, many = `${one}s`) {
  return `${amount(count)} ${count === 1 ? one : many}`;
}

const STEPS = [
  [60, 1, "second"],
  [3600, 60, "minute"],
  [86400, 3600, "hour"],
  [86400 * 60, 86400, "day"],
];

// "3 minutes ago", with the exact time as a tooltip.
export function ago(time) {
  const date = new Date(time);
  const seconds = Math.max(0, (Date.now() - date.getTime()) / 1000);
  const step = STEPS.find(([below]) => seconds < below);
  const text =
    seconds < 5 ? "just now" : step ? `${several(Math.floor(seconds / step[1]), step[2])} ago` : date.toLocaleDateString();
  return make("time", { datetime: date.toISOString(), title: date.toLocaleString() }, text);
}

let noticeEnds;

// Show a message for some seconds; screen readers announce it too.
export function notice(text) {
  const place = byId("notice");
  place.textContent = text;
  clearTimeout(noticeEnds);
  noticeEnds = setTimeout(() => (place.textContent = ""), 6000);
}
