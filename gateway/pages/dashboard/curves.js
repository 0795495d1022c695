// The charts of the page, and the values that each takes from the history.

import { Chart, oClock } from "./charts.js";
import { byId } from "../shared/elements.js";
import { as } from "./numbers.js";

const NOTHING = "No data yet: the curve starts with the first request.";
const ONE = [{ tone: "accent", filled: true }];
const TWO = [
  { name: "Median", tone: "accent" },
  { name: "95th percentile", tone: "second" },
];

// Create all charts; return a function for each that draws the history up to a state.
export function makeCurves() {
  return [
    curve("acceptance", { curves: ONE, say: as.percent, top: 1, height: 215 }, accepted),
    curve("tokens", { curves: ONE, say: as.rate }, tokens),
    curve("first-token", { curves: TWO, say: briefly }, half("first_token_s"), most("first_token_s")),
    curve("answer", { curves: TWO, say: briefly }, half("duration_s"), most("duration_s")),
    (past, { unix_s: now }) => {
      byId("span").textContent = `since ${oClock(past.points[0]?.end_s ?? now)}`;
    },
  ];
}

function curve(name, settings, ...readings) {
  const chart = new Chart(byId(`chart-${name}`), { nothing: NOTHING, ...settings });
  return (past, { unix_s: now }) => chart.show(past.columns(...readings), now);
}

const accepted = (point) => (point.attempted ? point.accepted / point.attempted : null);
const half = (field) => (point) => (point[field].count ? point[field].p50 : null);
const most = (field) => (point) => (point[field].count ? point[field].p95 : null);

// After the first request, no tokens are drawn as 0.
const tokens = (point, _index, all) => (all.some(({ requests }) => requests) ? point.tokens_per_s : null);

// Format a duration for an axis: 250 ms, 1.5 s.
function briefly(seconds) {
  if (seconds === 0) return "0";
  return seconds < 1 ? `${Number((1000 * seconds).toPrecision(3))} ms` : `${Number(seconds.toPrecision(3))} s`;
}
