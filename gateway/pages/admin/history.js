// The versions of the policy, with view and rollback.

import { openDialog } from "./dialogs.js";
import { difference } from "./difference.js";
import { ago, button, byId, make, pill } from "../shared/elements.js";
import { author, compare, storeAuthor, readVersion, rollBack } from "./policy_api.js";
import { coloured } from "./yaml_colors.js";

const REASONS = { start: "shipped", file: "file", edit: "edit", rollback: "rollback" };

// `editing` connects the list to the editor: `etag()`, `load(text)` and `changed(version)`.
export function showHistory(versions, active, editing) {
  byId("history").replaceChildren(
    ...versions.map((version) => entry(version, version.number === active, editing)),
  );
}

function entry(version, active, editing) {
  const { number, note } = version;
  return make(
    "li",
    {},
    make("span", { class: "number" }, `v${number}`),
    make(
      "div",
      { class: "summary" },
      make("p", { class: note ? "" : "muted" }, note || "no note"),
      make("p", { class: "muted small" }, version.author, " · ", ago(version.time), " · ", REASONS[version.reason] ?? version.reason),
    ),
    make(
      "div",
      { class: "row" },
      active && pill("active", "ok"),
      button("View", () => view(version, active, editing), { "aria-label": `View version ${number}` }),
      !active && button("Roll back", () => goBack(version, editing), { "aria-label": `Roll back to version ${number}` }),
    ),
  );
}

async function view(version, active, editing) {
  let text = "";
  const content = make("pre", { class: "reading", tabindex: "0", "aria-label": "Document" }, "Loading …");
  const load = button("Load into the editor", () => {
    editing.load(text);
    dialog.close();
  });
  const back = button("Roll back to this version", () => {
    dialog.close();
    goBack(version, editing);
  });
  load.disabled = true;
  const dialog = openDialog(`Version ${version.number}`, content, active ? [load] : [load, back], { class: "wide" });
  try {
    text = await readVersion(version.number);
    content.replaceChildren(...text.split("\n").flatMap((line) => [...coloured(line), "\n"]));
    load.disabled = false;
  } catch (error) {
    content.textContent = error.message;
  }
}

async function goBack(version, editing) {
  const preview = make("div", { class: "difference", "aria-live": "polite" }, make("p", { class: "muted" }, "Comparing …"));
  const refusal = make("p", { class: "refusal", role: "alert" });
  const name = make("input", { id: "rollback-author", maxlength: 100, autocomplete: "off", value: author() });
  const note = make("input", { id: "rollback-note", maxlength: 500, autocomplete: "off" });
  const apply = button(
    `Roll back to version ${version.number}`,
    async () => {
      apply.disabled = true;
      storeAuthor(name.value);
      try {
        const created = await rollBack(version.number, await tag, note.value);
        dialog.close();
        await editing.changed(created);
      } catch (error) {
        refusal.textContent = error.message;
      }
    },
    { class: "primary" },
  );
  apply.disabled = true;
  // The ETag is read before the comparison, so an edit in between makes the rollback fail.
  const tag = editing.etag();
  const fields = [
    make("div", { class: "field" }, make("label", { for: name.id }, "Your name"), name),
    make("div", { class: "field" }, make("label", { for: note.id }, "Purpose ", make("span", { class: "muted" }, "(optional)")), note),
  ];
  const dialog = openDialog(`Roll back to version ${version.number}`, [preview, make("div", { class: "stack" }, fields), refusal], [apply]);
  try {
    await tag;
    const compared = await compare(await readVersion(version.number));
    preview.replaceChildren(...difference(compared));
    apply.disabled = false;
  } catch (error) {
    preview.replaceChildren();
    refusal.textContent = error.message;
  }
}
