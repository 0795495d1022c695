// The start page: how to connect, and which models and Macs are there.

import { ApiClient, ApiError } from "../shared/client.js";
import { copyButton } from "../shared/copy.js";
import { byId, make } from "../shared/elements.js";
import { macCards, modelCards } from "./fleet.js";
import { connectSignIn } from "../shared/sign_in.js";
import { ALL_CLIENTS, snippetTabs } from "../shared/snippets.js";
import { sentences } from "../shared/trouble.js";

const REFRESH_MS = 3000;
const BASE_URL = `${location.origin}/v1`;
// Every gateway has this alias, so it fits while the models are unknown.
const ANY_MODEL = "default";

const client = new ApiClient("/v1", "paceline-key");
const snippets = snippetTabs(ALL_CLIENTS, { baseUrl: BASE_URL, model: ANY_MODEL, apiKey: "none" });
let keyRequired = false;
let chosen = null;
let contexts = new Map();

function say(text, tone) {
  byId("live").textContent = text;
  byId("live").className = `pill ${tone}`;
}

function trouble(text) {
  if (byId("trouble").textContent !== text) byId("trouble").textContent = text;
  byId("trouble").hidden = !text;
}

// Whether clients need a key; anybody may know that.
async function readGateway() {
  const response = await fetch("/", { headers: { accept: "application/json" }, cache: "no-store", credentials: "omit" });
  keyRequired = (await response.json()).key_required;
}

async function readModels() {
  const { data } = await (await client.request("GET", "/models")).json();
  return data;
}

// Null for a key that is restricted to some models: it may not read the state of the fleet.
async function readStatus() {
  try {
    return await (await client.request("GET", "/status")).json();
  } catch (failure) {
    if (failure.status === 403) return null;
    throw failure;
  }
}

function showKeyState(signedIn) {
  const keysPage = document.querySelector('nav a[href="/admin#keys"]') && make("a", { href: "/admin#keys" }, "Keys");
  const needed = ["Required. An admin creates one for you", keysPage && [" on the page ", keysPage], "."];
  const text = make("p", {}, keyRequired ? needed : "Not required. If a client insists on a key, use any text.");
  if (byId("key-state").textContent !== text.textContent) byId("key-state").replaceChildren(text);
  byId("sign-in-form").hidden = !keyRequired || signedIn;
  byId("sign-out").hidden = !client.hasKey;
}

function fillIn() {
  const model = byId("model").value;
  snippets.fillIn({ baseUrl: BASE_URL, model, apiKey: keyRequired ? "YOUR_KEY" : "none", contextTokens: contexts.get(model) });
}

function showChoice(names) {
  const select = byId("model");
  const offered = [...select.options].map((option) => option.value);
  if (String(offered) !== String(names)) {
    select.replaceChildren(...names.map((name) => make("option", { value: name }, name)));
    select.value = names.includes(chosen) ? chosen : names[0];
  }
  fillIn();
}

function show(models, status) {
  const served = models.filter(({ id, root }) => id === root);
  const workers = Object.values(status?.workers ?? {});
  const ready = workers.filter(({ state }) => state === "ready").length;
  const chats = [...served, ...models.filter(({ id, root }) => id !== root)].filter(({ endpoints }) => endpoints.includes("chat"));
  contexts = new Map(models.map(({ id, max_model_len }) => [id, max_model_len]));
  showChoice(chats.length ? chats.map(({ id }) => id) : [ANY_MODEL]);
  const none = make("p", { class: "card empty" }, "None yet.");
  replace("model-list", served.length ? modelCards(models, status) : [none]);
  replace("mac-list", status ? macCards(status) : []);
  byId("macs").hidden = !workers.length;
  const why = sentences(status?.workers ?? {});
  const text = [why.length ? "No model is ready." : "No model is ready yet.", ...why, "This page shows each model as soon as a Mac serves it."].join(" ");
  trouble(served.length ? "" : text);
  if (!served.length) say("No model ready", "warn");
  else say(ready ? `${ready} ${ready === 1 ? "Mac" : "Macs"} ready` : "Ready", "ok");
}

// Keep the elements while they say the same, so that a reader's selection stays.
function replace(id, cards) {
  const fresh = make("div", {}, cards);
  if (fresh.textContent !== byId(id).textContent) byId(id).replaceChildren(...fresh.childNodes);
}

function showSignedOut(refusal) {
  keyRequired = true;
  showKeyState(false);
  showChoice([ANY_MODEL]);
  replace("model-list", [make("p", { class: "card empty" }, "Enter a key to see the models.")]);
  byId("macs").hidden = true;
  trouble("");
  say("Key needed", "");
  byId("sign-in-refusal").textContent = refusal;
}

async function refresh() {
  try {
    await readGateway();
    const [models, status] = await Promise.all([readModels(), readStatus()]);
    byId("sign-in-refusal").textContent = "";
    showKeyState(true);
    show(models, status);
  } catch (failure) {
    if (failure.status === 401) return;
    if (!(failure instanceof ApiError) && !(failure instanceof TypeError)) throw failure;
    say("Not connected", "bad");
    trouble(failure instanceof ApiError ? failure.message : "The gateway does not respond. Is it running?");
  }
}

// A hidden page makes no requests.
async function follow() {
  for (;;) {
    if (!document.hidden) await refresh();
    await new Promise((done) => setTimeout(done, REFRESH_MS));
  }
}

connectSignIn(client, {
  enter() {
    byId("key").value = "";
    refresh();
  },
  leave() {
    client.removeKey();
    refresh();
  },
  refuse(why) {
    client.removeKey();
    if (why) byId("key").value = "";
    showSignedOut(why || byId("sign-in-refusal").textContent);
  },
});
byId("model").addEventListener("change", () => {
  chosen = byId("model").value;
  fillIn();
});
byId("base-url").append(make("code", {}, BASE_URL), copyButton(BASE_URL, { "aria-label": "Copy the base URL" }));
byId("model-choice").append(copyButton(() => byId("model").value, { "aria-label": "Copy the model's name" }));
byId("snippets").append(snippets.element);
await follow();
