// The page: the way in, the stream of states, and what each of them says.

import { Asker, canBeKey, Refusal } from "./asking.js";
import { makeCurves } from "./curves.js";
import { byId } from "./elements.js";
import { follow } from "./events.js";
import { showFacts } from "./facts.js";
import { workers } from "./fleet.js";
import { gatewayFacts } from "./gateway.js";
import { fill, renew } from "./numbers.js";
import { Past } from "./past.js";
import { positions } from "./positions.js";
import { reasons } from "./reasons.js";
import { speeds } from "./speeds.js";
import { showTracks } from "./tracks.js";

// What is written anew with each state, by the element that holds it.
const PARTS = { positions, reasons, speeds, workers, gateway: gatewayFacts };
const AGAIN_MS = [500, 1000, 2000, 5000];
// A stream that lasted so long was a good one.
const LASTED_MS = 3000;

const asker = new Asker("/v1", "paceline-key");
const past = new Past();
let curves;
let leaving;

function show(name) {
  for (const view of ["sign-in", "line"]) byId(`view-${view}`).hidden = view !== name;
  byId("sign-out").hidden = name === "sign-in" || !asker.hasKey;
}

function say(text, tone) {
  byId("live").textContent = text;
  byId("live").className = `pill ${tone}`;
  document.body.classList.toggle("stale", tone === "bad");
}

// Follow for as long as somebody looks; begin again where the stream ends.
async function enter() {
  leaving?.abort();
  const { signal } = (leaving = new AbortController());
  for (let tries = 0; !signal.aborted; tries += 1) {
    const began = Date.now();
    try {
      await follow(asker, (state) => draw(state, signal), signal);
    } catch (failure) {
      if (signal.aborted || failure.status === 401) return;
      if (!(failure instanceof Refusal)) throw failure;
      if (failure.status === 403) return askForKey(failure.message);
      byId("fleet-line").textContent = failure.message;
    }
    if (signal.aborted) return;
    if (Date.now() - began > LASTED_MS) tries = 0;
    say("Not connected", "bad");
    await new Promise((done) => setTimeout(done, AGAIN_MS[Math.min(tries, AGAIN_MS.length - 1)]));
  }
}

// The longest window that there is, once: so that nobody begins with an empty page.
async function lookBack({ window: { max_length_s: longest } }, signal) {
  try {
    const answer = await asker.ask("GET", `/status?window=${Math.floor(longest)}s`, { signal });
    past.take(await answer.json());
  } catch {
    // The curves then begin with the shorter window of each event.
  }
}

function askForKey(why) {
  leaving?.abort();
  asker.forgetKey();
  say("", "");
  byId("fleet-line").textContent = "";
  show("sign-in");
  byId("sign-in-refusal").textContent = why;
  byId("key").value = "";
  byId("key").focus();
}

function draw(state, signal) {
  if (byId("view-line").hidden) {
    show("line");
    curves ??= makeCurves();
    lookBack(state, signal);
  }
  say(state.gateway.stopping ? "Stopping" : "Live", state.gateway.stopping ? "warn" : "ok");
  past.take(state);
  showFacts(state);
  showTracks(byId("tracks"), state);
  for (const [id, parts] of Object.entries(PARTS)) renew(byId(id), state, parts(state));
  for (const show of curves) show(past, state);
  fill(byId("view-line"), state);
}

asker.onSignedOut = (shown) => askForKey(shown ? "This key is not known to this gateway, or no longer." : "");
byId("sign-out").addEventListener("click", () => askForKey(""));
byId("sign-in-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const key = byId("key").value.trim();
  if (!canBeKey(key)) return asker.onSignedOut(true);
  asker.keepKey(key);
  enter();
});
// A page that nobody looks at asks for nothing.
document.addEventListener("visibilitychange", () => {
  if (!byId("view-sign-in").hidden) return;
  if (document.hidden) leaving?.abort();
  else enter();
});
if (!document.hidden) enter();
