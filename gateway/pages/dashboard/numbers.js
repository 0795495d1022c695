// Formatted numbers, each bound to a field of the status.

const GROUPS = "en-US";

const fixed = (value, digits) =>
  value.toLocaleString(GROUPS, { minimumFractionDigits: digits, maximumFractionDigits: digits });

// Three significant digits: 4.21, 42.1, 421.
const rounded = (value) => fixed(value, value < 9.995 ? 2 : value < 99.95 ? 1 : 0);

function percent(share) {
  const points = 100 * share;
  if (share > 0 && share < 1 && (points < 0.05 || points > 99.95)) return points < 1 ? "< 0.1%" : "> 99.9%";
  return `${fixed(points, points > 0 && (points < 9.95 || (points > 99.5 && points < 100)) ? 1 : 0)}%`;
}

function duration(seconds) {
  if (seconds < 0) return `−${duration(-seconds)}`;
  if (seconds < 0.00005) return "0 s";
  if (seconds < 0.9995) return `${rounded(1000 * seconds)} ms`;
  if (seconds < 99.95) return `${rounded(seconds)} s`;
  const minutes = Math.round(seconds / 60);
  if (seconds < 600) return `${Math.floor(seconds / 60)} min ${Math.floor(seconds % 60)} s`;
  if (minutes < 60) return `${minutes} min`;
  if (minutes < 48 * 60) return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
  return `${Math.floor(minutes / 1440)} d ${Math.floor((minutes % 1440) / 60)} h`;
}

// A time over which something is counted: 45 s, 5 min.
export const span = (seconds) => (seconds < 90 ? `${Math.round(seconds)} s` : `${Math.round(seconds / 60)} min`);

function size(bytes) {
  const [unit, by] = bytes < 999.5e6 ? ["MB", 1e6] : ["GB", 1e9];
  return `${rounded(bytes / by)} ${unit}`;
}

export const as = {
  count: (value) => value.toLocaleString(GROUPS),
  rate: (value) => (value < 99.95 ? fixed(value, value > 0 && value < 9.95 ? 1 : 0) : fixed(value, 0)),
  ratio: (value) => fixed(value, 2),
  percent,
  duration,
  size,
  text: (value) => String(value),
};

export const at = (state, path) => path.split("/").reduce((part, name) => part?.[name], state);

// The field that counts running requests: reports include other gateways, `in_flight` static workers.
export const busyIn = ({ running, in_flight: sent }) => (running > sent ? "running" : "in_flight");

// Create an element for one number: <span data-of="mtp/accepted" data-as="count">.
export function place(path, kind) {
  const span = document.createElement("span");
  span.dataset.of = path;
  span.dataset.as = kind;
  return span;
}

// Write the values of the status into the elements below `root`.
export function fill(root, state) {
  for (const element of root.querySelectorAll("[data-of]")) {
    const value = at(state, element.dataset.of);
    element.dataset.value = value === undefined ? "" : JSON.stringify(value);
    const unknown = value === undefined || element.classList.contains("none");
    write(element, unknown ? "–" : as[element.dataset.as](value));
  }
}

// Replace the content of `root` if it differs, so that a selection of text survives.
export function renew(root, state, parts) {
  const next = root.cloneNode(false);
  next.append(...[parts].flat());
  fill(next, state);
  if (!root.isEqualNode(next)) root.replaceChildren(...next.childNodes);
}

// Separate the numbers of a figure from the units: "12 min 40 s" has two of each.
export function write(element, text) {
  if (element.textContent === text) return;
  if (!element.classList.contains("figure")) {
    element.textContent = text;
    return;
  }
  const parts = text.match(/[\d.,–−]+|[^\d.,–−]+/g).map((word) => {
    const part = document.createElement("span");
    part.className = /[\d–]/.test(word) ? "digits" : "unit";
    part.textContent = word;
    return part;
  });
  element.replaceChildren(...parts);
}
