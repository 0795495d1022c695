// Reads the status stream: one event per second, over a request that may carry a key.

import { Refusal } from "./asking.js";

// Pass each state to `show` until the stream ends; throw a Refusal if the gateway sends an error.
export async function follow(asker, show, signal) {
  const answer = await asker.ask("GET", "/status/events", { signal });
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let pending = "";
  for (;;) {
    const { done, value } = await reader.read().catch(lost);
    if (done) return;
    const events = (pending + value).split("\n\n");
    pending = events.pop();
    for (const event of events) {
      if (event.startsWith("event: end")) return;
      const status = JSON.parse(event.slice("data: ".length));
      if (status.error) throw refused(asker, status.error);
      show(status);
    }
  }
}

function lost(failure) {
  if (failure.name === "AbortError") throw failure;
  throw new Refusal(0, "lost", "The connection to the gateway broke.");
}

function refused(asker, { code, message }) {
  if (code !== "invalid_api_key") return new Refusal(503, code, message);
  asker.onSignedOut(asker.hasKey);
  return new Refusal(401, code, message);
}
