// The gateway itself: added latency, outcomes, policy and store.

import { make, several } from "./elements.js";
import { place } from "./numbers.js";

export function gatewayFacts({ gateway, store, policy, outcomes, prefix, failovers }) {
  const failed = Object.entries(outcomes).filter(([name, count]) => name !== "completed" && count);
  return [
    entry("Gateway overhead", gateway.added_latency_s.count ? [place("gateway/added_latency_s/p50", "duration"), " per request (median)"] : "no request yet"),
    entry("Requests", [outcomes.completed ? place("outcomes/completed", "count") : "0", " answered", ...failed.map(([name]) => otherwise(name)), ...(failovers ? [", ", place("failovers", "count"), " times gone on at another worker"] : [])]),
    entry("System prompts", ["cache hits ", place("prefix/hit", "count"), ", misses ", place("prefix/miss", "count")]),
    entry("Policy", ["version ", place("policy/version", "count"), policy.file_problem && `: ${policy.file_problem}`]),
    entry("State", [sharing(store), store.problem && `: ${store.problem}`]),
    entry("Uptime", [place("gateway/uptime_s", "duration")]),
  ];
}

// How requests end that are not completed.
const OUTCOMES = {
  refused: "at fault themselves",
  unserved: "without a free worker",
  resent: "sent on by the proxy in front",
  failed: "failed by a worker",
  client_left: "left by the client",
};

const otherwise = (name) => [", ", place(`outcomes/${name}`, "count"), ` ${OUTCOMES[name] ?? name}`];

const sharing = ({ kind, gateways }) =>
  kind === "redis" ? `shared by ${several(gateways, "gateway")}` : "stored by this gateway only";

const entry = (name, said) => make("div", {}, make("dt", {}, name), make("dd", {}, said));
