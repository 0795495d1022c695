// What is wrong with the fleet: sentences for the banner, and the state in one word.

import { byId, make } from "../shared/elements.js";

// The time of a moment, and its day if that is not today.
function clock(unixS) {
  const date = new Date(1000 * unixS);
  const time = date.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" });
  return date.toDateString() === new Date().toDateString() ? time : `${time} on ${date.toLocaleDateString()}`;
}

// The sentences about one worker.
const SENTENCES = {
  restarting: (name, since) => `${name} stopped at ${since}; it is being started again.`,
  silent: (name, since) => `${name} has sent nothing since ${since}. It may be asleep, switched off or cut off from the network.`,
};

function sentences(workers) {
  return Object.entries(workers).flatMap(([name, { state, problem, absence, start, ejection }]) => {
    if (SENTENCES[absence.kind] && state !== "ready") return [SENTENCES[absence.kind](name, clock(absence.unix_s))];
    if (state === "unreachable") return [`This gateway cannot connect to ${name}. ${problem}`];
    if (state === "ejected") return [`${name} gets no requests for a while: ${ejection.reason}.`];
    if (state === "starting") return [`${name} is starting${start.description ? `: ${start.description}` : ""}.`];
    return [];
  });
}

export function showTrouble({ workers }) {
  const texts = sentences(workers);
  const present = Object.values(workers).some(({ state, absence }) => state !== "gone" || SENTENCES[absence.kind]);
  const why = Object.values(workers).some(({ absence }) => absence.kind === "left") ? "All Macs have signed off" : "No worker has joined";
  const command = make("code", {}, `PACELINE_JOIN_TOKEN=TOKEN paceline worker --join ${location.origin}`);
  const page = document.querySelector('nav a[href="/admin#workers"]') && ["; \u201cAdd a Mac\u201d on the page ", make("a", { href: "/admin#workers" }, "Workers"), " explains it"];
  const nobody = [`${why}, so requests cannot be answered. Start a worker with `, command, page, "."];
  show(present ? texts.map((text) => make("p", {}, text)) : [make("p", {}, nobody)]);
}

// Show why the page is not up to date.
export function showProblem(text) {
  show([make("p", {}, text)]);
}

function show(parts) {
  const fresh = make("div", {}, parts);
  const banner = byId("trouble");
  banner.hidden = !parts.length;
  // Screen readers repeat an alert whose content is replaced.
  if (banner.textContent !== fresh.textContent) banner.replaceChildren(...fresh.childNodes);
}

// Return the worst state as text and tone.
export function worstState({ gateway, store, workers }) {
  if (gateway.stopping) return ["Stopping", "warn"];
  const all = Object.values(workers);
  if (!all.some(({ state }) => ["ready", "busy", "probation"].includes(state))) {
    return all.some(({ state }) => state === "starting") ? ["Starting", "warn"] : ["No Mac ready", "bad"];
  }
  const lost = all.filter(({ state, absence }) => ["unreachable", "ejected"].includes(state) || (state === "gone" && SENTENCES[absence.kind]));
  if (lost.length) return [`${lost.length} ${lost.length === 1 ? "Mac" : "Macs"} missing`, "bad"];
  if (store.state === "degraded") return ["Degraded", "warn"];
  return ["Live", "ok"];
}
