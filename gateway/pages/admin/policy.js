// The policy: edit, see what is wrong as you type, compare, apply.

import { difference } from "./difference.js";
import { Editor } from "./editor.js";
import { ago, button, byId, make, notice, several } from "./elements.js";
import { showHistory } from "./history.js";
import { applyPolicy, author, compare, keepAuthor, readHistory, readPolicy, validate } from "./policy_api.js";

const PAUSE_MS = 300;
const LOOK_MS = 5000;

const editor = new Editor(byId("editor"), edited);
let base = null; // the version that the text was made from: { text, etag, number }
let kept = null; // a text that was put aside for somebody else's
let good = true;
let pause;
let asking = new AbortController();
let looking;

export const policy = {
  async enter() {
    byId("apply-author").value = author();
    looking = setInterval(() => document.hidden || look().catch(untold), LOOK_MS);
    await quietly(async () => (base ? await look() : adopt(await readPolicy())));
  },
  leave() {
    clearInterval(looking);
  },
};

const dirty = () => base !== null && editor.text !== base.text;

// Make a version the one that is edited; the text too, unless it is to be another.
async function adopt(version, text = version.text) {
  base = version;
  editor.text = text;
  byId("overtaken").hidden = true;
  edited();
  await refreshHistory();
}

async function refreshHistory() {
  const versions = await readHistory();
  const now = versions[0];
  byId("in-force").replaceChildren(
    make("strong", {}, `Version ${now.number}`),
    " is in force · ",
    now.author,
    " · ",
    ago(now.time),
    now.note ? ` · ${now.note}` : "",
  );
  showHistory(versions, {
    etag: () => readPolicy().then(({ etag }) => etag),
    load: (text) => {
      editor.text = text;
      edited();
      byId("policy-text").focus();
    },
    changed: async (version) => {
      notice(`Version ${version.number} is in force.`);
      const theirs = await readPolicy();
      if (dirty()) keepMine(theirs);
      else await adopt(theirs);
    },
  });
}

function edited() {
  clearTimeout(pause);
  asking.abort();
  byId("difference").replaceChildren();
  byId("apply-refusal").textContent = "";
  byId("discard").hidden = !dirty();
  good = !dirty();
  if (dirty()) {
    state("Checking …");
    pause = setTimeout(() => quietly(check), PAUSE_MS);
  } else {
    showProblems([]);
    state("In force", "ok");
    say("Edit the document to see what would change.");
  }
}

async function check() {
  asking = new AbortController();
  const text = editor.text;
  const problems = await validate(text, asking.signal);
  if (text !== editor.text) return;
  good = problems.length === 0;
  showProblems(problems);
  if (good) {
    state("Good", "ok");
    say("The edit is good. Compare it with what is in force, or apply it.");
  } else {
    state(several(problems.length, "problem"), "bad");
    say("A policy with problems cannot be applied.");
  }
}

function state(text, tone = "") {
  byId("check").className = `pill ${tone}`;
  byId("check").textContent = text;
  const ready = dirty() && good;
  byId("preview").disabled = !ready;
  byId("apply-button").disabled = !ready;
  byId("apply-button").textContent = ready ? `Apply as version ${base.number + 1}` : "Apply";
}

function say(text) {
  byId("difference").replaceChildren(make("p", { class: "muted" }, text));
}

function showProblems(problems) {
  byId("policy-text").setAttribute("aria-invalid", String(problems.length > 0));
  byId("problems").replaceChildren(...problems.map(problemItem));
  editor.mark(problems.map(({ line }) => line).filter(Boolean));
}

function problemItem({ field, message, line }) {
  const told = [
    line && make("span", { class: "line-number" }, `Line ${line}`),
    field && make("code", { class: "where" }, field),
    make("span", {}, message),
  ];
  return make("li", {}, line ? make("button", { type: "button", onclick: () => editor.jump(line) }, told) : make("p", {}, told));
}

// See whether another version is in force by now.
async function look() {
  const theirs = await readPolicy();
  if (!base || theirs.etag === base.etag) return;
  if (dirty()) overtaken(theirs);
  else await adopt(theirs);
}

// Another edit came first: neither edit is lost.
function overtaken(theirs) {
  const banner = byId("overtaken");
  if (!banner.hidden && banner.dataset.etag === theirs.etag) return;
  banner.dataset.etag = theirs.etag;
  banner.hidden = false;
  banner.replaceChildren(
    make("p", {}, make("strong", {}, "The policy has changed. "), `Version ${theirs.number} is in force, and your text was made from version ${base.number}.`),
    make(
      "div",
      { class: "row" },
      button("Load theirs, keep my text aside", () => keepMine(theirs), { class: "primary" }),
      button(`Go on with mine, onto version ${theirs.number}`, () => quietly(() => adopt(theirs, editor.text))),
    ),
  );
  quietly(refreshHistory);
}

async function keepMine(theirs) {
  kept = editor.text;
  await adopt(theirs);
  const banner = byId("overtaken");
  const done = () => {
    kept = null;
    banner.hidden = true;
  };
  const bring = () => {
    editor.text = kept;
    edited();
    done();
  };
  banner.hidden = false;
  banner.replaceChildren(
    make("p", {}, `Version ${theirs.number} is in the editor. Your own text is kept in this tab.`),
    make("div", { class: "row" }, button("Bring my text back", bring, { class: "primary" }), button("Forget it", done)),
  );
}

// What goes wrong unasked is told in passing.
function untold(refused) {
  if (refused.status !== 401) notice(refused.message);
}

async function quietly(work) {
  try {
    await work();
  } catch (refused) {
    if (refused.name === "AbortError" || refused.status === 401) return;
    if (refused.status === undefined) throw refused;
    byId("apply-refusal").textContent = refused.message;
  }
}

byId("preview").addEventListener("click", () =>
  quietly(async () => {
    const text = editor.text;
    byId("preview").disabled = true;
    try {
      const told = await compare(text);
      if (text !== editor.text) return;
      byId("difference").replaceChildren(...difference(told));
      if (`"${told.onto.etag}"` !== base.etag) overtaken(await readPolicy());
    } finally {
      byId("preview").disabled = !(dirty() && good);
    }
  }),
);

byId("apply").addEventListener("submit", (event) => {
  event.preventDefault();
  quietly(async () => {
    const apply = byId("apply-button");
    keepAuthor(byId("apply-author").value);
    byId("apply-refusal").textContent = "";
    apply.disabled = true;
    try {
      const version = await applyPolicy(editor.text, base.etag, byId("apply-note").value);
      byId("apply-note").value = "";
      await adopt(await readPolicy());
      notice(`Version ${version.number} is in force.`);
    } catch (refused) {
      apply.disabled = false;
      if (refused.status === 412) return overtaken(await readPolicy());
      throw refused;
    }
  });
});

byId("discard").addEventListener("click", () => {
  editor.text = base.text;
  edited();
});
window.addEventListener("beforeunload", (event) => dirty() && event.preventDefault());
