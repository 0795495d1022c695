// The workers: state, memory and load.

import { bar, make, pill, several } from "../shared/elements.js";
import { busyIn, place } from "./numbers.js";

const DRAFTED = { head: "by the MTP head", lookup: "by prompt lookup", forced: "by a schema" };
// Of prompts that take long to read.
const LONG_TOKENS = 1000;
const TONES = { ready: "ok", gone: "bad", ejected: "bad" };

export function workers({ workers: all }) {
  const names = Object.keys(all);
  if (!names.length) return make("p", { class: "card empty" }, "No worker has joined.");
  return names.map((name) => card(name, all[name]));
}

function card(name, worker) {
  const of = (path, kind) => place(`workers/${name}/${path}`, kind);
  const { state, kind, model, models, labels, unreported, heartbeat_age_s: beat } = worker;
  const other = kind && kind !== "paceline";
  const gone = state === "gone";
  const seen = gone ? [] : [beat < 2 ? "seen now" : `seen ${Math.round(beat)} s ago`];
  return make(
    "article",
    { class: "card worker", "aria-label": name },
    make("div", { class: "card-head" }, make("h3", { class: "title" }, name), pill(state, TONES[state] ?? "warn")),
    make("p", { class: "muted small" }, [...(models.length ? models : [model]), ...(other ? [kind] : []), ...labels, ...seen].join(" · ")),
    worker.ejection.reason && ejection(worker.ejection),
    worker.start.description && make("p", { class: "said warn" }, `Starting: ${worker.start.description}, ${Math.round(worker.start.elapsed_s)} s.`),
    !gone && Object.entries(worker.lanes).map(([lane, told]) => batch(of, lane, told)),
    make("dl", { class: "of-worker" }, !gone && memory(of, worker), worker.mtp.enabled && (worker.mtp.attempted ? [accepted(of), sources(of, worker.mtp)] : entry("Accepted", "no drafts yet")), !worker.mtp.enabled && unreported.drafts > 0 && unknown("Accepted"), unreported.cached_tokens > 0 && !worker.savings.prompt_tokens ? unknown("Cached") : saved(of)),
  );
}

const ejection = ({ remaining_s: left, reason }) => make("p", { class: "said bad" }, `Ejected for ${Math.round(left)} s: ${reason}.`);

function memory(of, { memory_bytes: held, prefix_cache_bytes: kept }) {
  if (!held) return null;
  return entry("Memory", of("memory_bytes", "size"), kept > 0 && [" with ", of("prefix_cache_bytes", "size"), " of cached prompts"]);
}

const accepted = (of) =>
  entry("Accepted", of("mtp/acceptance_rate", "percent"), [", ", of("mtp/mean_acceptance_length", "ratio"), " tokens per step"]);

const unknown = (name) => entry(name, "unknown: the engine does not report it");

// Return who drafted the accepted tokens; null where only the MTP head did.
function sources(of, { sources: by = {} }) {
  const names = Object.keys(by).filter((name) => by[name].accepted);
  if (names.every((name) => name === "head")) return null;
  return entry("Drafted", names.flatMap((name, index) => [index ? ", " : "", of(`mtp/sources/${name}/accepted`, "count"), ` ${DRAFTED[name] ?? name}`]));
}

const saved = (of) =>
  entry("Saved", of("savings/decode_s", "duration"), [" by drafting, ", of("savings/prompt_s", "duration"), " by cached prompts"]);

function batch(of, name, lane) {
  const { slots, waiting, pending_prefill_tokens: unread, head_healthy: healthy } = lane;
  const busy = lane[busyIn(lane)];
  const taken = [of(`lanes/${name}/${busyIn(lane)}`, "count"), " of ", of(`lanes/${name}/slots`, "count")];
  const said = [taken, waiting > 0 && `, ${several(waiting, "request")} queued`, unread >= LONG_TOKENS && `, reads prompts: ${several(unread, "token")} more`];
  return make(
    "div",
    { class: "batch" },
    make("span", { class: "batch-name" }, name),
    make("span", { class: "number" }, said),
    bar(busy, Math.max(1, slots), busy >= slots ? "full" : ""),
    !healthy && make("p", { class: "said warn" }, "The MTP head failed its self-test, so it does not draft."),
  );
}

const entry = (name, ...said) => [make("dt", {}, name), make("dd", {}, said)];
