// Latency percentiles (p50, p95) of each pool within the window.

import { make } from "./elements.js";
import { place } from "./numbers.js";

const ROWS = [
  ["First token", "first_token_s", "duration"],
  ["Each further token", "token_s", "duration"],
  ["Time in the queue", "wait_s", "duration"],
  ["Complete response", "duration_s", "duration"],
];

export function speeds({ pools }) {
  const busy = Object.keys(pools).filter((name) => pools[name].recent.requests > 0);
  if (!busy.length) return make("p", { class: "empty" }, "No request ended in this window.");
  const row = (said, cells) => make("tr", {}, make("th", { scope: "row" }, said), cells);
  return make(
    "table",
    {},
    make("thead", {}, make("tr", {}, make("th", {}, "Median, then 95th percentile"), busy.map(head))),
    make(
      "tbody",
      {},
      ROWS.map(([said, field, kind]) => row(said, busy.map((name) => cell(pools[name], name, field, kind)))),
      row("Requests", busy.map(requests)),
    ),
  );
}

const head = (name) => make("th", { class: "number", scope: "col" }, name);

const requests = (name) => make("td", { class: "number" }, place(`pools/${name}/recent/requests`, "count"));

function cell({ recent }, name, field, kind) {
  if (!recent[field].count) return make("td", { class: "number muted" }, "–");
  const of = (which) => place(`pools/${name}/recent/${field}/${which}`, kind);
  const late = make("span", { class: "muted small block" }, of("p95"));
  return make("td", { class: "number" }, of("p50"), late);
}
