// The place of a tab in the browser's storage: a reload finds its grid again, and a new tab takes over one that is left.

import { drawKey, store } from "./journal.js";

const TAB = "headway.tab";
const CHANNEL = "headway.tabs";
const ANSWER_MS = 150;

export class TabMemory {
  constructor(dataset) {
    this.prefix = `headway.current.${dataset}/`;
    this.tab = sessionStorage.getItem(TAB) ?? "";
  }

  // Returns the grid that was shown and those after it. One without samples was asked for, and not answered yet.
  async restore() {
    if (!this.tab) {
      const left = Object.keys(localStorage).filter((name) => name.startsWith(this.prefix));
      const alive = left.length ? await askTabs() : new Set();
      const orphan = left.find((name) => !alive.has(name.slice(this.prefix.length)));
      this.tab = orphan ? orphan.slice(this.prefix.length) : drawKey();
      sessionStorage.setItem(TAB, this.tab);
    }
    this.channel = new BroadcastChannel(CHANNEL);
    this.channel.onmessage = ({ data }) => {
      if (data === "who") this.channel.postMessage(this.tab);
    };
    let saved = null;
    try {
      saved = JSON.parse(localStorage.getItem(this.prefix + this.tab) ?? "null");
    } catch (error) {
      return [];
    }
    return Array.isArray(saved) ? saved.filter((one) => one?.grid) : [];
  }

  // False if the browser has no room.
  save(grids) {
    return store(this.prefix + this.tab, JSON.stringify(grids));
  }
}

// The tabs that are open. One in the background answers as quickly as others.
function askTabs() {
  return new Promise((resolve) => {
    const alive = new Set();
    const channel = new BroadcastChannel(CHANNEL);
    channel.onmessage = ({ data }) => alive.add(data);
    channel.postMessage("who");
    setTimeout(() => {
      channel.close();
      resolve(alive);
    }, ANSWER_MS);
  });
}
