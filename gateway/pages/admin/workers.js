// The workers: how busy they are, and who gets no new requests.

import { ask, askJson } from "./api.js";
import { ago, bar, button, byId, make, notice, pill, several } from "./elements.js";
import { signature } from "./policy_api.js";

const LOOK_MS = 2000;
const DRAIN_S = 20;
const TONES = { ready: "ok", cordoned: "warn", gone: "bad", ejected: "bad" };

let looking;
const draining = new Set();

export const workers = {
  async enter() {
    looking = setInterval(() => document.hidden || refresh(), LOOK_MS);
    await refresh();
  },
  leave() {
    clearInterval(looking);
  },
};

async function refresh() {
  try {
    show((await askJson("GET", "/workers")).workers);
  } catch (refused) {
    if (refused.status !== 401) byId("fleet-line").textContent = refused.message;
  }
}

function show(all) {
  const open = all.filter(({ state }) => state === "ready").length;
  const running = all.reduce((sum, worker) => sum + worker.in_flight, 0);
  byId("fleet-line").textContent = all.length
    ? `${open} of ${several(all.length, "worker")} ready, ${several(running, "request")} running`
    : "";
  const focused = document.activeElement?.dataset.action;
  byId("workers").replaceChildren(
    ...(all.length
      ? all.sort((one, other) => one.worker_id.localeCompare(other.worker_id)).map(card)
      : [make("p", { class: "card empty" }, "No worker has joined. Start one with ", make("code", {}, "paceline worker"), ".")]),
  );
  // Drawn anew every two seconds; who is on a button stays on it.
  if (focused) byId("workers").querySelector(`[data-action="${CSS.escape(focused)}"]`)?.focus();
}

function card(worker) {
  const { worker_id: id, state, lanes, labels = [] } = worker;
  const beat = worker.heartbeat_age_s;
  const known = [worker.model, ...labels, beat !== undefined && `seen ${beat < 1 ? "now" : `${Math.round(beat)} s ago`}`];
  return make(
    "article",
    { class: "card worker", "aria-label": id },
    make("div", { class: "card-head" }, make("h2", { class: "title" }, id), pill(state, TONES[state] ?? "warn")),
    make("p", { class: "muted small" }, known.filter(Boolean).join(" · ")),
    worker.url && make("p", { class: "muted small address" }, worker.url),
    make("div", { class: "lanes" }, lanes.map(lane)),
    worker.cordoned_since && cordonLine(worker),
    make("div", { class: "row" }, actions(worker)),
  );
}

function lane({ name, slots, running, waiting, in_flight }) {
  const busy = Math.max(running, in_flight);
  const said = `${busy} of ${several(slots, "slot")}${waiting ? `, ${waiting} waiting` : ""}`;
  return make(
    "div",
    { class: "lane" },
    make("span", { class: "lane-name" }, name),
    bar(busy, Math.max(1, slots), busy >= slots ? "full" : ""),
    make("span", { class: "muted small" }, said),
  );
}

function cordonLine({ in_flight, cordoned_since, cordoned_by }) {
  const rest = in_flight
    ? `${several(in_flight, "answer")} still ${in_flight === 1 ? "runs" : "run"}.`
    : "Nothing runs there: it can be stopped.";
  return make("p", { class: "cordon-line" }, "Gets no new requests since ", ago(cordoned_since), `, by ${cordoned_by}. ${rest}`);
}

function actions({ worker_id: id, cordoned_since, in_flight }) {
  const named = (action, text, act, settings = {}) =>
    button(text, () => tried(act), { "data-action": `${action} ${id}`, "aria-label": `${text} ${id}`, ...settings });
  if (draining.has(id)) return [named("stop", "Uncordon", () => uncordon(id)), make("span", { class: "muted small" }, "draining …")];
  if (cordoned_since) {
    const rest = in_flight > 0 && named("drain", "Drain", () => drain(id));
    return [named("toggle", "Uncordon", () => uncordon(id), { class: "primary" }), rest];
  }
  return [
    named("toggle", "Cordon", () => cordon(id), { title: "No new requests; what runs there goes on" }),
    named("drain", "Drain", () => drain(id), { title: "Cordon, and wait until nothing runs there" }),
  ];
}

async function cordon(id) {
  await ask("PUT", path(id, "cordon"), { headers: signature() });
  notice(`${id} gets no new requests.`);
}

async function uncordon(id) {
  await ask("DELETE", path(id, "cordon"), { headers: signature() });
  notice(`${id} gets requests again.`);
}

// Cordon and wait; a cordon that is lifted meanwhile ends the wait.
async function drain(id) {
  draining.add(id);
  try {
    let told;
    do {
      told = await (await ask("POST", path(id, `drain?timeout_s=${DRAIN_S}`), { headers: signature() })).json();
    } while (!told.drained && told.cordoned_since);
    if (told.cordoned_since) notice(`${id} is empty: it can be stopped.`);
  } finally {
    draining.delete(id);
  }
}

const path = (id, what) => `/workers/${encodeURIComponent(id)}/${what}`;

async function tried(act) {
  const done = act();
  setTimeout(refresh, 100);
  try {
    await done;
  } catch (refused) {
    if (refused.status !== 401) notice(refused.message);
  }
  await refresh();
}
