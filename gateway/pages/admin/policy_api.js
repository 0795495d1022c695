// The routes of the policy, as the page uses them: the document as YAML, and who signs an edit.

import { ask, askJson } from "./api.js";

const YAML = "application/yaml";
const AUTHOR = "paceline-author";

// The version in force: { text, etag, number }.
export async function readPolicy() {
  const answer = await ask("GET", "/policy", { headers: { accept: YAML } });
  return {
    text: await answer.text(),
    etag: answer.headers.get("etag"),
    number: Number(answer.headers.get("x-paceline-policy-version")),
  };
}

export async function readVersion(number) {
  const answer = await ask("GET", `/policy/history/${number}`, { headers: { accept: YAML } });
  return answer.text();
}

export async function readHistory() {
  return (await askJson("GET", "/policy/history")).versions;
}

// Say what is wrong with a text: a list of { field, message, line }, empty where it is good.
export async function validate(text, signal) {
  const answer = await ask("POST", "/policy/validate", { headers: { "content-type": YAML }, body: text, signal });
  return (await answer.json()).problems;
}

export async function compare(text) {
  const answer = await ask("POST", "/policy/diff", { headers: { "content-type": YAML }, body: text });
  return answer.json();
}

export async function applyPolicy(text, etag, note) {
  const headers = { "content-type": YAML, "if-match": etag, ...signed(note) };
  return (await ask("PUT", "/policy", { headers, body: text })).json();
}

export async function rollBack(number, etag, note) {
  const headers = { "content-type": "application/json", "if-match": etag, ...signed(note) };
  return (await ask("POST", "/policy/rollback", { headers, body: JSON.stringify({ version: number }) })).json();
}

export const author = () => sessionStorage.getItem(AUTHOR) ?? "";

export function keepAuthor(name) {
  sessionStorage.setItem(AUTHOR, name.trim());
}

// Headers hold ASCII, people do not.
export const signature = () => (author() ? { "x-paceline-author": encodeURIComponent(author()) } : {});

function signed(note) {
  return { "x-paceline-note": encodeURIComponent(note.trim()), ...signature() };
}
