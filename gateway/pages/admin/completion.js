// Suggestions below the caret of a text area: arrows choose, Enter or Tab inserts, Escape closes.

import { make } from "../shared/elements.js";

const COUNT_LIMIT = 12;

export class Completion {
  #area;
  #suggest;
  #list = make("ul", { id: "completions", class: "completions", role: "listbox", "aria-label": "Suggestions", hidden: true });
  #options = [];
  #prefix = "";
  #chosen = 0;

  // `suggest(before, whole)` returns `{ prefix, options: [{ text, insert, detail }] }`.
  constructor(area, suggest) {
    this.#area = area;
    this.#suggest = suggest;
    area.after(this.#list);
    area.setAttribute("aria-autocomplete", "list");
    area.setAttribute("aria-controls", this.#list.id);
    area.addEventListener("input", () => this.#refresh(false));
    area.addEventListener("blur", () => this.#close());
    area.addEventListener("scroll", () => this.#close());
    area.addEventListener("click", () => this.#close());
    // Before the editor's own keys.
    area.addEventListener("keydown", (event) => this.#key(event), { capture: true });
  }

  #refresh(wanted) {
    const { value, selectionStart: at, selectionEnd: end } = this.#area;
    const typing = at === end && !/\S/.test(value.slice(at, (value.indexOf("\n", at) + 1 || value.length + 1) - 1).replace(/[}\],]/g, ""));
    const { prefix, options } = typing ? this.#suggest(value.slice(0, at), value) : { prefix: "", options: [] };
    const complete = options.some(({ text }) => text === prefix);
    if (!options.length || complete || (!wanted && !prefix)) return this.#close();
    this.#prefix = prefix;
    this.#options = options.slice(0, COUNT_LIMIT);
    this.#show(value.slice(0, at - prefix.length));
  }

  #show(before) {
    this.#list.replaceChildren(
      ...this.#options.map(({ text, detail }, index) =>
        make(
          "li",
          {
            id: `completion-${index}`,
            role: "option",
            // The text area keeps the focus.
            onmousedown: (event) => event.preventDefault(),
            onclick: () => this.#insert(index),
          },
          make("code", {}, text),
          detail && make("span", { class: "muted small" }, detail),
        ),
      ),
    );
    const lines = before.split("\n");
    const { scrollLeft, scrollTop, clientHeight } = this.#area;
    this.#list.hidden = false;
    const line = parseFloat(getComputedStyle(this.#list).lineHeight);
    const top = lines.length * line - scrollTop;
    const below = top + this.#list.offsetHeight < clientHeight || top < clientHeight / 2;
    this.#list.style.insetBlockStart = `${below ? top + line * 0.7 : Math.max(0, top - line * 0.6 - this.#list.offsetHeight)}px`;
    this.#list.style.insetInlineStart = `min(calc(${lines.at(-1).length}ch - ${scrollLeft}px), 100% - ${this.#list.offsetWidth}px)`;
    this.#choose(0);
  }

  #choose(index) {
    this.#chosen = (index + this.#options.length) % this.#options.length;
    [...this.#list.children].forEach((item, at) => item.setAttribute("aria-selected", String(at === this.#chosen)));
    this.#list.children[this.#chosen].scrollIntoView({ block: "nearest" });
    this.#area.setAttribute("aria-activedescendant", `completion-${this.#chosen}`);
  }

  #key(event) {
    if (event.isComposing) return;
    if (event.key === " " && event.ctrlKey) this.#refresh(true);
    else if (this.#list.hidden) return;
    else if (event.key === "ArrowDown") this.#choose(this.#chosen + 1);
    else if (event.key === "ArrowUp") this.#choose(this.#chosen - 1);
    else if (event.key === "Enter" || event.key === "Tab") this.#insert(this.#chosen);
    else if (event.key === "Escape") this.#close();
    else return;
    event.preventDefault();
    event.stopImmediatePropagation();
  }

  #insert(index) {
    const at = this.#area.selectionStart;
    this.#area.setRangeText(this.#options[index].insert, at - this.#prefix.length, at, "end");
    this.#close();
    this.#area.dispatchEvent(new Event("input"));
    this.#close();
  }

  #close() {
    this.#list.hidden = true;
    this.#area.removeAttribute("aria-activedescendant");
  }
}
