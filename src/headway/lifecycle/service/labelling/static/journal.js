// Journal of labels: what was set lies in the browser until the server has answered. A reload, a crash of the browser
// or a killed server loses nothing, and nothing is stored twice: each grid has a key that the server carries out once.

import { Problem, ask, pause } from "./service.js";

export class Journal {
  // report: called with the number of grids that wait, and the problem of the first one, if there is any. tell: called
  // with each answer.
  constructor(dataset, report, tell) {
    this.dataset = dataset;
    this.prefix = `headway.outbox.${dataset}/`;
    this.report = report;
    this.tell = tell;
    this.problem = null;
    this.fallback = new Map();
    this.running = null;
  }

  list() {
    const names = Object.keys(localStorage).filter((name) => name.startsWith(this.prefix));
    return [...new Set([...names, ...this.fallback.keys()])].sort();
  }

  add(body) {
    // Sorted by time, whichever tab has written them.
    const name = `${this.prefix}${String(Date.now()).padStart(15, "0")}.${crypto.getRandomValues(new Uint32Array(1))[0]}`;
    const entry = JSON.stringify({ key: drawKey(), body });
    if (!store(name, entry)) this.fallback.set(name, entry);
    this.run();
  }

  drop(name) {
    localStorage.removeItem(name);
    this.fallback.delete(name);
  }

  // Sends what waits, the oldest first, until nothing is left or a grid is refused.
  run() {
    this.running ??= this.sendAll().finally(() => (this.running = null));
    return this.running;
  }

  // Waits until everything is sent, but no longer than this.
  settle(ms) {
    return this.running ? Promise.race([this.running, pause(ms)]) : Promise.resolve();
  }

  async sendAll() {
    let wait = 250;
    for (let names = this.list(); names.length; names = this.list()) {
      this.report(names.length, this.problem);
      const text = localStorage.getItem(names[0]) ?? this.fallback.get(names[0]);
      // Another tab has sent it meanwhile.
      if (!text) continue;
      const { key, body } = JSON.parse(text);
      try {
        const path = `/datasets/${encodeURIComponent(this.dataset)}/labels`;
        const answer = await ask("POST", path, JSON.stringify(body), { "Idempotency-Key": `"${key}"` });
        this.drop(names[0]);
        this.problem = null;
        wait = 250;
        this.tell(answer);
      } catch (error) {
        if (!(error instanceof Problem)) throw error;
        this.problem = error;
        this.report(names.length, error);
        if (!error.isPassing) return;
        await pause(Math.max(wait, error.retryMs));
        wait = Math.min(2 * wait, 4000);
      }
    }
    this.report(0, null);
  }
}

// False if the browser has no room: the page then says that a reload would lose it.
export function store(name, text) {
  try {
    localStorage.setItem(name, text);
    return true;
  } catch (error) {
    return false;
  }
}

// 32 hexadecimal digits. crypto.randomUUID is missing on addresses that browsers do not count as secure.
export function drawKey() {
  return [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}
