// The API reference: Swagger UI with the document of this page. It asks for no key and sends no request.

"use strict";

const darkScheme = matchMedia("(prefers-color-scheme: dark)");
const followScheme = () => document.documentElement.classList.toggle("dark-mode", darkScheme.matches);
const nothing = () => () => null;

darkScheme.addEventListener("change", followScheme);
followScheme();
window.SwaggerUIBundle({
  spec: JSON.parse(document.getElementById("openapi").textContent),
  domNode: document.getElementById("reference"),
  defaultModelsExpandDepth: 0,
  displayRequestDuration: false,
  plugins: [() => ({ wrapComponents: { authorizeBtn: nothing, authorizeOperationBtn: nothing } })],
  supportedSubmitMethods: [],
  validatorUrl: null,
});
