// One streamed chat completion, as events.

import { ApiError } from "./client.js";

// Yield `{ response }` first, then each chunk of the answer; throw an ApiError if it fails or ends early.
export async function* ask(client, body, signal) {
  const response = await client.request("POST", "/chat/completions", {
    headers: { "content-type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  yield { response };
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let pending = "";
  for (;;) {
    const { done, value } = await reader.read().catch(lost);
    if (done) throw new ApiError(0, "lost", "The answer ended early.");
    const events = (pending + value).split("\n\n");
    pending = events.pop();
    for (const event of events) {
      if (!event.startsWith("data: ")) continue; // a comment keeps the connection open
      if (event === "data: [DONE]") return;
      const chunk = JSON.parse(event.slice("data: ".length));
      if (chunk.error) throw new ApiError(response.status, chunk.error.code, chunk.error.message);
      yield { chunk };
    }
  }
}

function lost(failure) {
  if (failure.name === "AbortError") throw failure;
  throw new ApiError(0, "lost", "The connection to the gateway broke.");
}
