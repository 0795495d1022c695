// The page: a conversation with a model.

import { Answer } from "./answer.js";
import { ask } from "./chat.js";
import { ApiClient, ApiError } from "../shared/client.js";
import { byId, button, make } from "../shared/elements.js";
import { hasPictures, takePictures } from "./pictures.js";
import { connectSignIn } from "../shared/sign_in.js";
import { CHAT_CLIENTS, snippetTabs } from "../shared/snippets.js";

const REFRESH_MS = 3000;
const BASE_URL = `${location.origin}/v1`;
// The toy model was trained on this question.
const EXAMPLE = "Count from 1 to 20.";
const NUMBERS = { temperature: "temperature", "top-p": "top_p", "max-tokens": "max_tokens" };

const client = new ApiClient("/v1", "paceline-key");
const messages = [];
let running = null;

// The fields of the request, without those that only this page needs.
function fields() {
  const system = byId("system").value.trim();
  const effort = byId("effort").value;
  const numbers = Object.entries(NUMBERS).filter(([id]) => byId(id).value !== "");
  return {
    model: byId("model").value || "default",
    ...Object.fromEntries(numbers.map(([id, name]) => [name, Number(byId(id).value)])),
    ...(effort && { reasoning_effort: effort }),
    messages: [...(system ? [{ role: "system", content: system }] : []), ...messages],
  };
}

const snippets = snippetTabs(CHAT_CLIENTS, snippetSettings());

function snippetSettings() {
  const { model, messages: asked, ...sampling } = fields();
  const question = asked.some(({ role }) => role === "user") ? [] : [{ role: "user", content: byId("question").value.trim() || EXAMPLE }];
  const request = { ...sampling, messages: [...asked, ...question].map(withoutPictures) };
  return { baseUrl: BASE_URL, model, apiKey: client.hasKey ? "YOUR_KEY" : "none", request };
}

// A picture as text would hide the code around it.
function withoutPictures(message) {
  if (typeof message.content === "string") return message;
  const part = (one) => (one.image_url ? { type: "image_url", image_url: { url: `${one.image_url.url.split(",")[0]},...` } } : one);
  return { ...message, content: message.content.map(part) };
}

async function send(text) {
  if (running || (!text && !hasPictures()) || !byId("composer").reportValidity()) return;
  for (const id of Object.keys(NUMBERS)) if (!byId(id).reportValidity()) return;
  byId("question").value = "";
  let urls;
  running = new AbortController();
  try {
    urls = await takePictures();
  } finally {
    running = null;
  }
  const pictures = urls.map((url) => ({ type: "image_url", image_url: { url } }));
  messages.push({ role: "user", content: pictures.length ? [...(text ? [{ type: "text", text }] : []), ...pictures] : text });
  byId("welcome")?.remove();
  byId("log").append(question(text, urls));
  await answer();
}

const question = (text, urls) =>
  make(
    "article",
    { class: "turn question", "aria-label": "You" },
    urls.map((url, index) => make("img", { src: url, alt: `Picture ${index + 1}` })),
    text && make("p", {}, text),
  );

async function answer() {
  const body = fields();
  const shown = new Answer(body.model);
  const { signal } = (running = new AbortController());
  byId("log").append(shown.element);
  shown.element.scrollIntoView({ block: "end" });
  showRunning();
  try {
    for await (const { response, chunk } of ask(client, { ...body, stream: true, stream_options: { include_usage: true }, token_sources: true }, signal)) {
      if (response) shown.begin(response);
      else follow(() => shown.take(chunk));
    }
    follow(() => announce(shown.end()));
  } catch (failure) {
    if (signal.aborted) follow(() => announce(shown.end({ stopped: true })));
    else if (failure instanceof ApiError) follow(() => shown.fail(failure.message, () => retry(shown)));
    else throw failure;
    if (!signal.aborted) return;
  } finally {
    if (running?.signal === signal) running = null;
    showRunning();
    snippets.fillIn(snippetSettings());
  }
  if (shown.text && shown.element.isConnected) messages.push({ role: "assistant", content: shown.text });
}

function retry(failed) {
  if (running) return;
  failed.element.remove();
  answer();
}

// Change the conversation, and keep its end in view if it was.
function follow(change) {
  const log = byId("log");
  const atEnd = log.getBoundingClientRect().bottom <= innerHeight;
  change();
  if (atEnd) log.lastElementChild.scrollIntoView({ block: "end" });
}

// Tell people with a screen reader what the others see.
function announce(parts) {
  byId("announcement").textContent = parts.map((part) => part.textContent ?? part).join("");
}

function showRunning() {
  byId("stop").hidden = !running;
  byId("send").hidden = Boolean(running);
  byId("new-chat").hidden = !messages.length;
}

function startOver() {
  running?.abort();
  messages.length = 0;
  const example = button(EXAMPLE, () => send(EXAMPLE));
  byId("log").replaceChildren(make("div", { id: "welcome", class: "welcome" }, make("p", { class: "muted" }, "Ask a question, or begin with this one:"), example));
  showRunning();
  snippets.fillIn(snippetSettings());
}

// Offer the models until there is one; a key may be needed for that.
async function loadModels() {
  try {
    const { data } = await (await client.request("GET", "/models")).json();
    const names = data.filter(({ id, root, endpoints }) => id === root && endpoints.includes("chat")).map(({ id }) => id);
    byId("sign-in-form").hidden = true;
    byId("sign-out").hidden = !client.hasKey;
    byId("model").replaceChildren(...names.map((name) => make("option", { value: name }, name)));
    trouble(names.length ? "" : "No model is ready yet. This page lists each model as soon as a Mac serves it.");
    if (!names.length) setTimeout(loadModels, REFRESH_MS);
  } catch (failure) {
    if (failure.status === 401) return;
    if (!(failure instanceof ApiError)) throw failure;
    trouble(failure.message);
    setTimeout(loadModels, REFRESH_MS);
  }
  snippets.fillIn(snippetSettings());
}

function trouble(text) {
  byId("trouble").textContent = text;
  byId("trouble").hidden = !text;
}

connectSignIn(client, {
  enter() {
    byId("question").focus();
    loadModels();
  },
  leave() {
    client.removeKey();
    startOver();
    loadModels();
  },
  refuse(why) {
    client.removeKey();
    byId("sign-out").hidden = true;
    byId("sign-in-form").hidden = false;
    byId("sign-in-refusal").textContent = why;
    byId("key").value = "";
    byId("key").focus();
  },
});
byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send(byId("question").value.trim());
});
byId("question").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send(byId("question").value.trim());
});
addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
});
byId("stop").addEventListener("click", () => {
  running?.abort();
  byId("question").focus();
});
byId("new-chat").addEventListener("click", () => {
  startOver();
  byId("question").focus();
});
byId("marks").addEventListener("change", () => byId("log").classList.toggle("unmarked", !byId("marks").checked));
for (const id of ["model", "system", "effort", ...Object.keys(NUMBERS)]) byId(id).addEventListener("input", () => snippets.fillIn(snippetSettings()));
byId("snippets").append(snippets.element);
startOver();
byId("question").focus({ preventScroll: true });
await loadModels();
