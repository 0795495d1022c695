// A button that copies text.

import { button, notice } from "./elements.js";

// `text` is a string, or a function that returns it when the button is pressed.
export function copyButton(text, { label = "Copy", ...settings } = {}) {
  let restores;
  const copy = button(
    label,
    async () => {
      const copied = await toClipboard(typeof text === "function" ? text() : text, copy.parentElement);
      copy.textContent = copied ? "Copied" : "Press Ctrl-C";
      if (copied) notice("Copied.");
      clearTimeout(restores);
      restores = setTimeout(() => (copy.textContent = label), 2500);
    },
    settings,
  );
  return copy;
}

// Return whether the text was copied. `near` holds the text for a moment: nothing outside an open dialog can be selected.
async function toClipboard(text, near) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // Browsers provide no clipboard to a page without HTTPS.
    const focused = document.activeElement;
    const holder = document.createElement("textarea");
    holder.className = "off-screen";
    holder.value = text;
    near.append(holder);
    holder.select();
    const copied = document.execCommand("copy");
    holder.remove();
    focused?.focus();
    return copied;
  }
}
