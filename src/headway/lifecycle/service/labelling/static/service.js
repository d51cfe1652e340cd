// Requests to the data service, and pictures. A token, if the server needs one, stays in this tab.

import { find } from "./dom.js";

const TOKEN = "headway.token";
const MOST_PICTURES = 400;
const pictures = new Map();
let asking = null;
let report = () => {};

export class Problem extends Error {
  constructor(status, detail, retryAfter) {
    super(detail.charAt(0).toUpperCase() + detail.slice(1));
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
      // While this one was under way, somebody may have typed another token.
      const isOld = token !== sessionStorage.getItem(TOKEN);
      if (!isOld) await askForToken(Boolean(token));
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

// Without a token, the next request asks for one.
export function forgetToken() {
  sessionStorage.removeItem(TOKEN);
}

// isWrong: there was one, and the server does not know it.
function askForToken(isWrong) {
  if (asking) return asking;
  asking = new Promise((resolve) => {
    const dialog = find("token-dialog");
    find("token-problem").hidden = !isWrong;
    dialog.showModal();
    find("token").value = "";
    dialog.addEventListener(
      "close",
      () => {
        // A header takes no other characters: the request would fail as if the server were away.
        sessionStorage.setItem(TOKEN, find("token").value.replace(/[^\x21-\x7e]/g, ""));
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

function findPath(sha256, side) {
  return side ? `/thumbs/${sha256}?s=${side}` : `/blobs/${sha256}`;
}

// The picture, if it is loaded and decoded already.
export function findPicture(sha256, side) {
  return pictures.get(findPath(sha256, side))?.image;
}

// Resolves to an image that is decoded. While it is kept, another one with its `src` shows at once.
export function loadPicture(sha256, side) {
  const path = findPath(sha256, side);
  let found = pictures.get(path);
  if (!found) {
    found = { promise: fetchPicture(path), image: null };
    found.promise.then((image) => (found.image = image), () => pictures.delete(path));
  }
  // The newest is the last one.
  pictures.delete(path);
  pictures.set(path, found);
  if (pictures.size > MOST_PICTURES) {
    const [oldest, picture] = pictures.entries().next().value;
    pictures.delete(oldest);
    picture.promise.then((image) => URL.revokeObjectURL(image.src), () => {});
  }
  return found.promise;
}

async function fetchPicture(path) {
  const image = new Image();
  image.draggable = false;
  image.decoding = "sync";
  // Without a token the browser can load it, which costs a third of what a script does.
  if (!sessionStorage.getItem(TOKEN)) {
    image.src = path;
    try {
      await image.decode();
      return image;
    } catch (error) {
      // Why it failed, only a script can see: the server may be away, or want a token.
    }
  }
  const reply = await persist(() => send("GET", path, { cache: "default" }));
  image.src = URL.createObjectURL(await reply.blob());
  await image.decode();
  return image;
}
