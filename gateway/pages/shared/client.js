// An HTTP client for the gateway. The key stays in this tab's session storage and is sent only in a header.

const ADMIN_KEY = "paceline-admin-key";

export class ApiError extends Error {
  constructor(status, code, message) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

// A client for the routes under `root`; `name` is the key's name in the session storage.
export class ApiClient {
  constructor(root, name) {
    this.root = root;
    this.name = name;
    // Called on 401; the argument is true if a key was sent.
    this.onSignedOut = () => {};
  }

  // The admin key of this tab opens the routes of clients too.
  get #key() {
    return sessionStorage.getItem(this.name) ?? sessionStorage.getItem(ADMIN_KEY);
  }

  get hasKey() {
    return this.#key !== null;
  }

  storeKey(key) {
    sessionStorage.setItem(this.name, key);
  }

  // Remove the key that is sent.
  removeKey() {
    sessionStorage.removeItem(sessionStorage.getItem(this.name) === null ? ADMIN_KEY : this.name);
  }

  // Send a request and return the response; throw an ApiError if it fails.
  async request(method, path, { headers = {}, body, signal } = {}) {
    const key = this.#key;
    const allHeaders = { ...headers };
    if (key !== null) allHeaders.authorization = `Bearer ${key}`;
    let response;
    try {
      response = await fetch(`${this.root}${path}`, {
        method,
        headers: allHeaders,
        body,
        signal,
        cache: "no-store",
        credentials: "omit",
        referrerPolicy: "no-referrer",
        redirect: "error",
      });
    } catch (failure) {
      if (failure.name === "AbortError") throw failure;
      throw new ApiError(0, "no_answer", "The gateway does not respond. Is it running?");
    }
    if (response.ok) return response;
    const error = await errorOf(response);
    if (error.status === 401) this.onSignedOut(key !== null);
    throw error;
  }
}

async function errorOf(response) {
  try {
    const { error } = await response.json();
    return new ApiError(response.status, error.code, error.message);
  } catch {
    return new ApiError(response.status, "unknown", `The request failed with status ${response.status}.`);
  }
}
