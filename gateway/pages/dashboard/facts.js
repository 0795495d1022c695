// What it bought, in four figures, and how it is just now.

import { byId, make, several } from "./elements.js";
import { as, busyIn, place, write } from "./numbers.js";

export function showFacts(state) {
  const { mtp, savings, prefix } = state;
  figure("saved-mtp", savings.decode_steps > 0, savedByMtp(state));
  figure("accepted", mtp.drafts > 0, [place("mtp/mean_acceptance_length", "ratio"), " tokens a step"], () =>
    mtp.enabled ? "Nothing drafted yet" : "No lane drafts",
  );
  const notRead = [place("savings/prompt_tokens", "count"), " prompt tokens not read again"];
  figure("saved-prompts", savings.prompt_tokens > 0, notRead, () =>
    prefix.miss ? "No prompt came twice yet" : "No long system prompt yet",
  );
  byId("saved-mtp").classList.toggle("lost", savings.decode_s < 0);
  showNow(state);
  showFleet(state);

  // What stands below a figure, or why there is none.
  function figure(id, any, said, otherwise = () => "Nothing accepted yet") {
    byId(id).classList.toggle("none", !any);
    byId(`${id}-line`).replaceChildren(...(any ? said : [untilNow(state, otherwise())]));
  }
}

function savedByMtp({ savings }) {
  if (savings.decode_s < 0) return ["Drafting cost more than it brought so far"];
  return [place("savings/decode_steps", "count"), " tokens without a step of their own"];
}

function showNow(state) {
  const { pools, recent, store: { gateways }, window: { coverage_s: coverage } } = state;
  const sum = (count) => Object.values(pools).reduce((all, pool) => all + count(pool), 0);
  const running = sum((pool) => pool[busyIn(pool)]);
  const waiting = sum((pool) => pool.waiting);
  const lately = `${as.rate(recent.tokens_per_s)} tokens/s lately`;
  const said = [waiting && `${as.count(waiting)} waiting`, recent.requests ? lately : untilNow(state, "No request lately")];
  write(byId("now"), `${as.count(running)} running`);
  byId("now-line").textContent = said.filter(Boolean).join(" · ");
  byId("speed-window").textContent = `over ${as.duration(coverage)}`;
  byId("whose").hidden = gateways < 2;
  byId("whose").textContent =
    `Curves and speeds are of the requests that this gateway sent, one of ${as.count(gateways)}; counts are of all.`;
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
    make("span", {}, "No worker has joined, so no request can be answered. Start one with ", how, "."),
  );
}

const untilNow = ({ decisions }, otherwise) => (decisions.total ? otherwise : "No request yet");
