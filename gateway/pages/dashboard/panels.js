// The panels below the charts: drafts by position, reuse, requests without drafts, latencies, and the gateway itself.

import { BYPASS_NAMES, BYPASS_REASONS } from "../shared/bypass_reasons.js";
import { bar, make, several } from "../shared/elements.js";
import { as, place } from "./numbers.js";

const empty = (text) => make("p", { class: "empty" }, text);

// A name, a number, a bar that shows the number beside the largest one, and a sentence.
const row = (name, number, count, most, text) =>
  make(
    "div",
    { class: "reason" },
    make("p", { class: "reason-name" }, name),
    make("p", { class: "number" }, number),
    bar(count, most),
    make("p", { class: "muted small" }, text),
  );

const POSITIONS = ["1st token", "2nd token", "3rd token"];

export function positions({ mtp, decisions }) {
  const shares = mtp.enabled ? mtp.acceptance_rate_per_position : [];
  if (!shares.length) return empty(mtp.enabled ? (decisions.total ? "No drafts yet." : "No request yet.") : "No lane drafts.");
  const position = (share, index) =>
    make(
      "div",
      { class: "position" },
      make("span", { class: "position-name" }, POSITIONS[index] ?? `${index + 1}th token`),
      place(`mtp/acceptance_rate_per_position/${index}`, "percent"),
      bar(share, 1),
    );
  const counts = [place("mtp/accepted", "count"), " of ", place("mtp/attempted", "count")];
  return [
    make("div", { class: "positions" }, shares.map(position)),
    make("p", { class: "muted small" }, counts, " draft tokens were accepted."),
    make("p", { class: "muted small" }, "Shares refer to all drafts; not every draft was that long."),
  ];
}

// The prompt tokens that workers did not read again, by what they are.
const KINDS = {
  system: ["System prompts", "A worker keeps each system prompt that it has read."],
  conversation: ["Earlier turns", "The next turn of a chat continues from the memory of its worker."],
  moved: ["From another Mac", "If the Mac of a conversation is full or away, another one continues it and fetches the cached prompt."],
  disk: ["From disk", "A conversation that did not fit into memory is read from disk."],
};

export function reuse({ decisions, prefix }) {
  const counts = Object.keys(KINDS).map((kind) => prefix.tokens_by_kind[kind] ?? 0);
  const most = Math.max(...counts);
  if (!most) return empty(decisions.total ? "No prompt has repeated an earlier one yet." : "No request yet.");
  const missed = Object.entries(prefix.not_reused).map(([why, count]) => `${why} (${as.count(count)})`);
  return [
    ...Object.values(KINDS).map(([name, text], index) => row(name, as.count(counts[index]), counts[index], most, text)),
    ...(missed.length ? [make("p", { class: "muted small" }, `Reasons to read earlier turns again: ${missed.join(", ")}.`)] : []),
  ];
}

// If lanes draft, use the counts of the workers: a request that a picture keeps out of the
// speculative lane may be drafted for in another. Else use the counts of the decisions.
export function reasons({ decisions, mtp }) {
  const known = mtp.enabled ? "mtp" : "decisions";
  const counts = (mtp.enabled ? mtp : decisions).bypass_counts;
  const sorted = Object.entries(counts).filter(([, count]) => count).sort(([, one], [, other]) => other - one);
  if (!sorted.length) return empty(decisions.total ? "No requests without drafts so far." : "No request yet.");
  return sorted.map(([reason, count]) =>
    row(BYPASS_NAMES[reason] ?? reason, place(`${known}/bypass_counts/${reason}`, "count"), count, sorted[0][1], BYPASS_REASONS[reason] ?? "Unknown reason."),
  );
}

const LATENCIES = [
  ["First token", "first_token_s"],
  ["Each further token", "token_s"],
  ["Time in the queue", "wait_s"],
  ["Complete response", "duration_s"],
];

// Latency percentiles of each pool within the window.
export function speeds({ pools }) {
  const busy = Object.keys(pools).filter((name) => pools[name].recent.requests > 0);
  if (!busy.length) return empty("No requests ended in this window.");
  const head = (name) => make("th", { class: "number", scope: "col" }, name);
  const line = (said, cells) => make("tr", {}, make("th", { scope: "row" }, said), cells);
  const cell = (name, field) => {
    if (!pools[name].recent[field].count) return make("td", { class: "number muted" }, "–");
    const of = (which) => place(`pools/${name}/recent/${field}/${which}`, "duration");
    return make("td", { class: "number" }, of("p50"), make("span", { class: "muted small block" }, of("p95")));
  };
  const requests = (name) => make("td", { class: "number" }, place(`pools/${name}/recent/requests`, "count"));
  return make(
    "table",
    {},
    make("thead", {}, make("tr", {}, make("th", {}, "Median, then 95th percentile"), busy.map(head))),
    make("tbody", {}, LATENCIES.map(([said, field]) => line(said, busy.map((name) => cell(name, field)))), line("Requests", busy.map(requests))),
  );
}

// How requests end that are not completed.
const OUTCOMES = {
  refused: "refused because of the client",
  unserved: "without a free worker",
  resent: "resent by the proxy",
  failed: "failed by a worker",
  client_left: "abandoned by the client",
};

export function gateway({ gateway, store, policy, outcomes, failovers }) {
  const entry = (name, said) => make("div", {}, make("dt", {}, name), make("dd", {}, said));
  const failed = Object.entries(outcomes).filter(([name, count]) => name !== "completed" && count);
  const otherwise = ([name]) => [", ", place(`outcomes/${name}`, "count"), ` ${OUTCOMES[name] ?? name}`];
  const moved = failovers ? [", ", place("failovers", "count"), " times continued at another worker"] : [];
  const sharing = store.kind === "redis" ? `shared by ${several(store.gateways, "gateway")}` : "stored by this gateway only";
  return [
    entry("Gateway overhead", gateway.added_latency_s.count ? [place("gateway/added_latency_s/p50", "duration"), " per request (median)"] : "no request yet"),
    entry("Requests", [outcomes.completed ? place("outcomes/completed", "count") : "0", " answered", ...failed.map(otherwise), ...moved]),
    entry("System prompts", ["cache hits ", place("prefix/hit", "count"), ", misses ", place("prefix/miss", "count")]),
    entry("Policy", ["version ", place("policy/version", "count"), policy.file_problem && `: ${policy.file_problem}`]),
    entry("State", [sharing, store.problem && `: ${store.problem}`]),
    entry("Uptime", [place("gateway/uptime_s", "duration")]),
  ];
}
