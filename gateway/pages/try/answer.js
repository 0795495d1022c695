// One answer: its text while it grows, and where and how it was written.

import { LANE_REASONS } from "../shared/bypass_reasons.js";
import { amount, button, make, several } from "../shared/elements.js";
import { MarkdownView } from "./markdown.js";
import { TokenSources } from "./tokens.js";

// The page spends at most this share of its time on drawing.
const DRAWING_SHARE = 0.2;
// Fewer tokens after the first, or a shorter time if the worker tells none, do not show a speed.
const LEAST_TOKENS = 16;
const LEAST_MS = 1000;

export class Answer {
  text = "";
  #reasoning = "";
  #thoughts = make("p");
  #thinking = make("details", { class: "reasoning", open: "", hidden: "" }, make("summary", {}, "Reasoning"), this.#thoughts);
  #tokens = new TokenSources();
  #content = make("div", { class: "content" });
  #facts = make("div", { class: "facts muted small" });
  #view = new MarkdownView(this.#content, (start, end) => this.#tokens.nodes(this.text, start, end, this.#reasoning.length));
  #drawing = null;
  #headers = null;
  #usage = null;
  #finish = "";
  #tokenMs = 0; // for each token after the first, as the worker measures; 0 if it does not
  #firstMs = 0;
  #lastMs = 0;

  constructor(model) {
    this.#sentMs = performance.now();
    this.element = make("article", { class: "turn answer", "aria-label": `Answer of ${model}` }, make("p", { class: "who" }, model), this.#thinking, this.#content, this.#facts);
    this.#facts.textContent = "Waiting for the first token …";
  }

  #sentMs;

  // Take the head of the response.
  begin({ headers }) {
    this.#headers = headers;
  }

  // Take a chunk of the stream.
  take({ choices: [choice], usage, metrics, headers }) {
    if (headers) this.#headers = new Headers(headers); // this answer waited for a worker
    this.#usage = usage ?? this.#usage;
    this.#tokenMs = metrics?.mean_itl_ms ?? this.#tokenMs;
    if (!choice) return;
    if (choice.token_sources) this.#tokens.add(choice.token_sources);
    const { content, reasoning, reasoning_content = reasoning } = choice.delta ?? {};
    if (content || reasoning_content) {
      this.#lastMs = performance.now();
      this.#firstMs ||= this.#lastMs;
      if (content && !this.text) this.#thinking.open = false;
      this.#reasoning += reasoning_content ?? "";
      this.text += content ?? "";
      this.#draw();
    }
    this.#finish = choice.finish_reason ?? this.#finish;
  }

  // Show the complete answer; `stopped` by the user, or not. Return a sentence about it, in parts.
  end({ stopped = false } = {}) {
    this.#drawNow();
    if (!this.text) this.#content.replaceChildren(make("p", { class: "muted" }, this.#absence(stopped)));
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
      this.#update();
      const took = performance.now() - began;
      this.#drawing = setTimeout(() => {
        this.#drawing = null;
        if (this.#pending) this.#draw();
      }, took / DRAWING_SHARE);
      this.#shown = this.#length;
      this.#facts.textContent = "";
    });
  }

  #shown = 0;

  get #pending() {
    return this.#length > this.#shown;
  }

  #drawNow() {
    cancelAnimationFrame(this.#drawing);
    clearTimeout(this.#drawing);
    this.#drawing = 0; // nothing more is drawn later
    this.#update();
  }

  get #length() {
    return this.#reasoning.length + this.text.length;
  }

  #update() {
    this.#thinking.hidden = !this.#reasoning;
    if (this.#thoughts.textContent !== this.#reasoning) this.#thoughts.textContent = this.#reasoning;
    this.#view.update(this.text);
  }

  // Say why there is no text.
  #absence(stopped) {
    if (this.#reasoning) return stopped ? "Stopped before the answer." : "The model reasoned, but wrote no answer.";
    return stopped ? "Stopped before the first token." : "The answer is empty.";
  }

  #sentences(stopped) {
    const { total, accepted } = this.#tokens;
    const tokens = this.#usage?.completion_tokens ?? total;
    const facts = [];
    const ended = stopped ? "You stopped the answer after" : this.#finish === "length" ? "The answer reached its limit of" : "The answer has";
    if (tokens) facts.push([`${ended} ${several(tokens, "token")}`, ...this.#speed(tokens), "."]);
    if (total) {
      const share = `${Math.round((100 * accepted) / total)}%`;
      facts.push(accepted ? [make("strong", {}, `${amount(accepted)} of ${amount(total)} tokens`), ` (${share}) were drafted and accepted.`] : ["No tokens were drafted."]);
    }
    if (this.#headers?.get("x-paceline-worker")) facts.push(this.#place());
    return facts;
  }

  #speed(tokens) {
    if (!this.#firstMs) return [];
    const more = tokens - 1;
    const ms = this.#tokenMs * more || this.#lastMs - this.#firstMs;
    const first = `; the first came after ${((this.#firstMs - this.#sentMs) / 1000).toFixed(2)} s`;
    if (more < LEAST_TOKENS || ms < (this.#tokenMs ? 0 : LEAST_MS)) return [first, ", and it is too short to measure the speed the rest came"];
    return [first, ", then ", make("strong", {}, `${amount(Math.round((1000 * more) / ms))} tokens/s`)];
  }

  #place() {
    const of = (name) => this.#headers.get(`x-paceline-${name}`);
    const cached = of("prefix") === "hit" ? " The system prompt came from its cache." : "";
    const why = LANE_REASONS[of("reason")] ?? "";
    return ["It ran on ", make("strong", {}, of("worker")), ` in the pool ${of("pool")}. ${why}${cached}`];
  }
}
