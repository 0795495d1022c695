// Asking the admin plane.

import { Asker } from "./asking.js";

export const admin = new Asker("/admin/v1", "paceline-admin-key");

export const ask = (method, path, request) => admin.ask(method, path, request);

export async function askJson(method, path, body) {
  const request = body === undefined ? {} : { headers: { "content-type": "application/json" }, body: JSON.stringify(body) };
  const answer = await ask(method, path, request);
  return answer.status === 204 ? null : answer.json();
}
