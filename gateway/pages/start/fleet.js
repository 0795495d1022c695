// The models and the Macs, as cards.

import { amount, make, pill, several } from "../shared/elements.js";

const TONES = { ready: "ok", gone: "bad", ejected: "bad" };

export function modelCards(models, status) {
  return models.filter(({ id, root }) => id === root).map(({ id }) => modelCard(id, aliases(models, id), status));
}

const aliases = (models, name) => models.filter(({ id, root }) => root === name && id !== name).map(({ id }) => id);

function modelCard(name, others, status) {
  const workers = Object.values(status?.workers ?? {}).filter(({ model, state }) => model === name && state !== "gone");
  const context = Math.max(0, ...workers.map(({ context_tokens: tokens }) => tokens));
  const facts = [
    workers.length > 0 && `On ${several(workers.length, "Mac")}`,
    context > 0 && `${amount(context)} tokens of context`,
    workers.some(({ lanes }) => "vlm" in lanes) && "reads pictures",
    workers.some(({ mtp }) => mtp.enabled) && "drafts ahead",
    workers.some(({ lanes }) => "embeddings" in lanes) && "returns vectors for texts",
    workers.some(({ lanes }) => "rerank" in lanes) && "ranks documents",
  ].filter(Boolean);
  return make(
    "article",
    { class: "card", "aria-label": name },
    make("h3", { class: "title" }, name),
    facts.length > 0 && make("p", { class: "muted small" }, facts.join(", ")),
    others.length > 0 && make("p", { class: "muted small" }, "Also called ", others.join(", ")),
  );
}

export function macCards({ workers }) {
  return Object.entries(workers).map(([name, { state, model, labels, lanes }]) => {
    const busy = Object.values(lanes).reduce((sum, { in_flight: requests }) => sum + requests, 0);
    return make(
      "article",
      { class: "card", "aria-label": name },
      make("div", { class: "card-head" }, make("h3", { class: "title" }, name), pill(state, TONES[state] ?? "warn")),
      make("p", { class: "muted small" }, [model, ...labels, state !== "gone" && `${several(busy, "request")} running`].filter(Boolean).join(" · ")),
    );
  });
}
