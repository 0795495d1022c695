// Why requests were not drafted for, each reason in a sentence.

import { bar, make } from "./elements.js";
import { place } from "./numbers.js";

const SENTENCES = {
  media: "The request contains pictures, video, audio or files.",
  non_greedy_sampling: "The request samples: its temperature is above 0. Set temperature 0 to use drafts.",
  logits_processors: "Penalties, biases or forbidden words change token scores.",
  logprobs: "The request asks for log probabilities.",
  multiple_choices: "The request asks for several choices (n above 1).",
  thinking_budget: "The request limits how long the model may think.",
  prompt_too_long: "The prompt is longer than the speculative lane accepts.",
  no_mtp_worker: "No worker with an MTP head was available.",
  mtp_not_paying: "Drafting was measured to be slower than plain decoding at that batch size.",
  head_unhealthy: "The MTP head failed its self-test, or kept failing.",
};

// If lanes draft, use the counts of the workers: a request that a picture keeps out of the
// speculative lane may be drafted for in another. Else use the counts of the decisions.
export function reasons({ decisions, mtp }) {
  const known = mtp.enabled ? "mtp" : "decisions";
  const counts = (mtp.enabled ? mtp : decisions).bypass_counts;
  const sorted = Object.entries(counts).filter(([, count]) => count).sort(([, one], [, other]) => other - one);
  if (!sorted.length) {
    return make("p", { class: "empty" }, decisions.total ? "No request was excluded so far." : "No request yet.");
  }
  const most = sorted[0][1];
  return sorted.map(([reason, count]) =>
    make(
      "div",
      { class: "reason" },
      make("p", { class: "reason-name" }, reason.replaceAll("_", " ")),
      make("p", { class: "number" }, place(`${known}/bypass_counts/${reason}`, "count")),
      bar(count, most),
      make("p", { class: "muted small" }, SENTENCES[reason] ?? "Unknown reason."),
    ),
  );
}
