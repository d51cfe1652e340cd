// Requests to the data service, and pictures. A token, if the server needs one, stays in this tab.

import { find } from "./dom.js";

const TOKEN = "headway.token";
const MOST_PICTURES = 400;
const pictures = new Map();
let asking = null;
let report = () => {};

export class Problem extends Error {
  constructor(status, detail, retryAfter) {
    super(detail);
    this.status = status;
    // Nothing was refused: the same request may be sent again later.
    this.isPassing = status === 0 || status === 429 || status >= 500 || (status === 409 && retryAfter !== null);
    this.retryMs = 1000 * Number(retryAfter || 0);
  }
}

// change: called with true if the server cannot be reached, and with false after each answer.
export function watchServer(change) {
  report = change;
}

export async function ask(method, path, body = undefined, headers = {}) {
  const reply = await send(method, path, { body, headers, cache: "no-store" });
  if (reply.status === 204) return null;
  try {
    return await reply.json();
  } catch (error) {
    throw new Problem(0, "The answer was cut off.", null);
  }
}

async function send(method, path, { body, headers, cache }) {
  for (;;) {
    const sent = { ...headers };
    const token = sessionStorage.getItem(TOKEN);
    if (token) sent.Authorization = `Bearer ${token}`;
    if (body !== undefined) sent["Content-Type"] = "application/json";
    let reply;
    try {
      reply = await fetch(path, { method, headers: sent, body, cache, credentials: "omit" });
    } catch (error) {
      report(true);
      throw new Problem(0, "The server cannot be reached.", null);
    }
    report(false);
    if (reply.ok) return reply;
    if (reply.status === 401) {
      await askForToken();
      continue;
    }
    let detail = `The server answered ${reply.status}.`;
    try {
      detail = (await reply.json()).detail || detail;
    } catch (error) {
      // An answer without a reason: the status has to do.
    }
    throw new Problem(reply.status, detail, reply.headers.get("retry-after"));
  }
}

function askForToken() {
  if (asking) return asking;
  asking = new Promise((resolve) => {
    const dialog = find("token-dialog");
    dialog.showModal();
    find("token").value = "";
    dialog.addEventListener(
      "close",
      () => {
        sessionStorage.setItem(TOKEN, find("token").value.trim());
        find("token").value = "";
        asking = null;
        resolve();
      },
      { once: true },
    );
  });
  return asking;
}

export function pause(ms) {
  return new Promise((resolve) => setTimeout(resolve, ms));
}

// Asks until there is an answer, or a refusal that will not pass.
export async function persist(work) {
  for (let wait = 250; ; wait = Math.min(2 * wait, 4000)) {
    try {
      return await work();
    } catch (error) {
      if (!(error instanceof Problem) || !error.isPassing) throw error;
      await pause(Math.max(wait, error.retryMs));
    }
  }
}

// Resolves to an image that is decoded. While it is kept, another one with its `src` shows at once.
export function loadPicture(sha256, side) {
  const path = side ? `/thumbs/${sha256}?s=${side}` : `/blobs/${sha256}`;
  let found = pictures.get(path);
  if (!found) {
    found = persist(() => send("GET", path, { cache: "default" })).then(async (reply) => {
      const image = new Image();
      image.src = URL.createObjectURL(await reply.blob());
      await image.decode();
      return image;
    });
    found.catch(() => pictures.delete(path));
  }
  // The newest is the last one.
  pictures.delete(path);
  pictures.set(path, found);
  if (pictures.size > MOST_PICTURES) {
    const [oldest, picture] = pictures.entries().next().value;
    pictures.delete(oldest);
    picture.then((image) => URL.revokeObjectURL(image.src), () => {});
  }
  return found;
}
