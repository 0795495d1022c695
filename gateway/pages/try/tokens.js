// The tokens of an answer by their source, as ranges of its text.

import { make } from "../shared/elements.js";

export class TokenSources {
  #ends = [];
  #drafted = [];
  #length = 0;
  total = 0;
  accepted = 0;

  // Add tokens in the form of `token_sources`.
  add(tokens) {
    for (const { text, source } of tokens) {
      const drafted = source !== "model";
      this.total += 1;
      this.accepted += drafted;
      if (!text) continue;
      this.#length += text.length;
      const last = this.#ends.length - 1;
      // One range for neighbours of the same source.
      if (last >= 0 && this.#drafted[last] === drafted) this.#ends[last] = this.#length;
      else {
        this.#ends.push(this.#length);
        this.#drafted.push(drafted);
      }
    }
  }

  // Return a part of the text as nodes, in which drafted tokens are marked. The first tokens, of `before` characters, are
  // those of another text.
  nodes(text, start, end, before = 0) {
    const nodes = [];
    let at = start;
    for (let index = this.#rangeAt(start + before); at < end; index += 1) {
      const until = Math.min(end, (this.#ends[index] ?? Infinity) - before);
      const part = text.slice(at, until);
      nodes.push(this.#drafted[index] ? make("span", { class: "drafted" }, part) : part);
      at = until;
    }
    return nodes;
  }

  #rangeAt(position) {
    let low = 0;
    let high = this.#ends.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.#ends[middle] > position) high = middle;
      else low = middle + 1;
    }
    return low;
  }
}
