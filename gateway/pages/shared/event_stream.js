// The events of a streamed response, as texts.

import { ApiError } from "./client.js";

// Yield each event without the empty line behind it; throw an ApiError if the connection breaks.
export async function* readEvents(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let pending = "";
  for (;;) {
    const { done, value } = await reader.read().catch(lost);
    if (done) return;
    const events = (pending + value).split("\n\n");
    pending = events.pop();
    yield* events;
  }
}

function lost(failure) {
  if (failure.name === "AbortError") throw failure;
  throw new ApiError(0, "lost", "The connection to the gateway broke.");
}
