// Syntax colours for one line of YAML, by a regular expression instead of a parser.

import { make } from "../shared/elements.js";

const PARTS =
  /(?<comment>(?:^|(?<=\s))#.*$)|(?<key>(?<=^[\s-]*|[{,]\s*)(?:"[^"]*"|'[^']*'|[\w.*/@-]+)(?=:(?:\s|$)))|(?<text>"[^"]*"|'[^']*')|(?<value>(?<=[\s[,:{])(?:-?\d[\d._e+-]*|true|false|null)(?=[\s,\]}]|$))/g;

// Return the pieces of a line, as text and spans.
export function coloured(line) {
  const pieces = [];
  let done = 0;
  for (const match of line.matchAll(PARTS)) {
    const kind = Object.keys(match.groups).find((name) => match.groups[name] !== undefined);
    if (match.index > done) pieces.push(line.slice(done, match.index));
    pieces.push(make("span", { class: kind }, match[0]));
    done = match.index + match[0].length;
  }
  if (done < line.length) pieces.push(line.slice(done));
  return pieces;
}
