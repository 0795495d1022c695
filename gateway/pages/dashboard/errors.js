// The last requests that failed: of all keys for an admin, else of the viewer's own key.

import { copyButton } from "../shared/copy.js";
import { ago, amount, make } from "../shared/elements.js";

const REFRESH_MS = 15_000;
const COLUMNS = ["Time", "Reason", "Model", "Worker", "Key", "From", "Request"];

export class ErrorList {
  #client;
  #root;
  #scope;
  #seen = "";
  #readAt = 0;

  constructor(client, root, scope) {
    this.#client = client;
    this.#root = root;
    this.#scope = scope;
  }

  // Read the list again if a state counts other errors than the last one, or after a while.
  async update({ errors }) {
    const counts = JSON.stringify(errors);
    if (counts === this.#seen && Date.now() - this.#readAt < REFRESH_MS) return;
    this.#seen = counts;
    this.#readAt = Date.now();
    const failed = await read(this.#client);
    if (failed) this.#show(failed.errors, failed.all_keys);
    else this.#root.replaceChildren(make("p", { class: "empty" }, "The list is not available now."));
  }

  #show(errors, all) {
    this.#scope.textContent = all ? "of all clients" : "of your key; sign in to the admin page to see all clients";
    if (!errors.length) {
      const none = all ? "No recent request has failed." : "No recent request of your key has failed; the counts above are for all clients.";
      this.#root.replaceChildren(make("p", { class: "empty" }, none));
      return;
    }
    const head = COLUMNS.map((name) => make("th", { scope: "col" }, name));
    const table = make("table", { class: "cards" }, make("thead", {}, make("tr", {}, head)), make("tbody", {}, errors.map(row)));
    this.#root.replaceChildren(make("div", { class: "scrolls", tabindex: "0", role: "region", "aria-label": "Last errors" }, table));
  }
}

// Return the list, or null if the viewer may not read it, or the gateway does not respond.
async function read(client) {
  try {
    return await (await client.request("GET", "/errors")).json();
  } catch {
    return null;
  }
}

function row({ count, time, reason, status, code, model, worker, key, key_name: name, address, request_id: id }) {
  return make(
    "tr",
    {},
    cell("Time", ago(time)),
    cell("Reason", count > 1 && make("strong", {}, `${amount(count)} times: `), reason, make("span", { class: "muted small block" }, `${status} ${code}`)),
    cell("Model", model || "–"),
    cell("Worker", worker || "–"),
    cell("Key", name || key || "none"),
    cell("From", address || "–"),
    cell("Request", make("span", { class: "request" }, make("code", {}, id), copyButton(id, { class: "quiet", "aria-label": `Copy the id ${id}` }))),
  );
}

const cell = (name, ...content) => make("td", { "data-name": name }, make("div", {}, content));
