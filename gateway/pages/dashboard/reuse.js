// The prompt tokens that workers did not read again, by what they are.

import { bar, make } from "./elements.js";
import { as } from "./numbers.js";

const KINDS = {
  system: ["System prompts", "A worker keeps each system prompt that it has read."],
  conversation: ["Earlier turns", "The next turn of a chat begins where the last one ended, in the memory of its worker."],
  moved: ["From another Mac", "A conversation whose Mac is full or away goes on at another one, which fetches what was read."],
  disk: ["From disk", "A conversation that the memory had no room for is read back from disk."],
};

export function reuse({ models, decisions, prefix }) {
  const caches = Object.values(models).map(({ prefix }) => prefix);
  const counts = Object.keys(KINDS).map((kind) => sum(caches, ({ tokens_by_kind: tokens }) => tokens[kind] ?? 0));
  const most = Math.max(...counts);
  if (!most) return make("p", { class: "empty" }, decisions.total ? "No prompt has repeated an earlier one yet." : "No request yet.");
  const missed = Object.entries(prefix.not_reused).map(([why, count]) => `${why} (${as.count(count)})`);
  return [
    Object.values(KINDS).map(([name, text], index) => row(name, text, counts[index], most)),
    missed.length > 0 && make("p", { class: "muted small" }, `Why earlier turns were read again: ${missed.join(", ")}.`),
  ].flat().filter(Boolean);
}

const sum = (all, count) => all.reduce((total, one) => total + count(one), 0);

const row = (name, text, count, most) =>
  make(
    "div",
    { class: "reason" },
    make("p", { class: "reason-name" }, name),
    make("p", { class: "number" }, as.count(count)),
    bar(count, most),
    make("p", { class: "muted small" }, text),
  );
