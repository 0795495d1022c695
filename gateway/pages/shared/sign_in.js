// The form that takes a key, and the button that removes it.

import { byId } from "./elements.js";

const REFUSED = "The gateway does not accept this key (any more).";

// A key must be a valid header value.
export const isValidKey = (text) => /^[\x21-\x7e]+$/.test(text);

// `enter` begins with a new key, `leave` ends without one, and `refuse(why)` asks for one.
export function connectSignIn(client, { enter, leave, refuse, refused = REFUSED }) {
  client.onSignedOut = (sent) => refuse(sent ? refused : "");
  byId("sign-out").addEventListener("click", () => leave());
  byId("sign-in-form").addEventListener("submit", (event) => {
    event.preventDefault();
    const key = byId("key").value.trim();
    if (!isValidKey(key)) return refuse(refused);
    client.storeKey(key);
    enter();
  });
}
