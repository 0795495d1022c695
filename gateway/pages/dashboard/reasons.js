// Why requests got no drafts, each reason in a sentence.

import { BYPASS_NAMES, BYPASS_REASONS } from "./bypass_reasons.js";
import { bar, make } from "./elements.js";
import { place } from "./numbers.js";

// If lanes draft, use the counts of the workers: a request that a picture keeps out of the
// speculative lane may be drafted for in another. Else use the counts of the decisions.
export function reasons({ decisions, mtp }) {
  const known = mtp.enabled ? "mtp" : "decisions";
  const counts = (mtp.enabled ? mtp : decisions).bypass_counts;
  const sorted = Object.entries(counts).filter(([, count]) => count).sort(([, one], [, other]) => other - one);
  if (!sorted.length) {
    return make("p", { class: "empty" }, decisions.total ? "Each request got drafts so far." : "No request yet.");
  }
  const most = sorted[0][1];
  return sorted.map(([reason, count]) =>
    make(
      "div",
      { class: "reason" },
      make("p", { class: "reason-name" }, BYPASS_NAMES[reason] ?? reason),
      make("p", { class: "number" }, place(`${known}/bypass_counts/${reason}`, "count")),
      bar(count, most),
      make("p", { class: "muted small" }, BYPASS_REASONS[reason] ?? "Unknown reason."),
    ),
  );
}
