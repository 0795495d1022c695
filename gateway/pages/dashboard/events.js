// Reads the status stream: one event per second, over a request that may carry a key.

import { ApiError } from "../shared/client.js";
import { readEvents } from "../shared/event_stream.js";

// Pass each state to `show` until the stream ends; throw an ApiError if the gateway sends an error.
export async function follow(client, show, signal) {
  const response = await client.request("GET", "/status/events", { signal });
  for await (const event of readEvents(response)) {
    if (event.startsWith("event: end")) return;
    const status = JSON.parse(event.slice("data: ".length));
    if (status.error) throw signedOutError(client, status.error);
    show(status);
  }
}

function signedOutError(client, { code, message }) {
  if (code !== "invalid_api_key") return new ApiError(503, code, message);
  client.onSignedOut(client.hasKey);
  return new ApiError(401, code, message);
}
