// All versions of the policy, and the way back to each of them.

import { openDialog } from "./dialogs.js";
import { difference } from "./difference.js";
import { ago, button, byId, make, pill } from "./elements.js";
import { author, compare, keepAuthor, readVersion, rollBack } from "./policy_api.js";
import { coloured } from "./yaml_colors.js";

const REASONS = { start: "shipped", file: "from the file", edit: "edit", rollback: "rollback" };

// `editing` says what a version can be used for: its `etag()`, `load(text)` and `changed(version)`.
export function showHistory(versions, editing) {
  byId("history").replaceChildren(
    ...versions.map((version, place) => entry(version, place === 0, editing)),
  );
}

function entry(version, inForce, editing) {
  const { number, note } = version;
  return make(
    "li",
    {},
    make("span", { class: "number" }, `v${number}`),
    make(
      "div",
      { class: "told" },
      make("p", { class: note ? "" : "muted" }, note || "no note"),
      make("p", { class: "muted small" }, version.author, " · ", ago(version.time), " · ", REASONS[version.reason] ?? version.reason),
    ),
    make(
      "div",
      { class: "row" },
      inForce && pill("in force", "ok"),
      button("View", () => view(version, inForce, editing), { "aria-label": `View version ${number}` }),
      !inForce && button("Roll back", () => goBack(version, editing), { "aria-label": `Roll back to version ${number}` }),
    ),
  );
}

async function view(version, inForce, editing) {
  const paper = make("pre", { class: "reading", tabindex: "0", "aria-label": "Document" }, "Loading …");
  const load = button("Load into the editor", () => {
    editing.load(paper.dataset.text);
    dialog.close();
  });
  const back = button("Roll back to it", () => {
    dialog.close();
    goBack(version, editing);
  });
  load.disabled = true;
  const dialog = openDialog(`Version ${version.number}`, paper, inForce ? [load] : [load, back], { class: "wide" });
  try {
    const text = await readVersion(version.number);
    paper.dataset.text = text;
    paper.replaceChildren(...text.split("\n").flatMap((line) => [...coloured(line), "\n"]));
    load.disabled = false;
  } catch (refused) {
    paper.textContent = refused.message;
  }
}

async function goBack(version, editing) {
  const told = make("div", { class: "difference", "aria-live": "polite" }, make("p", { class: "muted" }, "Comparing …"));
  const refusal = make("p", { class: "refusal", role: "alert" });
  const who = make("input", { id: "rollback-author", maxlength: 100, autocomplete: "off", value: author() });
  const note = make("input", { id: "rollback-note", maxlength: 500, autocomplete: "off" });
  const go = button(
    `Roll back to version ${version.number}`,
    async () => {
      go.disabled = true;
      keepAuthor(who.value);
      try {
        const made = await rollBack(version.number, await tag, note.value);
        dialog.close();
        await editing.changed(made);
      } catch (refused) {
        refusal.textContent = refused.message;
      }
    },
    { class: "primary" },
  );
  go.disabled = true;
  // What is compared is what is rolled back: the tag is read first, and an edit in between refuses it.
  const tag = editing.etag();
  const fields = [
    make("div", { class: "field" }, make("label", { for: who.id }, "Your name"), who),
    make("div", { class: "field" }, make("label", { for: note.id }, "What is it for? ", make("span", { class: "muted" }, "(optional)")), note),
  ];
  const dialog = openDialog(`Roll back to version ${version.number}`, [told, make("div", { class: "stack" }, fields), refusal], [go]);
  try {
    await tag;
    const compared = await compare(await readVersion(version.number));
    told.replaceChildren(...difference(compared));
    go.disabled = false;
  } catch (refused) {
    told.replaceChildren();
    refusal.textContent = refused.message;
  }
}
