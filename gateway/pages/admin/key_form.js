// The form for creating and editing a key.

import { requestJson } from "./api.js";
import { openDialog } from "./dialogs.js";
import { make } from "../shared/elements.js";

export const LIMITS = [
  { name: "requests_a_minute", label: "Requests a minute", short: "requests/min" },
  { name: "tokens_a_minute", label: "Tokens a minute", short: "tokens/min" },
  { name: "concurrent_requests", label: "Requests at a time", short: "at a time" },
  { name: "tokens_a_day", label: "Tokens a day", short: "tokens/day" },
];
const PRIORITIES = ["interactive", "default", "bulk"];

// Show the form and call `save` with its values; the form shows an ApiError that `save` throws.
// `key` is the key to edit; `confirm` is a consequence that the admin confirms first.
export async function keyForm(title, action, { key = null, confirm = "" }, save) {
  const pools = Object.keys((await requestJson("GET", "/policy")).pools);
  const name = make("input", { id: "key-name", required: true, maxlength: 64, autocomplete: "off", value: key?.name ?? "" });
  const team = make("input", { id: "key-team", maxlength: 64, autocomplete: "off", value: key?.team ?? "" });
  const models = make("input", { id: "key-models", autocomplete: "off", value: key?.models.join(", ") ?? "" });
  const priority = make("select", { id: "key-priority" }, PRIORITIES.map((name) => make("option", { selected: name === key?.priority }, name)));
  const expires = make("input", { id: "key-expires", type: "datetime-local", value: key?.expires_at ? localTime(key.expires_at) : "" });
  const limits = LIMITS.map((limit) => ({
    ...limit,
    input: make("input", { id: `key-${limit.name}`, type: "number", min: 1, step: 1, inputmode: "numeric", placeholder: "no limit", value: key?.[limit.name] }),
  }));
  const choices = pools.map((pool) => make("input", { type: "checkbox", value: pool, checked: key?.pools.includes(pool) }));
  const refusal = make("p", { class: "refusal", role: "alert" });
  const submit = make("button", { class: "primary" }, action);

  const terms = () => ({
    name: name.value.trim(),
    team: team.value.trim(),
    models: models.value.split(",").map((model) => model.trim()).filter(Boolean),
    pools: choices.filter(({ checked }) => checked).map(({ value }) => value),
    priority: priority.value,
    expires_at: expires.value ? new Date(expires.value).toISOString() : null,
    ...Object.fromEntries(limits.map(({ name: limit, input }) => [limit, input.value ? Number(input.value) : null])),
  });
  const form = make(
    "form",
    {
      id: "key-form",
      class: "stack",
      onsubmit: async (event) => {
        event.preventDefault();
        submit.disabled = true;
        try {
          await save(key ? changed(key, terms()) : terms());
          dialog.close();
        } catch (error) {
          refusal.textContent = error.message;
        }
        submit.disabled = false;
      },
    },
    make("div", { class: "pair" }, field("Name", name), field("Team", team)),
    make("div", { class: "pair narrow" }, limits.map(({ label, input }) => field(label, input))),
    field("Models", models, "Names of models, separated by commas; empty means all."),
    make(
      "fieldset",
      {},
      make("legend", {}, "Pools ", make("span", { class: "muted" }, "(none selected means all)")),
      pools.map((pool, index) => make("label", { class: "choice" }, choices[index], pool)),
    ),
    make("div", { class: "pair" }, field("Highest priority", priority), field("Expires", expires)),
    confirm && make("label", { class: "banner choice" }, make("input", { type: "checkbox", required: true }), make("span", {}, make("strong", {}, "This is the first key. "), confirm)),
    refusal,
  );
  submit.setAttribute("form", form.id);
  const dialog = openDialog(title, form, submit);
  name.focus();
}

function field(label, input, hint) {
  return make("div", { class: "field" }, make("label", { for: input.id }, label), input, hint && make("p", { class: "hint" }, hint));
}

// Return only the changed values, because another admin may have changed the others meanwhile.
function changed(key, terms) {
  const same = (one, other) => JSON.stringify(one) === JSON.stringify(other);
  return Object.fromEntries(
    Object.entries(terms).filter(([name, value]) => {
      if (name === "expires_at" && value && key.expires_at) return localTime(value) !== localTime(key.expires_at);
      return !same(value, key[name]);
    }),
  );
}

function localTime(time) {
  const date = new Date(time);
  return new Date(date.getTime() - date.getTimezoneOffset() * 60_000).toISOString().slice(0, 16);
}
