// The page: navigation between sections, sign-in and sign-out.

import { admin, request } from "./api.js";
import { byId } from "../shared/elements.js";
import { connectSignIn, isValidKey } from "../shared/sign_in.js";
import { keys } from "./keys.js";
import { policy } from "./policy.js";
import { workers } from "./workers.js";

const SECTIONS = { policy, keys, workers };
let shown = null;

// `paceline up` prints a link with the key in its fragment, which browsers do not send. Take the key
// out of the address, and return whether there was one.
function takeKeyFromAddress() {
  const key = new URLSearchParams(location.hash.slice(1)).get("admin-key");
  if (key === null) return false;
  history.replaceState(null, "", location.pathname);
  if (isValidKey(key)) admin.storeKey(key);
  return true;
}

function selected() {
  const name = location.hash.slice(1);
  return name in SECTIONS ? name : (shown ?? "policy");
}

function show(name) {
  for (const section of ["sign-in", ...Object.keys(SECTIONS)]) {
    byId(`view-${section}`).hidden = section !== name;
  }
  const inside = name !== "sign-in";
  byId("sign-out").hidden = !inside || !admin.hasKey;
  for (const link of byId("navigation").children) {
    if (link.pathname === location.pathname && link.hash === `#${name}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
}

async function go() {
  const name = selected();
  if (name === shown) return;
  if (shown) SECTIONS[shown].leave();
  shown = name;
  show(name);
  document.title = `${name[0].toUpperCase()}${name.slice(1)} · Paceline admin`;
  await SECTIONS[name].enter();
}

function askForKey(why) {
  if (shown) SECTIONS[shown].leave();
  shown = null;
  admin.removeKey();
  show("sign-in");
  byId("sign-in-refusal").textContent = why;
  byId("key").value = "";
  byId("key").focus();
}

async function enter() {
  try {
    await request("GET", "/policy");
  } catch (refusal) {
    if (refusal.status === 401) return;
    show("sign-in");
    byId("sign-in-refusal").textContent = refusal.message;
    return;
  }
  await go();
}

connectSignIn(admin, {
  enter,
  leave: () => askForKey(""),
  refuse: askForKey,
  refused:
    "This is not the admin key of this gateway. The gateway's machine has it in PACELINE_ADMIN_KEY, or else in ~/.paceline/admin-key.",
});
window.addEventListener("hashchange", () => {
  if (takeKeyFromAddress()) enter();
  else if (shown) go();
});
takeKeyFromAddress();
await enter();
