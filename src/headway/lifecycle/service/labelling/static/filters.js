// Which samples are shown: a queue and filters, in the controls of the bar and in the address of the page.

import { find, formatCount, make, plural } from "./dom.js";

const SELECTS = ["queue", "class", "split"];
const BOXES = ["differs", "copies"];

// What the address says; of a plain one, the newest queue that is not done, or else what has no label.
export function readWish(queues, facts) {
  const query = new URLSearchParams(location.search);
  const open = query.size ? undefined : queues.find((one) => one.marked < one.size);
  return {
    queue: query.get("queue") ?? open?.queue ?? "",
    class: query.get("class") ?? "",
    slice: query.get("slice") ?? "",
    split: query.get("split") ?? (!query.size && !open && facts.unlabelled ? "unlabelled" : ""),
    differs: query.get("differs") === "true",
    copies: query.get("copies") === "true",
    again: Number(query.get("again")) || 0,
  };
}

export function isSameWish(one, other) {
  return Object.keys(one).every((name) => (one[name] || "") === (other[name] || ""));
}

export function writeWish(wish) {
  const pairs = Object.entries(wish).filter(([, value]) => value);
  const query = new URLSearchParams(pairs.map(([name, value]) => [name, String(value)]));
  history.replaceState(null, "", `${location.pathname}${query.size ? `?${query}` : ""}`);
}

// change: called with what the person wants from now on. findNow: returns the time of the server. listSlices: returns a
// promise of the slices that the field offers.
export function buildFilters({ wish, queues, facts, classes }, change, findNow, listSlices) {
  let shown = wish;
  const alter = (name, value) => {
    shown = { ...shown, [name]: value };
    disableBoxes(shown);
    change(shown);
  };
  disableBoxes(wish);
  const options = {
    queue: [...queues.map((one) => [one.queue, nameQueue(one, queues)]), ["", "all samples"]],
    class: [["", "all"], ...classes.map((name) => [name, name])],
    split: [["", "all"], ...Object.keys(facts.splits).map((name) => [name, name])],
  };
  for (const name of SELECTS) {
    const select = find(name);
    select.replaceChildren(...options[name].map(([value, text]) => make("option", { value }, text)));
    select.value = wish[name];
    select.onchange = () => {
      select.blur();
      alter(name, select.value);
    };
  }
  buildSlice(find("slice"), wish.slice, (pattern) => alter("slice", pattern), listSlices);
  for (const name of [...BOXES, "again"]) {
    const box = find(name);
    box.checked = Boolean(wish[name]);
    box.onchange = () => {
      box.blur();
      // What was looked at before this moment: otherwise the same grid would come for ever.
      alter(name, name === "again" ? (box.checked ? findNow() : 0) : box.checked);
    };
  }
}

// Only a queue knows proposals and near copies.
function disableBoxes(wish) {
  for (const name of BOXES) find(name).disabled = !wish.queue;
}

function buildSlice(field, pattern, alter, listSlices) {
  field.value = pattern;
  field.onchange = () => {
    const text = field.value.trim();
    // A word alone: names that have it somewhere.
    field.value = text && !/[*?[]/.test(text) ? `*${text}*` : text;
    field.blur();
    alter(field.value);
  };
  // The server reads all names for it, so not before somebody wants to see them.
  field.onfocus = async () => {
    const slices = await listSlices();
    const options = slices.map((one) => make("option", { value: one.slice }, plural(one.samples, "image")));
    find("slices").replaceChildren(...options);
  };
}

// With its day, if another queue has the same name.
function nameQueue(queue, queues) {
  const isAlone = queues.filter((one) => one.name === queue.name).length === 1;
  const when = new Date(1000 * queue.created_s).toLocaleString("en", { month: "short", day: "numeric", hour: "numeric" });
  return `${queue.name}${isAlone ? "" : `, ${when}`} (${formatCount(queue.size - queue.marked)} left)`;
}
