// Keys of classes: a digit each for up to ten, two letters for more. The letters of commands begin no code.

import { store } from "./journal.js";

const COMMANDS = "uxz";
const LETTERS = "abcdefghijklmnopqrstuvwxyz";

export function assignKeys(classes) {
  if (classes.length <= 10) return new Map(classes.map((name, index) => [name, String((index + 1) % 10)]));
  const keys = new Map();
  const taken = new Set();
  for (const name of classes) {
    for (const code of generateCodes(name)) {
      if (taken.has(code)) continue;
      taken.add(code);
      keys.set(name, code);
      break;
    }
  }
  return keys;
}

// Codes for a name, the best first: its first letter and another one of it.
function* generateCodes(name) {
  const own = [...name.normalize("NFD").toLowerCase()].filter((letter) => LETTERS.includes(letter));
  const firsts = own.filter((letter) => !COMMANDS.includes(letter));
  for (const [index, first] of firsts.entries()) {
    for (const second of own.slice(own.indexOf(first) + 1)) yield first + second;
    if (index === 0) for (const second of LETTERS) yield first + second;
  }
  for (const first of LETTERS) {
    if (!COMMANDS.includes(first)) for (const second of LETTERS) yield first + second;
  }
}

// All classes that this browser has seen in a data set, in the order of their keys, so that keys stay where fingers
// expect them.
export function readOrder(dataset) {
  try {
    return JSON.parse(localStorage.getItem(findPlace(dataset)) ?? "[]");
  } catch (error) {
    return [];
  }
}

export function keepOrder(dataset, classes) {
  store(findPlace(dataset), JSON.stringify(classes));
}

function findPlace(dataset) {
  return `headway.classes.${dataset}`;
}
