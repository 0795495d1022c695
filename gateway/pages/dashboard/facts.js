// The figures at the top of the page: the fleet and its load, then what drafts and cached prompts saved.

import { byId, make, several } from "../shared/elements.js";
import { as, busyIn, place, span, write } from "./numbers.js";

export function showFacts(state) {
  const { mtp, savings } = state;
  figure("saved-mtp", savings.decode_steps > 0, savedByMtp(state));
  figure("accepted", mtp.drafts > 0, [place("mtp/mean_acceptance_length", "ratio"), " tokens per step"], () =>
    mtp.enabled ? "No drafts yet" : "No lane drafts",
  );
  const cached = [place("savings/prompt_tokens", "count"), " prompt tokens from the cache"];
  figure("saved-prompts", savings.prompt_tokens > 0, cached, () =>
    "No prompt has repeated an earlier one yet",
  );
  byId("saved-mtp").classList.toggle("lost", savings.decode_s < 0);
  showNow(state);
  showFleet(state);

  // Write the line below a figure, or why there is no figure.
  function figure(id, any, line, otherwise = () => "No draft accepted yet") {
    byId(id).classList.toggle("none", !any);
    byId(`${id}-line`).replaceChildren(...(any ? line : [untilNow(state, otherwise())]));
  }
}

function savedByMtp({ savings }) {
  if (savings.decode_s < 0) return ["Drafting has cost more time than it has saved"];
  return [place("savings/decode_steps", "count"), " decode steps saved"];
}

function showNow(state) {
  const { pools, history, store: { gateways }, window: { coverage_s: coverage } } = state;
  const sum = (count) => Object.values(pools).reduce((all, pool) => all + count(pool), 0);
  const running = sum((pool) => pool[busyIn(pool)]);
  const waiting = sum((pool) => pool.waiting);
  const line = [`${as.count(running)} running`, waiting && `${as.count(waiting)} queued`, `${as.rate(throughput(history))} tokens/s`];
  byId("requests-line").textContent = running || state.decisions.total ? line.filter(Boolean).join(" · ") : "No request yet";
  byId("speed-window").textContent = `in the last ${span(coverage)}`;
  byId("lane-window").textContent = `Tokens/s: median in the last ${span(coverage)}.`;
  byId("whose").hidden = gateways < 2;
  byId("whose").textContent =
    `Charts and latencies cover the requests that this gateway sent, one of ${as.count(gateways)}; counts cover all gateways.`;
  document.title = `${running} running · Paceline`;
  showErrors(state);
  showWait(state);
}

// Tokens per second of all requests together, over the last minute.
function throughput(history) {
  const recent = history.filter(({ age_s: age }) => age < 60);
  const seconds = recent.reduce((all, { interval_s: length }) => all + length, 0);
  return seconds ? recent.reduce((all, { tokens_per_s: rate, interval_s: length }) => all + rate * length, 0) / seconds : 0;
}

function showErrors(state) {
  const { last_hour: { answered, errors }, last_minute: { errors: lately } } = state;
  byId("errors-hour").classList.toggle("lost", errors > 0);
  const link = make("a", { href: "#errors-title" }, "Show them");
  const line = [`of ${several(answered, "request")}, ${as.count(lately)} in the last minute. `, link];
  const fresh = make("p", {}, errors ? line : answered ? `of ${several(answered, "request")}` : untilNow(state, "No requests in the last hour"));
  if (byId("errors-line").textContent !== fresh.textContent) byId("errors-line").replaceChildren(...fresh.childNodes);
}

function showWait(state) {
  const { recent: { requests, wait_s: wait }, window: { coverage_s: coverage } } = state;
  write(byId("wait"), as.duration(wait.p50));
  byId("wait").classList.toggle("none", !wait.count);
  const over = ` in the last ${span(coverage)}`;
  byId("wait-line").textContent = wait.count
    ? `median of the ${several(wait.count, "request")} that waited${over}; 95th percentile ${as.duration(wait.p95)}`
    : requests ? `No request waited${over}` : untilNow(state, "No recent request");
}

function showFleet({ workers }) {
  const all = Object.values(workers).filter(({ state, absence }) => state !== "gone" || absence.kind !== "left");
  const ready = all.filter(({ state }) => state === "ready").length;
  const models = [...new Set(all.map(({ model }) => model).filter(Boolean))];
  write(byId("macs"), all.length ? `${ready} of ${all.length}` : "0");
  byId("macs-line").textContent = models.length ? models.join(", ") : "No model yet";
}

const untilNow = ({ decisions }, otherwise) => (decisions.total ? otherwise : "No request yet");
