// The classes below the grid: their keys, their colours, and the code that is being typed.

import { assignKeys, keepOrder, readOrder } from "./codes.js";
import { find, make } from "./dom.js";

// More classes have two letters each, and no colour: ten are as many as people tell apart.
const MOST_HUES = 10;

export class Palette {
  // pick: called with the name of a class that was clicked.
  constructor(dataset, pick) {
    this.dataset = dataset;
    this.pick = pick;
    this.classes = [];
    // All classes that were ever seen here, in the order of their keys.
    this.known = readOrder(dataset);
    this.added = [];
    this.keys = new Map();
    this.prefix = "";
  }

  // Takes the classes of the server, beside those that were added here. Returns true if there are others than before.
  set(classes, isFixed) {
    find("new-class").hidden = isFixed;
    const present = new Set([...classes, ...this.added]);
    this.known = [...new Set([...this.known, ...present])];
    const ordered = this.known.filter((name) => present.has(name));
    const isSame = ordered.length === this.classes.length && ordered.every((name, index) => name === this.classes[index]);
    if (isSame) return false;
    this.classes = ordered;
    this.keys = assignKeys(ordered);
    keepOrder(this.dataset, this.known);
    this.show();
    return true;
  }

  add(name) {
    this.added.push(name);
    return this.set(this.classes, false);
  }

  findHue(name) {
    const index = this.classes.indexOf(name);
    return this.classes.length <= MOST_HUES && index >= 0 ? index : null;
  }

  show() {
    find("classes").replaceChildren(
      ...this.classes.map((name) => {
        const code = this.keys.get(name);
        const chip = { type: "button", class: "class", "data-code": code, "data-hue": this.findHue(name) };
        const letters = code ? make("kbd", {}, code) : null;
        return make("button", { ...chip, click: () => this.pick(name) }, letters, make("span", {}, name));
      }),
    );
  }

  // Takes a letter of a code. Returns true if it begins or ends one; a whole code picks its class.
  type(letter) {
    const typed = this.prefix + letter;
    for (const [name, code] of this.keys) {
      if (code === typed) {
        this.begin("");
        this.pick(name);
        return true;
      }
    }
    const isStart = [...this.keys.values()].some((code) => code.startsWith(typed));
    this.begin(isStart ? typed : "");
    return isStart;
  }

  // Dims the classes whose codes do not begin so.
  begin(prefix) {
    if (prefix === this.prefix) return;
    this.prefix = prefix;
    for (const chip of find("classes").children) {
      chip.classList.toggle("off", prefix !== "" && !(chip.dataset.code ?? "").startsWith(prefix));
    }
  }
}
