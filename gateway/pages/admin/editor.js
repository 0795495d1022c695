// A text area with line numbers and, below it, a coloured copy of the text.

import { make } from "../shared/elements.js";
import { coloured } from "./yaml_colors.js";

const TOO_MANY_LINES = 4000;

export class Editor {
  #area;
  #gutter;
  #colors;
  #lines = [];
  #marked = new Set();

  constructor(root, onInput) {
    this.#area = root.querySelector("textarea");
    this.#gutter = root.querySelector(".gutter");
    this.#colors = root.querySelector(".colors");
    this.#area.addEventListener("input", () => {
      this.#draw();
      onInput();
    });
    this.#area.addEventListener("scroll", () => this.#follow());
    this.#area.addEventListener("keydown", (event) => this.#indent(event));
    new ResizeObserver(() => this.#follow()).observe(this.#area);
  }

  get text() {
    return this.#area.value;
  }

  set text(text) {
    this.#area.value = text;
    this.#draw();
    this.#area.scrollTo(0, 0);
    this.#area.setSelectionRange(0, 0);
    this.#follow();
  }

  // Mark lines with problems; lines count from 1.
  mark(lines) {
    for (const line of this.#marked) this.#gutter.children[line - 1]?.classList.remove("bad");
    this.#marked = new Set(lines);
    for (const line of this.#marked) this.#gutter.children[line - 1]?.classList.add("bad");
  }

  // Select a line and scroll to it.
  jump(line) {
    const lines = this.text.split("\n");
    const start = lines.slice(0, line - 1).reduce((sum, text) => sum + text.length + 1, 0);
    this.#area.focus();
    this.#area.setSelectionRange(start, start + (lines[line - 1] ?? "").length);
    const height = this.#gutter.firstElementChild.getBoundingClientRect().height;
    this.#area.scrollTop = Math.max(0, (line - 1) * height - this.#area.clientHeight / 2);
  }

  // Redraw only the lines that changed.
  #draw() {
    const lines = this.text.split("\n");
    const plain = lines.length > TOO_MANY_LINES;
    while (this.#gutter.childElementCount < lines.length) {
      this.#gutter.append(make("span", {}, String(this.#gutter.childElementCount + 1)));
      this.#colors.append(make("span", { class: "line" }));
    }
    while (this.#gutter.childElementCount > lines.length) {
      this.#gutter.lastElementChild.remove();
      this.#colors.lastElementChild.remove();
    }
    lines.forEach((line, index) => {
      if (line === this.#lines[index]) return;
      this.#colors.children[index].replaceChildren(...(plain ? [line] : coloured(line)), "\n");
    });
    this.#lines = lines;
    this.#follow();
  }

  #follow() {
    this.#gutter.style.transform = `translateY(${-this.#area.scrollTop}px)`;
    this.#colors.style.transform = `translate(${-this.#area.scrollLeft}px, ${-this.#area.scrollTop}px)`;
  }

  // Enter keeps the indentation, or that of the fields which begin here. Tab still moves the focus, so that the keyboard
  // can leave the editor.
  #indent(event) {
    if (event.key !== "Enter" || event.isComposing || event.ctrlKey || event.metaKey) return;
    const before = this.text.slice(0, this.#area.selectionStart);
    const [, spaces, dashes, rest] = /^( *)((?:- +)*)(.*)$/s.exec(before.slice(before.lastIndexOf("\n") + 1));
    const inItem = rest.includes(":") ? " ".repeat(dashes.length) : "";
    const indent = spaces + inItem + (rest.endsWith(":") ? "  " : "");
    if (!indent) return;
    event.preventDefault();
    this.#area.setRangeText(`\n${indent}`, this.#area.selectionStart, this.#area.selectionEnd, "end");
    this.#area.dispatchEvent(new Event("input"));
  }
}
