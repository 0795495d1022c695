// Who uses most: the keys of the last minute and hour.

import { amount, make } from "../shared/elements.js";

const REFRESH_MS = 5_000;
const SHOWN = 10;

export class UsageList {
  #client;
  #root;
  #readAt = 0;

  constructor(client, root) {
    this.#client = client;
    this.#root = root;
  }

  async update() {
    if (Date.now() - this.#readAt < REFRESH_MS) return;
    this.#readAt = Date.now();
    try {
      this.#show((await (await this.#client.request("GET", "/usage")).json()).keys);
    } catch {
      // The next state tries again.
    }
  }

  #show(keys) {
    if (!keys.length) return this.#root.replaceChildren(make("p", { class: "empty" }, "No requests in the last hour."));
    const head = ["Key", "Now", "Requests", "Tokens", "Waited"].map((name) => make("th", { scope: "col" }, name));
    const rows = keys.slice(0, SHOWN).map(row);
    this.#root.replaceChildren(make("table", { class: "cards" }, make("thead", {}, make("tr", {}, head)), make("tbody", {}, rows)));
  }
}

function row({ key, name, running, last_minute: minute, last_hour: hour }) {
  const both = (shown) => [shown(minute), make("span", { class: "muted" }, ` / ${shown(hour)}`)];
  return make(
    "tr",
    {},
    cell("Key", name || key || "without a key"),
    cell("Now", amount(running)),
    cell("Requests", both(({ requests }) => amount(requests))),
    cell("Tokens", both(({ tokens }) => amount(tokens))),
    cell("Waited", both(({ waited_ms: ms }) => `${amount(Math.round(ms / 1000))} s`)),
  );
}

const cell = (name, ...content) => make("td", { "data-name": name }, make("div", {}, content));
