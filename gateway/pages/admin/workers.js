// The workers: load, cordon and drain, and how to add one.

import { request, requestJson } from "./api.js";
import { openDialog } from "./dialogs.js";
import { copyButton } from "../shared/copy.js";
import { ago, bar, button, byId, make, notice, pill, several } from "../shared/elements.js";
import { authorHeader } from "./policy_api.js";

const REFRESH_MS = 2000;
const DRAIN_S = 20;
// Why a worker is gone, in `gone_because`.
const GONE = {
  restarting: "Its process ended and is being restarted.",
  silent: "It has sent nothing since. It may be asleep, switched off or disconnected from the network.",
  left: "It signed off.",
};
const TONES = { ready: "ok", cordoned: "warn", gone: "bad", ejected: "bad", unreachable: "bad" };

let timer;
const draining = new Set();
let arrivals; // while the dialog is open: the workers known before, and the place of the news

export const workers = {
  async enter() {
    timer = setInterval(() => document.hidden || refresh(), REFRESH_MS);
    await refresh();
  },
  leave() {
    clearInterval(timer);
  },
};

async function refresh() {
  try {
    show((await requestJson("GET", "/workers")).workers);
  } catch (error) {
    if (error.status !== 401) byId("fleet-line").textContent = error.message;
  }
}

function show(all) {
  // A paired one that has not come yet, or for a day, is shown and not counted.
  const here = all.filter(({ gone_because: why, cordoned_since: held, state }) => held || (why ? why !== "left" : state !== "gone"));
  const open = here.filter(({ state }) => state === "ready").length;
  showArrivals(all);
  const running = all.reduce((sum, worker) => sum + worker.in_flight, 0);
  byId("fleet-line").textContent = here.length
    ? `${open} of ${several(here.length, "worker")} ready, ${several(running, "request")} running`
    : "";
  const cards = all.length
    ? all.sort((one, other) => one.worker_id.localeCompare(other.worker_id)).map(card)
    : [make("p", { class: "card empty" }, "No worker has joined. Choose \u201cAdd a Mac\u201d.")];
  const shown = [...byId("workers").children];
  const focused = document.activeElement?.dataset.action;
  const name = (element) => element.getAttribute("aria-label");
  if (shown.map(name).join("\n") === cards.map(name).join("\n")) shown.forEach((one, index) => update(one, cards[index]));
  else byId("workers").replaceChildren(...cards);
  if (focused) byId("workers").querySelector(`[data-action="${CSS.escape(focused)}"]`)?.focus();
}

// Replace what has changed alone: a button keeps its focus, and a click that falls between two answers.
function update(shown, fresh) {
  const parts = [...fresh.children];
  if (shown.children.length !== parts.length) shown.replaceChildren(...parts);
  else [...shown.children].forEach((part, index) => part.isEqualNode(parts[index]) || part.replaceWith(parts[index]));
}

function card(worker) {
  const { worker_id: id, state, lanes, labels = [], kind } = worker;
  const beat = worker.heartbeat_age_s;
  const connection = { true: "TLS", false: "plain HTTP" }[worker.tls];
  const details = [worker.model, kind !== "paceline" && kind, ...labels, connection, beat !== undefined && `last heartbeat ${beat < 1 ? "now" : `${Math.round(beat)} s ago`}`];
  return make(
    "article",
    { class: "card worker", "aria-label": id },
    make("div", { class: "card-head" }, make("h2", { class: "title" }, id), pill(state, TONES[state] ?? "warn")),
    make("p", { class: "muted small" }, details.filter(Boolean).join(" · ")),
    worker.url && make("p", { class: "muted small address" }, worker.url),
    worker.gone_since && make("p", { class: "cordon-line" }, "Its last report arrived ", ago(worker.gone_since), ". ", GONE[worker.gone_because]),
    worker.problem && make("p", { class: "cordon-line", role: "status" }, worker.problem),
    make("div", { class: "lanes" }, lanes.map(lane)),
    worker.cordoned_since && cordonLine(worker),
    worker.paired_since && make("p", { class: "muted small" }, "Paired ", ago(worker.paired_since), worker.last_seen && [", last seen ", ago(worker.last_seen)], "."),
    make("div", { class: "row" }, actions(worker)),
  );
}

function lane({ name, slots, running, waiting, in_flight }) {
  const busy = Math.max(running, in_flight);
  const load = `${busy} of ${several(slots, "slot")}${waiting ? `, ${waiting} waiting` : ""}`;
  return make(
    "div",
    { class: "lane" },
    make("span", { class: "lane-name" }, name),
    bar(busy, Math.max(1, slots), busy >= slots ? "full" : ""),
    make("span", { class: "muted small" }, load),
  );
}

function cordonLine({ in_flight, cordoned_since, cordoned_by }) {
  const rest = in_flight
    ? `${several(in_flight, "request")} still ${in_flight === 1 ? "runs" : "run"}.`
    : "It has no running requests, so you can stop it.";
  return make("p", { class: "cordon-line" }, "No new requests since ", ago(cordoned_since), `, by ${cordoned_by}. ${rest}`);
}

function actions({ worker_id: id, cordoned_since, gone_since, in_flight, paired_since }) {
  const named = (action, text, act, settings = {}) =>
    button(text, () => perform(act), { "data-action": `${action} ${id}`, "aria-label": `${text} ${id}`, ...settings });
  if (draining.has(id)) return [named("stop", "Uncordon", () => uncordon(id)), make("span", { class: "muted small" }, "draining …")];
  if (cordoned_since) {
    const rest = in_flight > 0 && named("drain", "Drain", () => drain(id));
    return [named("toggle", "Uncordon", () => uncordon(id), { class: "primary" }), rest];
  }
  return [
    named("toggle", "Cordon", () => cordon(id), { title: "No new requests; running requests finish" }),
    !gone_since && named("drain", "Drain", () => drain(id), { title: "Cordon, and wait until its requests have ended" }),
    paired_since && named("unpair", "Unpair", () => unpair(id), { title: "Its token ends, and it leaves" }),
  ];
}

async function cordon(id) {
  await request("PUT", path(id, "cordon"), { headers: authorHeader() });
  notice(`${id} gets no new requests.`);
}

async function uncordon(id) {
  await request("DELETE", path(id, "cordon"), { headers: authorHeader() });
  notice(`${id} gets requests again.`);
}

// Cordon and wait; removing the cordon ends the wait.
async function drain(id) {
  draining.add(id);
  try {
    let result;
    do {
      result = await (await request("POST", path(id, `drain?timeout_s=${DRAIN_S}`), { headers: authorHeader() })).json();
    } while (!result.drained && result.cordoned_since);
    if (result.cordoned_since) notice(`${id} has no running requests, so you can stop it.`);
  } finally {
    draining.delete(id);
  }
}

// The join token opens the routes of workers, and no page may read it: the command names its place.
async function addMac() {
  const { workers: all, joining } = await requestJson("GET", "/workers");
  const near = ["localhost", "127.0.0.1", "[::1]"].includes(location.hostname);
  const gateway = near ? joining.url : location.origin;
  const there = joining.local_url.endsWith(":8000") ? "" : ` --url ${joining.local_url}`;
  const token = `$(cat '${joining.token_file.replaceAll("'", `'\\''`)}')`;
  const news = make("p", { role: "status" }, "Waiting for a new worker …");
  arrivals = { known: undefined, news };
  const shown = make("p", { role: "status" });
  const show = button("Show a code", () => perform(() => showCode(shown)), { class: "primary" });
  const join = [
    make("p", {}, "On the new Mac, install Paceline for a worker, run this command, and enter the code. It is good for two minutes and one try."),
    command("Copy the command that joins by a code", `paceline join ${gateway}${model(all)}`),
    make("div", { class: "row" }, show, shown),
    make("p", {}, "Without a code: on the gateway\u2019s machine, print the command for the new Mac, with the join token. If PACELINE_JOIN_TOKEN sets the token, use it instead of the file:"),
    command("Copy the command that prints the command", `echo "PACELINE_JOIN_TOKEN=${token} paceline worker --join ${gateway}${model(all)}"`),
    make("p", {}, "On the new Mac, install Paceline for a worker, and run the printed command (in a clone, with .venv/bin/paceline). Replace NAME, if the command has it, with the folder or the Hugging Face name of a model."),
  ];
  const open = [
    make("p", {}, "The gateway serves only its own machine. For other Macs, create an API key, and restart the gateway so that it listens on your network; then this dialog has the command that joins a Mac:"),
    command("Copy the command that opens the gateway", "paceline up --host 0.0.0.0"),
  ];
  const dialog = openDialog(
    "Add a Mac",
    [
      gateway ? join : open,
      make("p", {}, "A Mac that already runs LM Studio, Ollama, mlx-lm, mlx-vlm, vllm-mlx, oMLX or llama.cpp can join without changes. Run this command on the gateway\u2019s machine, with the address and the port of that engine:"),
      command("Copy the command that joins an engine", `paceline join-engine ${new URL(joining.local_url).protocol}//ITS-ADDRESS:PORT${there}`),
      news,
    ],
    [],
  );
  dialog.addEventListener("close", () => (arrivals = undefined));
  refresh();
}

async function showCode(place) {
  const { code } = await (await request("POST", "/pairing/code", { headers: authorHeader() })).json();
  place.replaceChildren(make("code", { class: "title" }, `${code.slice(0, 4)}-${code.slice(4)}`));
}

async function unpair(id) {
  await request("DELETE", `/pairing/workers/${encodeURIComponent(id)}`, { headers: authorHeader() });
  notice(`${id} is no longer paired.`);
}

function command(label, text) {
  return make("div", { class: "row" }, make("pre", { class: "command", tabindex: "0" }, make("code", {}, text)), copyButton(text, { "aria-label": label }));
}

// Another Mac of a fleet most likely serves its model; the demo is the default.
function model(all) {
  const names = all.map(({ model: name }) => name).filter(Boolean);
  if (names.every((name) => name === "demo")) return "";
  return ` --model ${names.find((name) => name.includes("/")) ?? "NAME"}`;
}

function showArrivals(all) {
  if (!arrivals) return;
  arrivals.known ??= new Set(all.filter(({ state }) => state !== "gone").map(({ worker_id: id }) => id));
  const added = all.filter(({ worker_id: id, state }) => state !== "gone" && !arrivals.known.has(id));
  const text = added.map(({ worker_id: id, state, problem }) => `${id}: ${problem ?? state}`).join(" ");
  if (text && arrivals.news.textContent !== text) arrivals.news.textContent = text;
}

byId("add-mac").addEventListener("click", () => perform(addMac));

const path = (id, action) => `/workers/${encodeURIComponent(id)}/${action}`;

async function perform(act) {
  const done = act();
  setTimeout(refresh, 100);
  try {
    await done;
  } catch (error) {
    if (error.status !== 401) notice(error.message);
  }
  await refresh();
}
