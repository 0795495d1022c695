// The pictures of the next question: chosen, pasted or dropped.

import { button, byId, make, notice } from "../shared/elements.js";

const COUNT_LIMIT = 8;
const BYTES_LIMIT = 16 * 1024 * 1024; // as base64 within the gateway's limit of a body
const KINDS = ["image/png", "image/jpeg", "image/webp", "image/gif"];

const chosen = [];

// Add files; those over a limit are left out with a message.
export function attach(files) {
  for (const file of files) {
    const bytes = chosen.reduce((sum, { size }) => sum + size, file.size);
    if (!KINDS.includes(file.type)) notice("Only PNG, JPEG, WebP and GIF pictures can be sent.");
    else if (chosen.length >= COUNT_LIMIT) notice(`A question can have ${COUNT_LIMIT} pictures.`);
    else if (bytes > BYTES_LIMIT) notice("The pictures of a question can have 16 MB in total.");
    // It takes its place at once, before it is read: a second paste meanwhile counts it.
    else chosen.push({ size: file.size, name: file.name || "picture", url: read(file) });
  }
  show();
}

// Return the pictures as URLs with their content, and forget them.
export async function takePictures() {
  const taken = chosen.splice(0);
  show();
  return Promise.all(taken.map(({ url }) => url));
}

export const hasPictures = () => chosen.length > 0;

function read(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

function show() {
  byId("pictures").replaceChildren(
    ...chosen.map((picture) => {
      const image = make("img", { alt: picture.name });
      picture.url.then(
        (url) => (image.src = url),
        () => remove(picture, "The picture cannot be read."),
      );
      return make("span", { class: "picture" }, image, button("×", () => remove(picture), { "aria-label": `Remove ${picture.name}` }));
    }),
  );
}

function remove(picture, why = "") {
  const index = chosen.indexOf(picture);
  if (index < 0) return;
  chosen.splice(index, 1);
  if (why) notice(why);
  show();
}

byId("files").addEventListener("change", (event) => {
  attach(event.target.files);
  event.target.value = "";
});
byId("question").addEventListener("paste", (event) => {
  if (!event.clipboardData.files.length) return;
  event.preventDefault();
  attach(event.clipboardData.files);
});
addEventListener("dragover", (event) => event.preventDefault());
addEventListener("drop", (event) => {
  event.preventDefault();
  attach(event.dataTransfer.files);
});
