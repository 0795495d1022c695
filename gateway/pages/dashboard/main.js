// The page: sign-in, the status stream, and the parts that show it.

import { ApiClient, ApiError } from "../shared/client.js";
import { makeCurves } from "./curves.js";
import { byId } from "../shared/elements.js";
import { readEvents } from "../shared/event_stream.js";
import { connectSignIn } from "../shared/sign_in.js";
import { ErrorList } from "./errors.js";
import { showFacts } from "./facts.js";
import { workers } from "./fleet.js";
import { fill, renew } from "./numbers.js";
import { gateway, positions, reasons, reuse, speeds } from "./panels.js";
import { Past } from "./past.js";
import { showTracks } from "./tracks.js";
import { UsageList } from "./usage.js";
import { showProblem, showTrouble, worstState } from "./trouble.js";

// The parts that are rendered for each state, by the id of their element.
const PARTS = { positions, reuse, reasons, speeds, workers, gateway };
const AGAIN_MS = [500, 1000, 2000, 5000];
// A stream that lasted this long resets the delay of reconnecting.
const LASTED_MS = 3000;

const client = new ApiClient("/v1", "paceline-key");
const past = new Past();
const errors = new ErrorList(client, byId("errors"), byId("errors-of"));
const usage = new UsageList(client, byId("usage"));
let curves;
let leaving;

function show(name) {
  for (const view of ["sign-in", "line"]) byId(`view-${view}`).hidden = view !== name;
  byId("sign-out").hidden = name === "sign-in" || !client.hasKey;
}

function say(text, tone) {
  byId("live").textContent = text;
  byId("live").className = `pill ${tone}`;
}

// Draw each state of the status stream until it ends: one event per second.
async function follow(signal) {
  const response = await client.request("GET", "/status/events", { signal });
  for await (const event of readEvents(response)) {
    if (event.startsWith("event: end")) return;
    const status = JSON.parse(event.slice("data: ".length));
    if (status.error) throw signedOutError(status.error);
    draw(status, signal);
  }
}

function signedOutError({ code, message }) {
  if (code !== "invalid_api_key") return new ApiError(503, code, message);
  client.onSignedOut(client.hasKey);
  return new ApiError(401, code, message);
}

// Follow the stream while the page is visible; reconnect when it ends.
async function enter() {
  leaving?.abort();
  const { signal } = (leaving = new AbortController());
  for (let tries = 0; !signal.aborted; tries += 1) {
    const began = Date.now();
    let problem = "The gateway ended the connection.";
    try {
      await follow(signal);
    } catch (failure) {
      if (signal.aborted || failure.status === 401) return;
      if (!(failure instanceof ApiError)) throw failure;
      if (failure.status === 403) return askForKey(failure.message);
      problem = failure.message;
    }
    if (signal.aborted) return;
    if (Date.now() - began > LASTED_MS) tries = 0;
    say("Not connected", "bad");
    showProblem(`${problem} The page will try again, and shows the last state until then.`);
    document.body.classList.add("stale");
    await new Promise((done) => setTimeout(done, AGAIN_MS[Math.min(tries, AGAIN_MS.length - 1)]));
  }
}

// Load the longest window once, so that the charts do not start empty.
async function lookBack(signal) {
  try {
    const answer = await client.request("GET", "/status?window=15m", { signal });
    past.take(await answer.json());
  } catch {
    // The charts then start with the shorter window of the events.
  }
}

function askForKey(why) {
  leaving?.abort();
  client.removeKey();
  say("", "");
  show("sign-in");
  byId("sign-in-refusal").textContent = why;
  byId("key").value = "";
  byId("key").focus();
}

function draw(state, signal) {
  if (byId("view-line").hidden) {
    show("line");
    curves ??= makeCurves();
    lookBack(signal);
  }
  say(...worstState(state));
  document.body.classList.remove("stale");
  showTrouble(state);
  errors.update(state);
  usage.update();
  past.take(state);
  showFacts(state);
  showTracks(byId("tracks"), state);
  for (const [id, parts] of Object.entries(PARTS)) renew(byId(id), state, parts(state));
  for (const show of curves) show(past, state);
  fill(byId("view-line"), state);
}

connectSignIn(client, { enter, leave: () => askForKey(""), refuse: askForKey });
// A hidden page makes no requests.
document.addEventListener("visibilitychange", () => {
  if (!byId("view-sign-in").hidden) return;
  if (document.hidden) leaving?.abort();
  else enter();
});
if (!document.hidden) enter();
