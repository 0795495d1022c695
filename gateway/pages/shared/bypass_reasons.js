// Why a request is not for the lane of greedy text, or ran where it ran: in a few words, and in a sentence.

export const BYPASS_NAMES = {
  endpoint: "Embeddings and ranking",
  exact: "Exact answers",
  media: "Pictures and other media",
  non_greedy_sampling: "Temperature above 0",
  logits_processors: "Changed token scores",
  logprobs: "Log probabilities",
  multiple_choices: "Several choices",
  prompt_too_long: "Long prompts",
  no_mtp_worker: "No worker that drafts",
  mtp_not_paying: "Drafting did not pay",
  head_unhealthy: "Faulty MTP head",
};

export const BYPASS_REASONS = {
  endpoint: "The request is for vectors or a ranking, so the model generates no text.",
  exact: "The answer must be the same in every bit, whatever other requests run.",
  media: "The request contains pictures, video, audio or files.",
  non_greedy_sampling: "The request samples: its temperature is above 0. Its lane drafts only if that saves time.",
  logits_processors: "Penalties, biases or forbidden words change the token scores.",
  logprobs: "The request asks for log probabilities.",
  multiple_choices: "The request asks for several choices (n above 1).",
  prompt_too_long: "The prompt is longer than the lane text-mtp accepts.",
  no_mtp_worker: "No worker that can draft was available.",
  mtp_not_paying: "At that batch size, drafting was slower than plain decoding.",
  head_unhealthy: "The MTP head failed its self-test, or kept failing.",
};

export const LANE_REASONS = {
  ...BYPASS_REASONS,
  eligible: "Greedy text runs in the lane that drafts most.",
  policy: "The policy sends such requests there.",
  spilled: "The preferred pool was full.",
};
