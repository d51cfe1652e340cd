// What the page says about itself: whether all labels are on the server, and what a person has to decide.

import { find, make, plural } from "./dom.js";

// It stays when the next grid is shown, until that is sent.
let isLasting = false;

// name and act: of a button beside the message.
export function notify(message, name = "", act = null) {
  isLasting = false;
  find("notice").hidden = !message;
  find("notice").replaceChildren(make("span", {}, message));
  if (act) find("notice").append(make("button", { type: "button", click: act }, name));
}

// Says which labels of a grid the server has left out, so that nobody looks for them.
export function tellLeftOut({ kept = 0, missing = [] }) {
  const parts = [];
  if (kept) parts.push(`${plural(kept, "image")} got another label from somebody else: not replaced, and shown again.`);
  if (missing.length) parts.push(`${plural(missing.length, "image")} left the data set meanwhile.`);
  if (!parts.length) return;
  notify(parts.join(" "));
  isLasting = true;
}

// Says that the page waits, unless the person has to read something first.
export function tellWaiting(message) {
  if (!isLasting) notify(message);
}

// Takes back what was said about the grid before.
export function clearNotice() {
  if (!isLasting) notify("");
}

// Of a request that is repeated until there is an answer.
export function showAway(isAway) {
  const saved = find("saved");
  saved.classList.toggle("away", isAway);
  if (isAway && saved.textContent === "saved") saved.textContent = "the server is away";
  else if (!isAway && saved.textContent === "the server is away") saved.textContent = "saved";
}

// waiting: grids that are not on the server yet. problem: why the first of them is not.
export function showSaved(journal, waiting, problem) {
  const saved = find("saved");
  const what = waiting === 1 ? "1 grid" : `${waiting} grids`;
  saved.className = problem ? "away" : waiting ? "busy" : "done";
  saved.title = problem ? problem.message : "";
  saved.textContent = waiting ? `${what} waiting` : "saved";
  if (problem && problem.isPassing) saved.textContent = `${what} kept here: the server is away`;
  else if (problem) showRefusal(journal, problem);
}

// A person decides about a grid that was refused; until then it stays in the browser.
function showRefusal(journal, problem) {
  const [name] = journal.list();
  const go = (isDropped) => {
    if (isDropped) journal.drop(name);
    find("refusal").hidden = true;
    journal.run();
  };
  find("refusal").hidden = false;
  find("refusal").replaceChildren(
    make("span", {}, `The server refused a grid: ${problem.message}`),
    make("button", { type: "button", click: () => go(false) }, "Send it again"),
    make("button", { type: "button", click: () => go(true) }, "Drop its labels"),
  );
}
