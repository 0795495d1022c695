// The last requests that failed: of all keys for an admin, else of the viewer's own key.

import { ApiClient } from "../shared/client.js";
import { copyButton } from "../shared/copy.js";
import { ago, make } from "../shared/elements.js";

const REFRESH_MS = 15_000;
const COLUMNS = ["Time", "Reason", "Model", "Worker", "Key", "Request"];

const admin = new ApiClient("/admin/v1", "paceline-admin-key");

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
    const all = admin.hasKey ? await read(admin) : null;
    const failed = all ?? (await read(this.#client));
    if (failed) this.#show(failed, all !== null);
    else this.#root.replaceChildren(make("p", { class: "empty" }, "The list cannot be read now."));
  }

  #show(errors, all) {
    const own = this.#client.hasKey ? "of your key" : "of requests without a key";
    this.#scope.textContent = all ? "of all clients" : `${own}; sign in to the admin page to see those of all clients`;
    if (!errors.length) {
      this.#root.replaceChildren(make("p", { class: "empty" }, "No request has failed lately."));
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
    return (await (await client.request("GET", "/errors")).json()).errors;
  } catch {
    return null;
  }
}

function row({ time, reason, status, code, model, worker, key, key_name: name, request_id: id }) {
  return make(
    "tr",
    {},
    cell("Time", ago(time)),
    cell("Reason", reason, make("span", { class: "muted small block" }, `${status} ${code}`)),
    cell("Model", model || "–"),
    cell("Worker", worker || "–"),
    cell("Key", name || key || "none"),
    cell("Request", make("span", { class: "request" }, make("code", {}, id), copyButton(id, { class: "quiet", "aria-label": `Copy the id ${id}` }))),
  );
}

const cell = (name, ...content) => make("td", { "data-name": name }, make("div", {}, content));
