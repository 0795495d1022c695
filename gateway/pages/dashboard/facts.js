// The four figures at the top of the page, and the summary of the fleet.

import { byId, make, several } from "./elements.js";
import { as, busyIn, place, write } from "./numbers.js";

export function showFacts(state) {
  const { mtp, savings, prefix } = state;
  figure("saved-mtp", savings.decode_steps > 0, savedByMtp(state));
  figure("accepted", mtp.drafts > 0, [place("mtp/mean_acceptance_length", "ratio"), " tokens per step"], () =>
    mtp.enabled ? "No drafts yet" : "No lane drafts",
  );
  const cached = [place("savings/prompt_tokens", "count"), " prompt tokens from the cache"];
  figure("saved-prompts", savings.prompt_tokens > 0, cached, () =>
    prefix.miss ? "No system prompt was repeated yet" : "No long system prompt yet",
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
  if (savings.decode_s < 0) return ["Drafting has cost more time than it saved so far"];
  return [place("savings/decode_steps", "count"), " decode steps saved"];
}

function showNow(state) {
  const { pools, recent, store: { gateways }, window: { coverage_s: coverage } } = state;
  const sum = (count) => Object.values(pools).reduce((all, pool) => all + count(pool), 0);
  const running = sum((pool) => pool[busyIn(pool)]);
  const waiting = sum((pool) => pool.waiting);
  const throughput = `${as.rate(recent.tokens_per_s)} tokens/s`;
  const line = [waiting && `${as.count(waiting)} queued`, recent.requests ? throughput : untilNow(state, "No recent request")];
  write(byId("now"), `${as.count(running)} running`);
  byId("now-line").textContent = line.filter(Boolean).join(" · ");
  byId("speed-window").textContent = `over ${as.duration(coverage)}`;
  byId("whose").hidden = gateways < 2;
  byId("whose").textContent =
    `Charts and latencies cover the requests that this gateway sent, one of ${as.count(gateways)}; counts cover all gateways.`;
  document.title = `${running} running · Paceline`;
}

function showFleet({ workers }) {
  const states = Object.values(workers).map(({ state }) => state);
  const there = states.filter((state) => state !== "gone").length;
  const ready = states.filter((state) => state === "ready").length;
  byId("fleet-line").textContent = there ? `${ready} of ${several(there, "worker")} ready` : "no worker";
  byId("trouble").hidden = there > 0;
  const how = make("code", {}, "paceline worker");
  byId("trouble").replaceChildren(
    make("span", {}, "No worker has joined, so requests cannot be answered. Start one with ", how, "."),
  );
}

const untilNow = ({ decisions }, otherwise) => (decisions.total ? otherwise : "No request yet");
