// The gateway itself: what it adds, what it keeps, and what went wrong.

import { make, several } from "./elements.js";
import { place } from "./numbers.js";

export function gatewayFacts({ gateway, store, policy, outcomes, prefix }) {
  const failed = Object.entries(outcomes).filter(([name, count]) => name !== "completed" && count);
  return [
    entry("Adds", gateway.added_latency_s.count ? [place("gateway/added_latency_s/p50", "duration"), " to a request"] : "no request yet"),
    entry("Answered", [place("outcomes/completed", "count"), ...failed.map(([name]) => otherwise(name))]),
    entry("System prompts", [place("prefix/hit", "count"), " found, ", place("prefix/miss", "count"), " read anew"]),
    entry("Policy", ["version ", place("policy/version", "count"), policy.file_problem && `: ${policy.file_problem}`]),
    entry("State", [kept(store), store.problem && `: ${store.problem}`]),
    entry("Running", [place("gateway/uptime_s", "duration")]),
  ];
}

const otherwise = (name) => [", ", place(`outcomes/${name}`, "count"), ` ${name.replaceAll("_", " ")}`];

const kept = ({ kind, gateways }) =>
  kind === "redis" ? `shared by ${several(gateways, "gateway")}` : "of this gateway alone";

const entry = (name, said) => make("div", {}, make("dt", {}, name), make("dd", {}, said));
