// The policy routes, with documents as YAML, and the author of edits.

import { request, requestJson } from "./api.js";

const YAML = "application/yaml";
const AUTHOR = "paceline-author";

// Return the active version: { text, etag, number }.
export async function readPolicy() {
  const response = await request("GET", "/policy", { headers: { accept: YAML } });
  return {
    text: await response.text(),
    etag: response.headers.get("etag"),
    number: Number(response.headers.get("x-paceline-policy-version")),
  };
}

export async function readVersion(number) {
  const response = await request("GET", `/policy/history/${number}`, { headers: { accept: YAML } });
  return response.text();
}

export const readHistory = () => requestJson("GET", "/policy/history");

export const readSchema = () => requestJson("GET", "/policy/schema");

// Return the shipped policies: { name, title, text }.
export async function readExamples() {
  return (await requestJson("GET", "/policy/examples")).examples;
}

// Return the problems of a document as a list of { field, message, line }; empty if it is valid.
export async function validate(text, signal) {
  const response = await request("POST", "/policy/validate", { headers: { "content-type": YAML }, body: text, signal });
  return (await response.json()).problems;
}

export async function compare(text) {
  const response = await request("POST", "/policy/diff", { headers: { "content-type": YAML }, body: text });
  return response.json();
}

export async function applyPolicy(text, etag, note) {
  const headers = { "content-type": YAML, "if-match": etag, ...editHeaders(note) };
  return (await request("PUT", "/policy", { headers, body: text })).json();
}

export async function rollBack(number, etag, note) {
  const headers = { "content-type": "application/json", "if-match": etag, ...editHeaders(note) };
  return (await request("POST", "/policy/rollback", { headers, body: JSON.stringify({ version: number }) })).json();
}

export const author = () => sessionStorage.getItem(AUTHOR) ?? "";

export function storeAuthor(name) {
  sessionStorage.setItem(AUTHOR, name.trim());
}

// Header values are ASCII, names and notes may not be.
export const authorHeader = () => (author() ? { "x-paceline-author": encodeURIComponent(author()) } : {});

function editHeaders(note) {
  return { "x-paceline-note": encodeURIComponent(note.trim()), ...authorHeader() };
}
