// What may stand where in a policy, by its JSON Schema. Pure.

const ITEM = "[]";
const DEPTH_LIMIT = 8;
const BRACKETS = { "{": "}", "[": "]" };

export class PolicySchema {
  #root;

  constructor(document) {
    this.#root = document;
  }

  // Return what may be typed at the end of this text: `{ prefix, options: [{ text, insert, detail }] }`.
  suggest(before, whole) {
    const place = placeOf(before);
    if (!place) return { prefix: "", options: [] };
    const { path, key, prefix } = place;
    const fields = key === null ? this.#fields(path) : [];
    // What begins a list item may be a value, or the first field of a map.
    const target = key !== null ? [...path, key] : path.at(-1) === ITEM ? path : null;
    const offered = [...fields, ...(target ? [...this.#values(target), ...pools(target, whole)] : [])];
    const start = prefix.toLowerCase();
    return { prefix, options: offered.filter(({ text }) => text.toLowerCase().startsWith(start)) };
  }

  // Return every field: `{ path, type, detail }`, in the order of the document.
  fields() {
    const found = [];
    const visit = (node, path) => {
      if (path.length > DEPTH_LIMIT) return;
      for (const one of this.#alternatives(node)) {
        for (const [name, field] of Object.entries(one.properties ?? {})) {
          found.push({ path: [...path, name].join("."), type: this.#typeOf(field), detail: this.#detailOf(field) });
          visit(field, [...path, name]);
        }
        if (one.items) visit(one.items, [...path.slice(0, -1), `${path.at(-1)}${ITEM}`]);
        for (const field of Object.values(one.patternProperties ?? {})) visit(field, [...path, "NAME"]);
      }
    };
    visit(this.#root, []);
    return found;
  }

  #fields(path) {
    const fields = this.#at(path).flatMap((one) => Object.entries(one.properties ?? {}));
    return fields.map(([text, field]) => ({ text, insert: `${text}: `, detail: this.#detailOf(field) }));
  }

  #values(path) {
    const values = this.#at(path).flatMap((one) => one.enum ?? (one.type === "boolean" ? [true, false] : "const" in one ? [one.const] : []));
    return values.map((value) => ({ text: String(value), insert: String(value), detail: "" }));
  }

  // Return the schemas at a path: one for each alternative.
  #at(path) {
    let nodes = this.#alternatives(this.#root);
    for (const name of path) {
      const next = nodes.flatMap((one) => (name === ITEM ? [one.items] : [one.properties?.[name] ?? Object.values(one.patternProperties ?? {})[0]]));
      nodes = next.filter(Boolean).flatMap((one) => this.#alternatives(one));
    }
    return nodes;
  }

  #alternatives(node) {
    if (node.$ref) return this.#alternatives(this.#root.$defs[node.$ref.split("/").at(-1)]);
    return node.anyOf ? node.anyOf.flatMap((one) => this.#alternatives(one)) : [node];
  }

  #detailOf(field) {
    return field.description ?? (field.$ref ? this.#alternatives(field)[0].description : "") ?? "";
  }

  #typeOf(field) {
    const names = this.#alternatives(field).map((one) => {
      if (one.enum) return one.enum.join(" | ");
      if (one.type === "array") return `list of ${this.#typeOf(one.items)}`;
      return { object: "map", string: "text", integer: "whole number", boolean: "true | false" }[one.type] ?? one.type;
    });
    return [...new Set(names)].join(" or ");
  }
}

// The place of the end of a text: `{ path, key, prefix }`; `key` is null where a field or a list item begins.
function placeOf(before) {
  const lines = before.split("\n");
  const [, lead, rest] = /^(\s*(?:- +)*)(.*)$/s.exec(lines.pop());
  if (/(^|\s)#/.test(rest) || /["'\t]/.test(rest)) return null;
  const path = [];
  let limit = enter(lead, lead.length, path);
  for (const line of lines.reverse()) {
    if (limit <= 0 && path.at(-1) !== ITEM && lead.length === 0) break;
    const found = /^(\s*(?:- +)*)([^\s#:][^:#]*):(?:\s+(.*))?$/.exec(line);
    if (!found) continue;
    const [, begin, name, value] = found;
    if (begin.length < limit && !value?.replace(/#.*/, "").trim()) path.push(name.trim());
    else if (begin.length !== limit || !begin.includes("-")) continue;
    limit = enter(begin, Math.min(limit, begin.length), path);
    if (limit <= 0) break;
  }
  return flow(rest, path.reverse());
}

// Leave the list items that begin in this part of a line; return the column that an outer key is left of.
function enter(lead, limit, path) {
  for (let column = lead.lastIndexOf("-"); column >= 0; column = lead.lastIndexOf("-", column - 1)) {
    if (column >= limit) continue;
    path.push(ITEM);
    limit = column + 1; // a list may begin in the column of its key
    if (column === 0) break;
  }
  return limit;
}

// The rest of a line, which may open maps and lists in braces.
function flow(rest, path) {
  const open = [];
  let key = null;
  let token = "";
  for (const letter of rest) {
    if (BRACKETS[letter]) {
      open.push(...(key === null ? [] : [key]), ...(letter === "[" ? [ITEM] : []), letter);
      [key, token] = [null, ""];
    } else if (Object.values(BRACKETS).includes(letter)) {
      while (open.length && !BRACKETS[open.pop()]);
      while (open.length && !BRACKETS[open.at(-1)]) open.pop();
      [key, token] = [null, ""];
    } else if (letter === ",") [key, token] = [null, ""];
    else if (letter === ":" && key === null) [key, token] = [token.trim(), ""];
    else token += letter;
  }
  const inside = open.filter((part) => !BRACKETS[part]);
  const within = [...path, ...inside];
  const prefix = token.trimStart();
  return { path: within, key, prefix };
}

// The pools of this document, where a route names one.
function pools(path, whole) {
  if (!/^routes\/\[\]\/to(\/\[\])?$/.test(path.join("/"))) return [];
  const section = /^pools:[^\n]*\n((?:[ #][^\n]*\n?|\n)*)/m.exec(whole)?.[1] ?? "";
  const names = [...section.matchAll(/^ {2}([A-Za-z0-9][\w./:-]*):(?:\s|$)/gm)].map(([, name]) => name);
  return names.map((text) => ({ text, insert: text, detail: "a pool of this policy" }));
}
