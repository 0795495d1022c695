// The share of drafts accepted up to each position.

import { bar, make } from "./elements.js";
import { place } from "./numbers.js";

const NAMES = ["1st token", "2nd token", "3rd token"];

export function positions({ mtp, decisions }) {
  const shares = mtp.enabled ? mtp.acceptance_rate_per_position : [];
  if (!shares.length) {
    const why = mtp.enabled ? (decisions.total ? "No drafts yet." : "No request yet.") : "No lane drafts.";
    return make("p", { class: "empty" }, why);
  }
  return [
    make("div", { class: "positions" }, shares.map(position)),
    make("p", { class: "muted small" }, counts(), " draft tokens were accepted."),
    make("p", { class: "muted small" }, "Shares refer to all drafts; not every draft was that long."),
  ];
}

const counts = () => [place("mtp/accepted", "count"), " of ", place("mtp/attempted", "count")];

function position(share, index) {
  return make(
    "div",
    { class: "position" },
    make("span", { class: "position-name" }, NAMES[index] ?? `${index + 1}th token`),
    place(`mtp/acceptance_rate_per_position/${index}`, "percent"),
    bar(share, 1),
  );
}
