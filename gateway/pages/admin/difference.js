// What an edit would change, and which requests would go elsewhere.

import { amount, bar, make, several } from "./elements.js";

// Show the answer of the diff route.
export function difference({ changes, decisions, moves, warnings }) {
  if (!changes.length) return [make("p", { class: "muted" }, "It says the same as the version in force.")];
  return [
    make("ul", { class: "changes" }, changes.map(change)),
    make("h3", {}, "What would move"),
    ...moved(decisions, moves),
    ...warnings.map(({ message }) => make("p", { class: "warning" }, `Note: ${message}.`)),
  ];
}

function change({ field, ...sides }) {
  const kind = !("old" in sides) ? "added" : !("new" in sides) ? "removed" : "changed";
  return make(
    "li",
    { class: kind },
    make("code", { class: "where" }, field || "the whole"),
    "old" in sides && make("del", {}, written(sides.old)),
    "new" in sides && make("ins", {}, written(sides.new)),
  );
}

// As YAML writes it in one line.
function written(value) {
  if (Array.isArray(value)) return `[${value.map(written).join(", ")}]`;
  if (value === null || typeof value !== "object") return String(value);
  return `{${Object.entries(value).map(([name, inner]) => `${name}: ${written(inner)}`).join(", ")}}`;
}

function moved(decisions, moves) {
  if (!decisions) return [make("p", { class: "muted" }, "No requests were served yet, so there is nothing to compare by.")];
  const going = moves.filter(({ from, to }) => from !== to);
  const count = going.reduce((sum, move) => sum + move.count, 0);
  const said = count
    ? `Of the last ${several(decisions, "request")}, ${amount(count)} would go elsewhere.`
    : `Of the last ${several(decisions, "request")}, none would go elsewhere.`;
  const rows = [...going, ...moves.filter(({ from, to }) => from === to)];
  const head = make("tr", {}, ["From", "To", "Requests"].map((name) => make("th", { scope: "col" }, name)));
  const table = make(
    "table",
    { class: "moves" },
    make("thead", {}, head),
    make("tbody", {}, rows.map((move) => row(move, decisions))),
  );
  return [make("p", {}, said), table];
}

function row({ from, to, count }, decisions) {
  const stays = from === to;
  return make(
    "tr",
    { class: stays ? "stays" : "goes" },
    make("td", {}, from),
    make("td", {}, stays ? "stays" : to),
    make("td", { class: "bars" }, bar(count, decisions, stays ? "calm" : ""), amount(count)),
  );
}
