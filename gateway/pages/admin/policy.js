// The policy editor: validate while typing, compare, apply.

import { Completion } from "./completion.js";
import { confirmFirst } from "./dialogs.js";
import { difference } from "./difference.js";
import { Editor } from "./editor.js";
import { ago, button, byId, make, notice, several } from "../shared/elements.js";
import { showHistory } from "./history.js";
import { applyPolicy, author, compare, storeAuthor, readExamples, readHistory, readPolicy, readSchema, validate } from "./policy_api.js";
import { PolicySchema } from "./policy_schema.js";

const VALIDATION_DELAY_MS = 300;
const REFRESH_MS = 5000;

const editor = new Editor(byId("editor"), edited);
let base = null; // the version on which the edit is based: { text, etag, number }
let savedText = null; // the user's text while the editor shows another version
let valid = true;
let conflict = false; // another version is active, and the user has not chosen yet
let pause;
let validation = new AbortController();
let timer;
let helped = false; // fields, completion and examples are there

export const policy = {
  async enter() {
    byId("apply-author").value = author();
    timer = setInterval(() => document.hidden || refresh().catch(showError), REFRESH_MS);
    await perform(async () => (base ? await refresh() : adopt(await readPolicy())));
    await perform(offerHelp);
  },
  leave() {
    clearInterval(timer);
  },
};

const dirty = () => base !== null && editor.text !== base.text;

// Base the edit on a version, and show its text unless another text is given.
async function adopt(version, text = version.text) {
  base = version;
  editor.text = text;
  byId("conflict").hidden = true;
  conflict = false;
  edited();
  await refreshHistory();
}

async function refreshHistory() {
  const { versions, active, problem } = await readHistory();
  const now = versions.find(({ number }) => number === active) ?? { number: active, author: "paceline", time: new Date() };
  byId("policy-problem").textContent = problem;
  byId("policy-problem").hidden = !problem;
  byId("active-version").replaceChildren(
    make("strong", {}, `Version ${now.number}`),
    " is active · ",
    now.author,
    " · ",
    ago(now.time),
    now.note ? ` · ${now.note}` : "",
  );
  showHistory(versions, active, {
    etag: () => readPolicy().then(({ etag }) => etag),
    load: (text) => {
      editor.text = text;
      edited();
      byId("policy-text").focus();
    },
    changed: async (version) => {
      notice(`Version ${version.number} is active.`);
      const newest = await readPolicy();
      if (dirty()) loadNewest(newest);
      else await adopt(newest);
    },
  });
}

function edited() {
  clearTimeout(pause);
  validation.abort();
  byId("difference").replaceChildren();
  byId("apply-refusal").textContent = "";
  byId("discard").hidden = !dirty();
  valid = !dirty();
  if (dirty()) {
    state("Checking …");
    pause = setTimeout(() => perform(check), VALIDATION_DELAY_MS);
  } else {
    showProblems([]);
    state("Active", "ok");
    showHint("Edit the document to see its effect.");
  }
}

async function check() {
  validation = new AbortController();
  const text = editor.text;
  const problems = await validate(text, validation.signal);
  if (text !== editor.text) return;
  valid = problems.length === 0;
  showProblems(problems);
  if (valid) {
    state("Valid", "ok");
    showHint("The document is valid. Compare it with the active version, or apply it.");
  } else {
    state(several(problems.length, "problem"), "bad");
    showHint("An invalid policy cannot be applied.");
  }
}

const ready = () => dirty() && valid && !conflict;

function state(text, tone = "") {
  byId("check").className = `pill ${tone}`;
  byId("check").textContent = text;
  byId("preview").disabled = !ready();
  byId("apply-button").disabled = !ready();
  byId("apply-button").textContent = ready() ? `Apply as version ${base.number + 1}` : "Apply";
}

function showHint(text) {
  byId("difference").replaceChildren(make("p", { class: "muted" }, text));
}

function showProblems(problems) {
  byId("policy-text").setAttribute("aria-invalid", String(problems.length > 0));
  byId("problems").replaceChildren(...problems.map(problemItem));
  editor.mark(problems.map(({ line }) => line).filter(Boolean));
}

function problemItem({ field, message, line }) {
  const parts = [
    line && make("span", { class: "line-number" }, `Line ${line}`),
    field && make("code", { class: "where" }, field),
    make("span", {}, message),
  ];
  return make("li", {}, line ? make("button", { type: "button", onclick: () => editor.jump(line) }, parts) : make("p", {}, parts));
}

// Offer completion, the list of fields and the examples.
async function offerHelp() {
  if (helped) return;
  const [document, examples] = await Promise.all([readSchema(), readExamples()]);
  if (helped) return;
  helped = true;
  const schema = new PolicySchema(document);
  new Completion(byId("policy-text"), (before, whole) => schema.suggest(before, whole));
  const fields = schema.fields();
  const filter = () => showFields(fields, byId("field-filter").value.trim().toLowerCase());
  byId("field-filter").addEventListener("input", filter);
  filter();
  const menu = byId("examples");
  menu.append(...examples.map(({ name, title }) => make("option", { value: name }, title)));
  menu.addEventListener("change", () => {
    const chosen = examples.find(({ name }) => name === menu.value);
    menu.value = "";
    if (!dirty()) return loadExample(chosen);
    confirmFirst("Replace your text?", `The example “${chosen.title}” replaces the text in the editor.`, "Replace", () => loadExample(chosen));
  });
}

function loadExample({ title, text }) {
  editor.text = text;
  edited();
  notice(`“${title}” is in the editor; it is not active yet.`);
}

function showFields(fields, part) {
  const shown = fields.filter(({ path, detail }) => `${path} ${detail}`.toLowerCase().includes(part));
  const items = shown.map(({ path, type, detail }) => [make("dt", {}, make("code", {}, path), " ", make("span", { class: "muted small" }, type)), make("dd", {}, detail)]);
  byId("field-list").replaceChildren(...items.flat());
  byId("no-field").hidden = shown.length > 0;
}

// Check whether another version is active.
async function refresh() {
  const newest = await readPolicy();
  if (!base || newest.etag === base.etag) return;
  if (dirty()) showConflict(newest);
  else await adopt(newest);
}

// Another edit came first: neither edit is lost.
function showConflict(newest) {
  const banner = byId("conflict");
  if (!banner.hidden && banner.dataset.etag === newest.etag) return;
  banner.dataset.etag = newest.etag;
  banner.hidden = false;
  conflict = true;
  state("Conflict", "bad");
  banner.replaceChildren(
    make("p", {}, make("strong", {}, "The policy has changed. "), `Version ${newest.number} is active, and your edit is based on version ${base.number}.`),
    make(
      "div",
      { class: "row" },
      button(`Load version ${newest.number} (your text stays in this tab)`, () => loadNewest(newest), { class: "primary" }),
      button(`Continue with my text on version ${newest.number}`, () => perform(() => adopt(newest, editor.text))),
    ),
  );
  perform(refreshHistory);
}

async function loadNewest(newest) {
  savedText = editor.text;
  await adopt(newest);
  const banner = byId("conflict");
  const done = () => {
    savedText = null;
    banner.hidden = true;
  };
  const restore = () => {
    editor.text = savedText;
    edited();
    done();
  };
  banner.hidden = false;
  banner.replaceChildren(
    make("p", {}, `Version ${newest.number} is in the editor. Your text is still in this tab.`),
    make("div", { class: "row" }, button("Restore my text", restore, { class: "primary" }), button("Discard my text", done)),
  );
}

// Show an error of a periodic refresh as a notice.
function showError(error) {
  if (error.status !== 401) notice(error.message);
}

async function perform(work) {
  try {
    await work();
  } catch (error) {
    if (error.name === "AbortError" || error.status === 401) return;
    if (error.status === undefined) throw error;
    byId("apply-refusal").textContent = error.message;
  }
}

byId("preview").addEventListener("click", () =>
  perform(async () => {
    const text = editor.text;
    byId("preview").disabled = true;
    try {
      const effect = await compare(text);
      if (text !== editor.text) return;
      byId("difference").replaceChildren(...difference(effect));
      if (`"${effect.onto.etag}"` !== base.etag) showConflict(await readPolicy());
    } finally {
      byId("preview").disabled = !ready();
    }
  }),
);

byId("apply").addEventListener("submit", (event) => {
  event.preventDefault();
  perform(async () => {
    const apply = byId("apply-button");
    storeAuthor(byId("apply-author").value);
    byId("apply-refusal").textContent = "";
    apply.disabled = true;
    try {
      const version = await applyPolicy(editor.text, base.etag, byId("apply-note").value);
      byId("apply-note").value = "";
      await adopt(await readPolicy());
      notice(`Version ${version.number} is active.`);
    } catch (error) {
      if (error.status !== 412) throw error;
      showConflict(await readPolicy());
    } finally {
      apply.disabled = !ready();
    }
  });
});

byId("discard").addEventListener("click", () => {
  editor.text = base.text;
  edited();
});
window.addEventListener("beforeunload", (event) => dirty() && event.preventDefault());
