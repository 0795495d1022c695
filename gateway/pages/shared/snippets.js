// Code that asks one question, for the common clients, with address, model and key filled in.

import { copyButton } from "./copy.js";
import { amount, make } from "./elements.js";

// The toy model was trained on this question.
const QUESTION = "Count from 1 to 20.";

// A JSON string is also a string of Python and of JavaScript.
const quoted = (text) => JSON.stringify(text);
const forShell = (text) => `'${text.replaceAll("'", "'\\''")}'`;

const question = { temperature: 0, messages: [{ role: "user", content: QUESTION }] };

// A JSON value as an expression of Python.
function python(value) {
  if (Array.isArray(value)) return `[${value.map(python).join(", ")}]`;
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value === "object") return `{${Object.entries(value).map(([name, one]) => `${quoted(name)}: ${python(one)}`).join(", ")}}`;
  return JSON.stringify(value);
}

// The same of JavaScript; all names in requests are identifiers.
function javaScript(value) {
  if (Array.isArray(value)) return `[${value.map(javaScript).join(", ")}]`;
  if (value !== null && typeof value === "object") return `{ ${Object.entries(value).map(([name, one]) => `${name}: ${javaScript(one)}`).join(", ")} }`;
  return JSON.stringify(value);
}

const lines = (fields, line) => Object.entries(fields).map(([name, value]) => `${line(name, value)}\n`).join("");

const OPENAI = [
  {
    name: "curl",
    code: ({ baseUrl, model, apiKey, request = question }) => `curl ${baseUrl}/chat/completions \\
  -H 'Content-Type: application/json' \\
  -H ${forShell(`Authorization: Bearer ${apiKey}`)} \\
  -d ${forShell(JSON.stringify({ model, ...request }))}
`,
  },
  {
    name: "Python",
    code: ({ baseUrl, model, apiKey, request = question }) => `# pip install openai
from openai import OpenAI

client = OpenAI(base_url=${quoted(baseUrl)}, api_key=${quoted(apiKey)})
answer = client.chat.completions.create(
${lines({ model, ...request }, (name, value) => `    ${name}=${python(value)},`)})
print(answer.choices[0].message.content)
`,
  },
  {
    name: "JavaScript",
    code: ({ baseUrl, model, apiKey, request = question }) => `// npm install openai
import OpenAI from "openai";

const client = new OpenAI({ baseURL: ${quoted(baseUrl)}, apiKey: ${quoted(apiKey)} });
const answer = await client.chat.completions.create({
${lines({ model, ...request }, (name, value) => `  ${name}: ${javaScript(value)},`)}});
console.log(answer.choices[0].message.content);
`,
  },
  {
    name: "LangChain",
    code: ({ baseUrl, model, apiKey, request: { messages, ...sampling } = question }) => `# pip install langchain-openai
from langchain_openai import ChatOpenAI

chat = ChatOpenAI(
    base_url=${quoted(baseUrl)},
    api_key=${quoted(apiKey)},
${lines({ model, ...sampling }, (name, value) => `    ${name}=${python(value)},`)})
print(chat.invoke(${python(messages.length === 1 && typeof messages[0].content === "string" ? messages[0].content : messages)}).content)
`,
  },
];

const OTHERS = [
  {
    name: "Claude Code",
    leastTokens: 64000,
    // Without its size, the client takes the context for far larger than it is, and never compacts.
    code: ({ baseUrl, model, apiKey, contextTokens }) => `# npm install -g @anthropic-ai/claude-code
export ANTHROPIC_BASE_URL=${forShell(rootOf(baseUrl))}
export ANTHROPIC_AUTH_TOKEN=${forShell(apiKey)}
export ANTHROPIC_MODEL=${forShell(model)}
export ANTHROPIC_SMALL_FAST_MODEL=${forShell(model)}
${contextTokens ? `export CLAUDE_CODE_MAX_CONTEXT_TOKENS=${contextTokens}\n` : ""}claude
`,
  },
  {
    name: "Anthropic SDK",
    code: ({ baseUrl, model, apiKey }) => `# pip install anthropic
from anthropic import Anthropic

client = Anthropic(base_url=${quoted(rootOf(baseUrl))}, api_key=${quoted(apiKey)})
message = client.messages.create(
${lines({ model, max_tokens: 1024, messages: question.messages }, (name, value) => `    ${name}=${python(value)},`)})
print(message.content[0].text)
`,
  },
  {
    name: "Codex",
    leastTokens: 24000,
    code: ({ baseUrl, model, apiKey, contextTokens }) => `# npm install -g @openai/codex
# In ~/.codex/config.toml:
model = ${quoted(model)}
${contextTokens ? `model_context_window = ${contextTokens}\n` : ""}model_provider = "paceline"

[model_providers.paceline]
name = "Paceline"
base_url = ${quoted(baseUrl)}
wire_api = "responses"
${apiKey === "none" ? "" : `env_key = "PACELINE_KEY"\n\n# In the shell: export PACELINE_KEY=${forShell(apiKey)}\n`}`,
  },
];

// Clients of Anthropic add the version to the path themselves.
const rootOf = (baseUrl) => baseUrl.replace(/\/v1$/, "");

// Clients in whose code any chat fits, and all clients, some of which ask one question of their own.
export const CHAT_CLIENTS = OPENAI;
export const ALL_CLIENTS = [...OPENAI, ...OTHERS];

let count = 0;

// Return tabs with a snippet per client, and a function that fills in other settings:
// `{ baseUrl, model, apiKey, request }`; `request` holds the other fields, one question by default.
export function snippetTabs(clients, settings) {
  const id = `snippets-${(count += 1)}`;
  const tabs = clients.map(({ name }, index) =>
    make("button", { type: "button", role: "tab", id: `${id}-tab-${index}`, "aria-controls": `${id}-${index}`, onclick: () => select(index) }, name),
  );
  const codes = clients.map(() => make("code"));
  const panels = clients.map(({ name }, index) =>
    make(
      "div",
      { role: "tabpanel", id: `${id}-${index}`, class: "snippet", "aria-labelledby": `${id}-tab-${index}` },
      // A scrolling region needs the focus of the keyboard.
      make("pre", { tabindex: "0", role: "region", "aria-label": `Code for ${name}` }, codes[index]),
      copyButton(() => codes[index].textContent, { "aria-label": `Copy the code for ${name}` }),
    ),
  );

  function select(chosen) {
    tabs.forEach((tab, index) => {
      tab.setAttribute("aria-selected", String(index === chosen));
      tab.tabIndex = index === chosen ? 0 : -1;
      panels[index].hidden = index !== chosen;
    });
  }

  function move(event) {
    const at = tabs.indexOf(document.activeElement);
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: tabs.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    const index = (to + tabs.length) % tabs.length;
    select(index);
    tabs[index].focus();
  }

  function fillIn(next) {
    clients.forEach(({ name, code, leastTokens }, index) => {
      // An agent begins with the descriptions of all its tools.
      const text = next.contextTokens < leastTokens
        ? `# ${name} needs a model with a context of ${amount(leastTokens)} tokens. The model ${next.model} has ${amount(next.contextTokens)}.\n`
        : code(next);
      if (codes[index].textContent !== text) codes[index].textContent = text;
    });
  }

  fillIn(settings);
  select(0);
  const list = make("div", { role: "tablist", class: "tabs", "aria-label": "Client", onkeydown: move }, tabs);
  return { element: make("div", { class: "snippets" }, list, panels), fillIn };
}
