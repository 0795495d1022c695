// Asking the gateway. The key stays in this tab's session storage and travels in a header alone.

const KEY = "paceline-admin-key";

export class Refusal extends Error {
  constructor(status, code, message) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

let signedOut = () => {};

// Who is told that the gateway wants a key, or does not take the one it got.
export function onSignedOut(tell) {
  signedOut = tell;
}

export const hasKey = () => sessionStorage.getItem(KEY) !== null;

export function keepKey(key) {
  sessionStorage.setItem(KEY, key);
}

export function forgetKey() {
  sessionStorage.removeItem(KEY);
}

// Ask a route of the admin plane and return the answer; throw a Refusal that says why not.
export async function ask(method, path, { headers = {}, body, signal } = {}) {
  const key = sessionStorage.getItem(KEY);
  const sent = { ...headers };
  if (key !== null) sent.authorization = `Bearer ${key}`;
  let answer;
  try {
    answer = await fetch(`/admin/v1${path}`, {
      method,
      headers: sent,
      body,
      signal,
      cache: "no-store",
      credentials: "omit",
      referrerPolicy: "no-referrer",
      redirect: "error",
    });
  } catch (failure) {
    if (failure.name === "AbortError") throw failure;
    throw new Refusal(0, "no_answer", "The gateway does not answer. Is it running?");
  }
  if (answer.ok) return answer;
  const refusal = await refusalOf(answer);
  if (refusal.status === 401) signedOut(key !== null);
  throw refusal;
}

export async function askJson(method, path, body) {
  const request = body === undefined ? {} : { headers: { "content-type": "application/json" }, body: JSON.stringify(body) };
  const answer = await ask(method, path, request);
  return answer.status === 204 ? null : answer.json();
}

async function refusalOf(answer) {
  try {
    const { error } = await answer.json();
    return new Refusal(answer.status, error.code, error.message);
  } catch {
    return new Refusal(answer.status, "unknown", `The gateway refused (status ${answer.status}).`);
  }
}
