// Dialogs: the browser's own, so that focus stays inside and Escape closes them.

import { button, make } from "./elements.js";

// Open a dialog and return it; whatever closes it also takes it off the page.
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

// Ask before something that cannot be undone; `act` may throw a Refusal, which is shown here.
export function confirmFirst(title, text, name, act) {
  const refusal = make("p", { class: "refusal", role: "alert" });
  const yes = button(
    name,
    async () => {
      yes.disabled = true;
      try {
        await act();
        dialog.close();
      } catch (refused) {
        refusal.textContent = refused.message;
        yes.disabled = false;
      }
    },
    { class: "danger" },
  );
  const dialog = openDialog(title, [make("p", {}, text), refusal], [yes, button("Keep it", () => dialog.close())]);
}
