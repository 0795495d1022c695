// The page: the way in, the stream of states, and what each of them says.

import { canBeKey, Asker } from "./asking.js";
import { Chart } from "./charts.js";
import { byId, make, several } from "./elements.js";
import { follow } from "./events.js";
import { workers } from "./fleet.js";
import { gatewayFacts } from "./gateway.js";
import { as, busyIn, fill, place, renew, write } from "./numbers.js";
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
let charts;
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
    } catch (refusal) {
      if (signal.aborted) return;
      if (refusal.status === 401) return;
      if (refusal.status === 403) return askForKey(refusal.message);
      byId("fleet-line").textContent = refusal.message;
    }
    if (signal.aborted) return;
    if (Date.now() - began > LASTED_MS) tries = 0;
    say("Not connected", "bad");
    await new Promise((done) => setTimeout(done, AGAIN_MS[Math.min(tries, AGAIN_MS.length - 1)]));
  }
}

// The longest window that there is, once: so that nobody begins with an empty page.
async function lookBack({ window: { longest_s: longest } }, signal) {
  try {
    past.take(await (await asker.ask("GET", `/status?window=${Math.floor(longest)}s`, { signal })).json());
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
    charts ??= makeCharts();
    lookBack(state, signal);
  }
  say(state.gateway.stopping ? "Stopping" : "Live", state.gateway.stopping ? "warn" : "ok");
  past.take(state);
  drawFacts(state);
  showTracks(byId("tracks"), state);
  for (const [id, parts] of Object.entries(PARTS)) renew(byId(id), state, parts(state));
  drawCharts(state);
  fill(byId("view-line"), state);
}

function drawFacts(state) {
  const { mtp, saved, prefix, pools, recent, window: { covered_s: covered } } = state;
  const ready = Object.values(state.workers).filter((worker) => worker.state === "ready").length;
  const there = Object.values(state.workers).filter((worker) => worker.state !== "gone").length;
  const running = Object.values(pools).reduce((sum, pool) => sum + pool[busyIn(pool)], 0);
  const waiting = Object.values(pools).reduce((sum, pool) => sum + pool.waiting, 0);
  byId("fleet-line").textContent = there ? `${ready} of ${several(there, "worker")} ready` : "no worker";
  document.title = `${running} running · Paceline`;

  const lost = saved.decode_s < 0;
  byId("saved-mtp").classList.toggle("lost", lost);
  byId("saved-mtp").classList.toggle("none", !saved.decode_steps);
  byId("accepted").classList.toggle("none", !mtp.drafts);
  byId("saved-prompts").classList.toggle("none", !saved.prompt_tokens);
  byId("saved-mtp-line").replaceChildren(
    ...(lost ? ["Drafting cost more than it brought so far"] : saved.decode_steps ? [place("saved/decode_steps", "count"), " tokens came without a step of their own"] : [untilNow(state, "Nothing accepted yet")]),
  );
  byId("accepted-line").replaceChildren(
    ...(mtp.drafts ? [place("mtp/mean_acceptance_length", "ratio"), " tokens a step"] : [untilNow(state, mtp.enabled ? "Nothing drafted yet" : "No lane drafts")]),
  );
  byId("saved-prompts-line").replaceChildren(
    ...(saved.prompt_tokens ? [place("saved/prompt_tokens", "count"), " prompt tokens not read again"] : [untilNow(state, prefix.miss ? "No prompt came twice yet" : "No long system prompt yet")]),
  );
  write(byId("now"), `${as.count(running)} running`);
  byId("now-line").textContent = [
    waiting ? `${as.count(waiting)} waiting` : "",
    recent.requests ? `${as.rate(recent.tokens_per_s)} tokens/s over ${as.duration(covered)}` : untilNow(state, "No request lately"),
  ].filter(Boolean).join(" · ");
  byId("trouble").hidden = there > 0;
  byId("trouble").replaceChildren("No worker has joined, so no request can be answered. Start one with ", make("code", {}, "paceline worker"), ".");
  byId("span").textContent = `of the fleet, since ${new Date(1000 * (past.points[0]?.end_s ?? state.unix_s)).toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit" })}`;
  byId("speed-window").textContent = `over ${as.duration(covered)}`;
}

const untilNow = ({ decisions }, otherwise) => (decisions.total ? otherwise : "No request yet");

// A duration at an axis: 250 ms, 1.5 s.
const briefly = (seconds) => (seconds === 0 ? "0" : seconds < 1 ? `${Number((1000 * seconds).toPrecision(3))} ms` : `${Number(seconds.toPrecision(3))} s`);

function makeCharts() {
  const nothing = "Nothing to show yet: the curve begins with the first request.";
  const late = [{ name: "half within", tone: "accent" }, { name: "19 of 20 within", tone: "second" }];
  const chart = (id, settings) => new Chart(byId(`chart-${id}`), { nothing, ...settings });
  return {
    acceptance: chart("acceptance", { curves: [{ tone: "accent", filled: true }], say: as.percent, top: 1, height: 215 }),
    tokens: chart("tokens", { curves: [{ tone: "accent", filled: true }], say: as.rate }),
    firstToken: chart("first-token", { curves: late, say: briefly }),
    answer: chart("answer", { curves: late, say: briefly }),
  };
}

function drawCharts({ unix_s: now }) {
  const where = (count, value) => (point) => (count(point) ? value(point) : null);
  const half = (field) => where((point) => point[field].count, (point) => point[field].p50);
  const most = (field) => where((point) => point[field].count, (point) => point[field].p95);
  charts.acceptance.show(past.columns(where((point) => point.attempted, (point) => point.acceptance_rate)), now);
  const any = past.points.some(({ requests }) => requests);
  charts.tokens.show(past.columns((point) => (any ? point.tokens_per_s : null)), now);
  charts.firstToken.show(past.columns(half("first_token_s"), most("first_token_s")), now);
  charts.answer.show(past.columns(half("answer_s"), most("answer_s")), now);
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
