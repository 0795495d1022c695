// Markdown as DOM nodes, block by block while it grows. HTML in it stays text.
//
// `put(start, end)` returns the nodes of a part of the text; so the caller may mark tokens in it.

import { copyButton } from "../shared/copy.js";
import { make } from "../shared/elements.js";

// Longer paragraphs stay plain. Each pattern below stops at the next mark of its own kind, so that
// the time grows with the length of a text and not with its square.
const INLINE_LIMIT = 20_000;
const DEPTH_LIMIT = 6;
const FENCE = /^ {0,3}(`{3,}(?!`)|~{3,}(?!~))(?!.*`)[ \t]*([\w+#.-]*)/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+/;
const ITEM = /^([ \t]*)([-*+]|\d{1,9}[.)])[ \t]+/;
const QUOTE = /^ {0,3}> ?/;
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
const TABLE_RULE = /^\|?(?: *:?-+:? *\|)+(?: *:?-+:?)?$/;
const INLINE =
  /(?<!`)`(?!`)([^`]+)`(?!`)|(?<!`)``(?!`)((?:[^`]|`(?!`))+)``(?!`)|\*\*(?=\S)((?:[^\n*]|\*(?!\*))+)(?<=\S)\*\*|\*(?=[^\s*])([^\n*]*[^\s*])\*|(?<!\w)_(?=[^\s_])([^\n_]*[^\s_])_(?!\w)|\[([^[\]\n]+)\]\((https?:\/\/[^\s()]+)\)|https?:\/\/[^\s<>()"'`]*[^\s<>()"'`.,;:!?*_]|\\([\\`*_{}[\]()#+\-.!>|])/dg;

export class MarkdownView {
  #element;
  #put;
  #settled = 0;
  #open = [];

  constructor(element, put) {
    this.#element = element;
    this.#put = put;
  }

  // Show the text, which only grows: blocks before the last one stay as they are.
  update(text) {
    for (const node of this.#open) node.remove();
    const blocks = blocksOf(text, this.#settled);
    const nodes = blocks.map((block) => block.render(text, this.#put));
    this.#element.append(...nodes);
    this.#open = nodes.slice(-1);
    if (blocks.length) this.#settled = blocks.at(-1).start;
  }
}

function blocksOf(text, from) {
  const blocks = [];
  for (let at = from; at < text.length; ) {
    const line = lineAt(text, at);
    const block = line.text.trim() ? blockAt(text, line) : null;
    if (block) blocks.push(block);
    at = block ? block.end : line.next;
  }
  return blocks;
}

function lineAt(text, start) {
  const found = text.indexOf("\n", start);
  const end = found < 0 ? text.length : found;
  return { start, end, next: Math.min(text.length, end + 1), text: text.slice(start, end) };
}

// The lines from `line` on, as long as `belongs` holds.
function linesWhile(text, line, belongs) {
  const lines = [line];
  for (let next = line.next; next < text.length; next = lines.at(-1).next) {
    const following = lineAt(text, next);
    if (!belongs(following, lines.at(-1))) break;
    lines.push(following);
  }
  return lines;
}

const startsBlock = ({ text }) => [FENCE, HEADING, ITEM, QUOTE, RULE].some((pattern) => pattern.test(text));

function blockAt(text, line) {
  const fence = FENCE.exec(line.text);
  if (fence) return code(text, line, fence);
  if (RULE.test(line.text)) return { start: line.start, end: line.next, render: () => make("hr") };
  const heading = HEADING.exec(line.text);
  if (heading) {
    const render = (whole, put) => make(`h${Math.min(6, 2 + heading[1].length)}`, {}, inline(whole, line.start + heading[0].length, line.end, put));
    return { start: line.start, end: line.next, render };
  }
  if (ITEM.test(line.text)) return list(text, line);
  if (QUOTE.test(line.text)) return quote(text, line);
  if (line.text.includes("|") && TABLE_RULE.test(lineAt(text, line.next).text.trim())) return table(text, line);
  const lines = linesWhile(text, line, (next) => next.text.trim() && !startsBlock(next));
  const last = lines.at(-1);
  return { start: line.start, end: last.next, render: (whole, put) => make("p", {}, inline(whole, line.start, last.end, put)) };
}

function code(text, line, [, fence, language]) {
  const closes = (one) => new RegExp(`^ {0,3}\\${fence[0]}{${fence.length},}[ \\t]*$`).test(one.text);
  let body = line.next;
  let end = text.length;
  let next = text.length;
  for (let at = body; at < text.length; ) {
    const one = lineAt(text, at);
    if (closes(one)) {
      end = Math.max(body, one.start - 1);
      next = one.next;
      break;
    }
    at = one.next;
  }
  body = Math.min(body, end);
  const render = (whole, put) =>
    make(
      "div",
      { class: "snippet" },
      make("pre", { tabindex: "0", role: "region", "aria-label": language ? `Code: ${language}` : "Code" }, make("code", {}, put(body, end))),
      copyButton(whole.slice(body, end), { "aria-label": "Copy this code" }),
    );
  return { start: line.start, end: next, render };
}

function list(text, line) {
  const belongs = (next, last) => ITEM.test(next.text) || (next.text.trim() ? /^[ \t]+/.test(next.text) || (last.text.trim() && !startsBlock(next)) : ITEM.test(lineAt(text, next.next).text));
  const lines = linesWhile(text, line, belongs);
  const render = (whole, put) => {
    const stack = [];
    let item = null;
    for (const one of lines) {
      const found = ITEM.exec(one.text);
      if (!found) {
        if (one.text.trim()) item.append("\n", ...inline(whole, one.start + one.text.search(/\S/), one.end, put));
        continue;
      }
      const indent = found[1].replaceAll("\t", "    ").length;
      while (stack.length > 1 && indent < stack.at(-1).indent) stack.pop();
      if (!stack.length || (indent >= stack.at(-1).indent + 2 && stack.length < DEPTH_LIMIT)) {
        const ordered = /\d/.test(found[2]);
        const element = make(ordered ? "ol" : "ul", { start: ordered ? parseInt(found[2], 10) : undefined });
        item?.append(element);
        stack.push({ indent, element });
      }
      item = make("li", {}, inline(whole, one.start + found[0].length, one.end, put));
      stack.at(-1).element.append(item);
    }
    return stack[0].element;
  };
  return { start: line.start, end: lines.at(-1).next, render };
}

function quote(text, line) {
  const lines = linesWhile(text, line, (next) => QUOTE.test(next.text));
  const render = (whole, put) =>
    make("blockquote", {}, lines.map((one) => make("p", {}, inline(whole, one.start + QUOTE.exec(one.text)[0].length, one.end, put))));
  return { start: line.start, end: lines.at(-1).next, render };
}

function table(text, line) {
  const rule = lineAt(text, line.next);
  const rows = linesWhile(text, rule, (next) => next.text.includes("|"));
  const render = (whole, put) => {
    const row = (one, name, settings) => make("tr", {}, cells(one).map(([start, end]) => make(name, settings, inline(whole, start, end, put))));
    const head = make("thead", {}, row(line, "th", { scope: "col" }));
    const body = make("tbody", {}, rows.slice(1).map((one) => row(one, "td", {})));
    return make("div", { class: "scrolls", tabindex: "0", role: "region", "aria-label": "Table" }, make("table", {}, head, body));
  };
  return { start: line.start, end: rows.at(-1).next, render };
}

// The ranges of the cells of a row.
function cells({ start, text }) {
  const found = [];
  let from = text.search(/[^\s|]|\|/);
  if (text[from] === "|") from += 1;
  for (const bar of [...[...text.matchAll(/(?<!\\)\|/g)].map(({ index }) => index), text.length]) {
    if (bar < from) continue;
    const part = text.slice(from, bar);
    if (bar < text.length || part.trim()) found.push([start + from + (part.length - part.trimStart().length), start + from + part.trimEnd().length]);
    from = bar + 1;
  }
  return found.map(([one, other]) => [one, Math.max(one, other)]);
}

function inline(text, start, end, put, depth = 0) {
  if (end - start > INLINE_LIMIT || depth > DEPTH_LIMIT) return put(start, end);
  const nodes = [];
  let at = start;
  for (const match of text.slice(start, end).matchAll(INLINE)) {
    const range = (group) => [start + match.indices[group][0], start + match.indices[group][1]];
    const inside = (group) => inline(text, ...range(group), put, depth + 1);
    nodes.push(...put(at, start + match.index));
    const [whole, code, padded, bold, star, underscore, , target, escaped] = match;
    if (code !== undefined || padded !== undefined) nodes.push(make("code", {}, put(...range(code === undefined ? 2 : 1))));
    else if (bold !== undefined) nodes.push(make("strong", {}, inside(3)));
    else if (star !== undefined) nodes.push(make("em", {}, inside(4)));
    else if (underscore !== undefined) nodes.push(make("em", {}, inside(5)));
    else if (target !== undefined) nodes.push(link(target, inside(6)));
    else if (escaped !== undefined) nodes.push(...put(...range(8)));
    else nodes.push(link(whole, put(...range(0))));
    at = start + match.index + whole.length;
  }
  nodes.push(...put(at, end));
  return nodes;
}

const link = (href, content) => make("a", { href, rel: "noopener noreferrer nofollow", target: "_blank" }, content);
