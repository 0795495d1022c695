// What is wrong with the fleet: sentences for the banner, and the state in one word.

import { byId, make } from "../shared/elements.js";
import { SENTENCES, sentences } from "../shared/trouble.js";

function stored({ problem, file_problem: file, record_problem: records }) {
  return [problem && `${problem} This gateway goes on alone until that ends.`, file && `${file} Edits are refused until that ends.`, records].filter(Boolean);
}

export function showTrouble({ store, workers }) {
  const texts = [...stored(store), ...sentences(workers)];
  const present = Object.values(workers).some(({ state, absence }) => state !== "gone" || SENTENCES[absence.kind]);
  const why = Object.values(workers).some(({ absence }) => absence.kind === "left") ? "All Macs have signed off" : "No worker has joined";
  const command = make("code", {}, `PACELINE_JOIN_TOKEN=TOKEN paceline worker --join ${location.origin}`);
  const page = document.querySelector('nav a[href="/admin#workers"]') && ["; \u201cAdd a Mac\u201d on the page ", make("a", { href: "/admin#workers" }, "Workers"), " explains it"];
  const nobody = [`${why}, so requests cannot be answered. Start a worker with `, command, page, "."];
  show([...texts.map((text) => make("p", {}, text)), !present && make("p", {}, nobody)].filter(Boolean));
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
