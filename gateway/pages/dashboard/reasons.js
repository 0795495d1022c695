// Why requests did not speculate, each reason in a plain sentence.

import { bar, make } from "./elements.js";
import { place } from "./numbers.js";

const SENTENCES = {
  media: "They bring pictures, video, audio or files.",
  non_greedy_sampling: "They are sampled: temperature above 0. Ask with temperature 0 to speculate.",
  logits_processors: "Penalties, biases or forbidden words change the scores of tokens.",
  structured_output: "The answer must follow a schema.",
  logprobs: "They ask for log-probabilities.",
  multiple_choices: "They ask for several answers at once (n above 1).",
  thinking_budget: "They bound how long the model may think.",
  prompt_too_long: "The prompt is longer than the speculative lane takes.",
  no_mtp_worker: "No worker with an MTP head was there.",
  mtp_not_paying: "Drafting was measured to be slower than not drafting, with so many side by side.",
  head_unhealthy: "The MTP head failed its test or went on failing.",
};

// Where lanes draft, the workers know whom they did not draft for: one that a picture keeps out of
// the speculative lane may be drafted for in the other. Where none does, the decisions say why.
export function reasons({ decisions, mtp }) {
  const known = mtp.enabled ? "mtp" : "decisions";
  const counts = (mtp.enabled ? mtp : decisions).bypass_counts;
  const sorted = Object.entries(counts).filter(([, count]) => count).sort(([, one], [, other]) => other - one);
  if (!sorted.length) {
    return make("p", { class: "empty" }, decisions.total ? "Every request so far could speculate." : "No request yet.");
  }
  const most = sorted[0][1];
  return sorted.map(([reason, count]) =>
    make(
      "div",
      { class: "reason" },
      make("p", { class: "reason-name" }, reason.replaceAll("_", " ")),
      make("p", { class: "number" }, place(`${known}/bypass_counts/${reason}`, "count")),
      bar(count, most),
      make("p", { class: "muted small" }, SENTENCES[reason] ?? "A reason that this page does not know."),
    ),
  );
}
