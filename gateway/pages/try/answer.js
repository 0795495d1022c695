// One answer: its text while it grows, and where and how it was written.

import { BYPASS_REASONS } from "./bypass_reasons.js";
import { amount, button, make, several } from "./elements.js";
import { MarkdownView } from "./markdown.js";
import { TokenSources } from "./tokens.js";

// The page spends at most this share of its time on drawing.
const DRAWING_SHARE = 0.2;

export class Answer {
  text = "";
  #tokens = new TokenSources();
  #content = make("div", { class: "content" });
  #facts = make("div", { class: "facts muted small" });
  #view = new MarkdownView(this.#content, (start, end) => this.#tokens.nodes(this.text, start, end));
  #drawing = null;
  #headers = null;
  #usage = null;
  #finish = "";
  #firstMs = 0;
  #lastMs = 0;

  constructor(model) {
    this.#sentMs = performance.now();
    this.element = make("article", { class: "turn answer", "aria-label": `Answer of ${model}` }, make("p", { class: "who" }, model), this.#content, this.#facts);
    this.#facts.textContent = "Waiting for the first token …";
  }

  #sentMs;

  // Take the head of the response.
  begin({ headers }) {
    this.#headers = headers;
  }

  // Take a chunk of the stream.
  take({ choices: [choice], usage }) {
    this.#usage = usage ?? this.#usage;
    if (!choice) return;
    if (choice.token_sources) this.#tokens.add(choice.token_sources);
    if (choice.delta?.content) {
      this.#lastMs = performance.now();
      this.#firstMs ||= this.#lastMs;
      this.text += choice.delta.content;
      this.#draw();
    }
    this.#finish = choice.finish_reason ?? this.#finish;
  }

  // Show the complete answer; `stopped` by the user, or not. Return a sentence about it, in parts.
  end({ stopped = false } = {}) {
    this.#drawNow();
    if (!this.text) this.#content.replaceChildren(make("p", { class: "muted" }, stopped ? "Stopped before the first token." : "The answer is empty."));
    const facts = this.#sentences(stopped);
    this.#facts.replaceChildren(...facts.map((fact) => make("p", {}, fact)));
    return facts[0] ?? ["The answer is complete."];
  }

  // Show an error behind what has been written.
  fail(message, retry) {
    this.#drawNow();
    this.#facts.replaceChildren();
    this.element.append(make("div", { class: "failed", role: "alert" }, make("p", {}, message), button("Try again", retry)));
  }

  // Draw at the next frame, but leave the tab most of its time: a long block takes long to draw.
  #draw() {
    if (this.#drawing !== null) return;
    this.#drawing = requestAnimationFrame(() => {
      const began = performance.now();
      this.#view.update(this.text);
      const took = performance.now() - began;
      this.#drawing = setTimeout(() => {
        this.#drawing = null;
        if (this.#pending) this.#draw();
      }, took / DRAWING_SHARE);
      this.#shown = this.text.length;
      this.#facts.textContent = "";
    });
  }

  #shown = 0;

  get #pending() {
    return this.text.length > this.#shown;
  }

  #drawNow() {
    cancelAnimationFrame(this.#drawing);
    clearTimeout(this.#drawing);
    this.#drawing = 0; // nothing more is drawn later
    this.#view.update(this.text);
  }

  #sentences(stopped) {
    const { total, accepted } = this.#tokens;
    const tokens = this.#usage?.completion_tokens ?? total;
    const facts = [];
    const ended = stopped ? "You stopped the answer after" : this.#finish === "length" ? "The answer reached its limit of" : "The answer has";
    if (tokens) facts.push([`${ended} ${several(tokens, "token")}`, ...this.#speed(tokens), "."]);
    if (total) {
      const share = `${Math.round((100 * accepted) / total)}%`;
      facts.push(accepted ? [make("strong", {}, `${amount(accepted)} of ${amount(total)} tokens`), ` (${share}) were drafted ahead and accepted.`] : ["No token was drafted ahead. ", this.#reason()]);
    }
    if (this.#headers?.get("x-paceline-worker")) facts.push(this.#place());
    return facts;
  }

  #speed(tokens) {
    if (!this.#firstMs) return [];
    const seconds = (this.#lastMs - this.#firstMs) / 1000;
    const first = `; the first came after ${((this.#firstMs - this.#sentMs) / 1000).toFixed(2)} s`;
    return tokens > 1 && seconds > 0 ? [first, ", then ", make("strong", {}, `${amount(Math.round((tokens - 1) / seconds))} tokens/s`)] : [first];
  }

  #place() {
    const of = (name) => this.#headers.get(`x-paceline-${name}`);
    const cached = of("prefix") === "hit" ? " The system prompt came from its cache." : "";
    const why = of("reason") === "eligible" ? " Greedy text runs in the lane that drafts." : "";
    return ["It ran on ", make("strong", {}, of("worker")), ` in the pool ${of("pool")}.${why}${cached}`];
  }

  #reason() {
    return BYPASS_REASONS[this.#headers?.get("x-paceline-reason")] ?? "";
  }
}
