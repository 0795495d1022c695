// Native dialogs, so that focus stays inside and Escape closes them.

import { button, make } from "../shared/elements.js";

// Open a dialog and return it; closing it removes it from the page.
export function openDialog(title, body, actions, settings = {}) {
  const close = () => dialog.close();
  const heading = make("h2", { id: "dialog-title" }, title);
  const dialog = make(
    "dialog",
    { "aria-labelledby": "dialog-title", ...settings },
    make("div", { class: "dialog-head" }, heading, button("Close", close, { class: "quiet" })),
    make("div", { class: "dialog-body" }, body),
    make("div", { class: "row dialog-actions" }, actions),
  );
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
  return dialog;
}

// Ask for confirmation before `act`; the dialog shows an ApiError that `act` throws.
export function confirmFirst(title, text, name, act) {
  const refusal = make("p", { class: "refusal", role: "alert" });
  const confirm = button(
    name,
    async () => {
      confirm.disabled = true;
      try {
        await act();
        dialog.close();
      } catch (error) {
        refusal.textContent = error.message;
        confirm.disabled = false;
      }
    },
    { class: "danger" },
  );
  const dialog = openDialog(title, [make("p", {}, text), refusal], [confirm, button("Cancel", () => dialog.close())]);
}
