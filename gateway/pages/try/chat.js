// One streamed chat completion, as events.

import { ApiError } from "../shared/client.js";
import { readEvents } from "../shared/event_stream.js";

// Yield `{ response }` first, then each chunk of the answer; throw an ApiError if it fails or ends early.
export async function* ask(client, body, signal) {
  const response = await client.request("POST", "/chat/completions", {
    headers: { "content-type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  yield { response };
  for await (const event of readEvents(response)) {
    if (!event.startsWith("data: ")) continue; // a comment keeps the connection open
    if (event === "data: [DONE]") return;
    const chunk = JSON.parse(event.slice("data: ".length));
    if (chunk.error) throw new ApiError(response.status, chunk.error.code, chunk.error.message);
    yield { chunk };
  }
  throw new ApiError(0, "lost", "The answer ended early.");
}
