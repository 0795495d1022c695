// The client for the admin routes.

import { ApiClient } from "../shared/client.js";

export const admin = new ApiClient("/admin/v1", "paceline-admin-key");

export const request = (method, path, options) => admin.request(method, path, options);

export async function requestJson(method, path, body) {
  const options = body === undefined ? {} : { headers: { "content-type": "application/json" }, body: JSON.stringify(body) };
  const response = await request(method, path, options);
  return response.status === 204 ? null : response.json();
}
