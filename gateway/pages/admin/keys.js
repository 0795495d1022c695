// The API keys: create, edit and revoke.

import { request, requestJson } from "./api.js";
import { copyButton } from "../shared/copy.js";
import { confirmFirst, openDialog } from "./dialogs.js";
import { ago, amount, button, byId, make, notice, pill } from "../shared/elements.js";
import { LIMITS, keyForm } from "./key_form.js";
import { ALL_CLIENTS, snippetTabs } from "../shared/snippets.js";
import { showUsage } from "./usage.js";

const TONES = { active: "ok", expired: "warn", revoked: "" };
const FIRST_KEY = "All clients need a key from now on; this cannot be undone.";
let keyRequired = false;

export const keys = {
  async enter() {
    await refresh();
  },
  leave() {},
};

async function refresh() {
  try {
    const [{ keys: all, required }, used] = await Promise.all([requestJson("GET", "/keys"), requestJson("GET", "/usage")]);
    keyRequired = required;
    // Active keys first, then the newest.
    const rank = (key) => (key.state === "active" ? 0 : 1);
    all.sort((one, other) => rank(one) - rank(other) || other.created_at.localeCompare(one.created_at));
    showKeys(all);
    showUsage(used, new Map(all.map((key) => [key.id, key.name])));
  } catch (error) {
    if (error.status !== 401) byId("keys").replaceChildren(make("p", { class: "refusal", role: "alert" }, error.message));
  }
}

function showKeys(all) {
  if (!all.length) {
    const text = "No key exists yet. Without keys the gateway serves only this machine; after the first one, every client needs a key.";
    byId("keys").replaceChildren(make("p", { class: "empty" }, text));
    return;
  }
  const head = ["Name", "Key", "Access", "Limits", "State", make("span", { class: "off-screen" }, "Actions")].map((name) => make("th", { scope: "col" }, name));
  byId("keys").replaceChildren(
    make("table", { class: "cards" }, make("thead", {}, make("tr", {}, head)), make("tbody", {}, all.map(row))),
  );
}

function row(key) {
  const limits = LIMITS.filter(({ name }) => key[name] !== null).map(({ name, short }) => `${amount(key[name])} ${short}`);
  const reach = [...key.models, ...key.pools.map((pool) => `pool ${pool}`)];
  const actions = [
    button("Edit", () => edit(key), { "aria-label": `Edit the key ${key.name}` }),
    button("Rotate", () => rotate(key), { "aria-label": `Replace the secret of the key ${key.name}` }),
    button("Revoke", () => revoke(key), { class: "danger-text", "aria-label": `Revoke the key ${key.name}` }),
  ];
  return make(
    "tr",
    { class: key.state === "active" ? "" : "ended" },
    cell("Name", make("strong", {}, key.name), key.team && make("span", { class: "muted" }, ` ${key.team}`)),
    cell("Key", make("code", {}, `${key.prefix}…`), make("span", { class: "muted small block" }, key.id)),
    cell("Access", reach.length ? reach.join(", ") : make("span", { class: "muted" }, "everything")),
    cell("Limits", limits.length ? limits.map((text) => make("span", { class: "block" }, text)) : make("span", { class: "muted" }, "none")),
    cell("State", pill(key.state, TONES[key.state]), make("span", { class: "muted small block" }, stateTime(key)), refusals(key)),
    make("td", { class: "row" }, key.state === "revoked" ? "" : actions),
  );
}

function cell(name, ...content) {
  return make("td", { "data-name": name }, make("div", {}, content));
}

function stateTime({ revoked_at, expires_at, created_at }) {
  if (revoked_at) return [ago(revoked_at)];
  if (expires_at) return `until ${new Date(expires_at).toLocaleDateString()}`;
  return ["created ", ago(created_at)];
}

// The use of a secret that has ended.
function refusals({ refused, refused_at: at, refused_from: from }) {
  return refused > 0 && make("span", { class: "refusal small block" }, `used ${amount(refused)} times since, from ${from}, `, ago(at));
}

async function create() {
  // A click may come before the list, and another admin may have created the first key meanwhile.
  await refresh();
  keyForm("New key", "Create key", { confirm: keyRequired ? "" : FIRST_KEY }, async (terms) => {
    const created = await requestJson("POST", "/keys", terms);
    await refresh();
    showSecret(created);
  });
}

function edit(key) {
  keyForm(`Edit ${key.name}`, "Save", { key }, async (terms) => {
    await requestJson("PATCH", `/keys/${key.id}`, terms);
    await refresh();
    notice(`The changes to ${key.name} apply from the next request.`);
  });
}

function rotate(key) {
  const text = "The gateway will reject the current secret from now on; running requests continue. Limits and usage stay.";
  confirmFirst(`Replace the secret of ${key.name}?`, text, "Replace secret", async () => {
    const rotated = await requestJson("POST", `/keys/${key.id}/rotate`);
    await refresh();
    showSecret(rotated);
  });
}

function revoke(key) {
  const text = `The gateway will reject ${key.name} from now on, and end its running requests. This cannot be undone.`;
  confirmFirst(`Revoke ${key.name}?`, text, "Revoke key", async () => {
    await requestJson("DELETE", `/keys/${key.id}`);
    await refresh();
    notice(`${key.name} is revoked.`);
  });
}

async function showSecret({ name, secret, models }) {
  const shown = make("input", { class: "secret", readonly: true, value: secret, "aria-label": "The key", onfocus: () => shown.select() });
  const copy = copyButton(secret, { class: "primary", "aria-label": "Copy the key" });
  const text = "Copy the key now: the gateway cannot show it again.";
  const body = [make("p", {}, text), make("div", { class: "row secret-row" }, shown, copy)];
  if (await servesClients()) {
    const snippets = snippetTabs(ALL_CLIENTS, { baseUrl: `${location.origin}/v1`, model: models[0] ?? "default", apiKey: secret });
    body.push(make("h3", { class: "title" }, "Use it"), snippets.element);
  }
  openDialog(`The key of ${name}`, body, []);
  copy.focus();
}

// Whether clients use this port too: admins may have one of their own.
async function servesClients() {
  try {
    const response = await fetch("/", { headers: { accept: "application/json" }, cache: "no-store", credentials: "omit" });
    return response.ok;
  } catch {
    return false;
  }
}

byId("new-key").addEventListener("click", create);
byId("usage-csv").addEventListener("click", async () => {
  try {
    const file = URL.createObjectURL(await (await request("GET", "/usage?format=csv")).blob());
    make("a", { href: file, download: "paceline-usage.csv" }).click();
    URL.revokeObjectURL(file);
  } catch (error) {
    notice(error.message);
  }
});
