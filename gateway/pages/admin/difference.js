// The changes of an edit, and the recent requests that it would route differently.

import { amount, bar, make, several } from "../shared/elements.js";

// Render the response of the diff route.
export function difference({ changes, decisions, moves, warnings }) {
  if (!changes.length) return [make("p", { class: "muted" }, "The document is the same as the active version.")];
  return [
    make("ul", { class: "changes" }, changes.map(change)),
    make("h3", {}, "Recent requests"),
    ...moveTable(decisions, moves),
    ...warnings.map(({ message }) => make("p", { class: "warning" }, `Note: ${message}.`)),
  ];
}

function change({ field, ...sides }) {
  const kind = !("old" in sides) ? "added" : !("new" in sides) ? "removed" : "changed";
  return make(
    "li",
    { class: kind },
    make("code", { class: "where" }, field || "document"),
    "old" in sides && make("del", {}, yamlLine(sides.old)),
    "new" in sides && make("ins", {}, yamlLine(sides.new)),
  );
}

// Format a value as YAML in one line.
function yamlLine(value) {
  if (Array.isArray(value)) return `[${value.map(yamlLine).join(", ")}]`;
  if (value === null || typeof value !== "object") return String(value);
  return `{${Object.entries(value).map(([name, inner]) => `${name}: ${yamlLine(inner)}`).join(", ")}}`;
}

function moveTable(decisions, moves) {
  if (!decisions) return [make("p", { class: "muted" }, "The gateway has not served any requests yet, so it cannot compare decisions.")];
  const moving = moves.filter(({ from, to }) => from !== to);
  const count = moving.reduce((sum, move) => sum + move.count, 0);
  const summary = count
    ? `Of the last ${several(decisions, "request")}, ${amount(count)} would be routed differently.`
    : `Of the last ${several(decisions, "request")}, none would be routed differently.`;
  const rows = [...moving, ...moves.filter(({ from, to }) => from === to)];
  const head = make("tr", {}, ["From", "To", "Requests"].map((name) => make("th", { scope: "col" }, name)));
  const table = make(
    "table",
    { class: "moves" },
    make("thead", {}, head),
    make("tbody", {}, rows.map((move) => row(move, decisions))),
  );
  return [make("p", {}, summary), table];
}

function row({ from, to, count }, decisions) {
  const stays = from === to;
  return make(
    "tr",
    { class: stays ? "stays" : "goes" },
    make("td", {}, from),
    make("td", {}, stays ? "unchanged" : to),
    make("td", { class: "bars" }, bar(count, decisions, stays ? "calm" : ""), amount(count)),
  );
}
