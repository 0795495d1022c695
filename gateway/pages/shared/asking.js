// Asking the gateway. A key stays in this tab's session storage and travels in a header alone.

export class Refusal extends Error {
  constructor(status, code, message) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

// One part of the gateway, at `root`, and the key for it, which is kept under `name`.
export class Asker {
  constructor(root, name) {
    this.root = root;
    this.name = name;
    // Who is told that the gateway wants a key, or does not take the one it got.
    this.onSignedOut = () => {};
  }

  get hasKey() {
    return sessionStorage.getItem(this.name) !== null;
  }

  keepKey(key) {
    sessionStorage.setItem(this.name, key);
  }

  forgetKey() {
    sessionStorage.removeItem(this.name);
  }

  // Ask a route and return the answer; throw a Refusal that says why not.
  async ask(method, path, { headers = {}, body, signal } = {}) {
    const key = sessionStorage.getItem(this.name);
    const sent = { ...headers };
    if (key !== null) sent.authorization = `Bearer ${key}`;
    let answer;
    try {
      answer = await fetch(`${this.root}${path}`, {
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
    if (refusal.status === 401) this.onSignedOut(key !== null);
    throw refusal;
  }
}

// What no header can carry is no key.
export const canBeKey = (text) => /^[\x21-\x7e]+$/.test(text);

async function refusalOf(answer) {
  try {
    const { error } = await answer.json();
    return new Refusal(answer.status, error.code, error.message);
  } catch {
    return new Refusal(answer.status, "unknown", `The gateway refused (status ${answer.status}).`);
  }
}
