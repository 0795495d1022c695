// Reads the status stream: one event per second, over a request that may carry a key.

import { ApiError } from "./client.js";

// Pass each state to `show` until the stream ends; throw an ApiError if the gateway sends an error.
export async function follow(client, show, signal) {
  const answer = await client.request("GET", "/status/events", { signal });
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
      if (status.error) throw signedOutError(client, status.error);
      show(status);
    }
  }
}

function lost(failure) {
  if (failure.name === "AbortError") throw failure;
  throw new ApiError(0, "lost", "The connection to the gateway broke.");
}

function signedOutError(client, { code, message }) {
  if (code !== "invalid_api_key") return new ApiError(503, code, message);
  client.onSignedOut(client.hasKey);
  return new ApiError(401, code, message);
}
