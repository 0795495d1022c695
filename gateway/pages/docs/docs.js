// The API reference: Swagger UI with the document of this page. It asks for no key and sends no request.

"use strict";

const darkScheme = matchMedia("(prefers-color-scheme: dark)");
const followScheme = () => document.documentElement.classList.toggle("dark-mode", darkScheme.matches);
const nothing = () => () => null;

// Swagger UI gives its lists of values no name, and all tables of responses one role.
function name() {
  document.querySelectorAll("select:not([aria-label])").forEach((list) => list.setAttribute("aria-label", "Allowed values"));
  document.querySelectorAll(".responses-table[role]").forEach((table) => table.removeAttribute("role"));
}

new MutationObserver(name).observe(document.getElementById("reference"), { childList: true, subtree: true });
darkScheme.addEventListener("change", followScheme);
followScheme();
window.SwaggerUIBundle({
  spec: JSON.parse(document.getElementById("openapi").textContent),
  domNode: document.getElementById("reference"),
  defaultModelsExpandDepth: 0,
  displayRequestDuration: false,
  plugins: [() => ({ wrapComponents: { authorizeBtn: nothing, authorizeOperationBtn: nothing } })],
  supportedSubmitMethods: [],
  syntaxHighlight: false,
  validatorUrl: null,
});
