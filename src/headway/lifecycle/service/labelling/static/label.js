// The label page: hands out grids, listens to keys, and keeps everything in the browser until the server has it.

import { find, formatCount, make, plural } from "./dom.js";
import { buildFilters, isSameWish, readWish, writeWish } from "./filters.js";
import { GridView, buildGrid, decide, describeSample, listLabels, makeEntry, prefetch, setMark, undoMark } from "./grid.js";
import { Journal, drawKey } from "./journal.js";
import { LoopView } from "./loop.js";
import { clearNotice, notify, showAway, showSaved, tellLeftOut, tellWaiting } from "./notices.js";
import { Palette } from "./palette.js";
import { Problem, ask, forgetToken, persist, watchServer } from "./service.js";
import { TabMemory } from "./tabs.js";

const GRID = 24;
const EMPTY = "Nothing is left here. Choose other samples above, or look again at what is done.";
// A lease lasts ten minutes.
const RENEW_MS = 240_000;
const LOOP_MS = 60_000;
// The server reads all versions and labels for it, which is too much after every grid.
const LOOP_LEAST_MS = 10_000;
const MOST_PREVIOUS = 20;
// Longest wait for labels to arrive before other samples are shown; with a server that is away they arrive later.
const SETTLE_MS = 3000;
// Wait after which the page says that it waits.
const PATIENCE_MS = 1000;
const WAITING = "The next images are on their way. What you set is kept, also if you close this page.";

class LabelPage {
  constructor(dataset) {
    this.dataset = dataset;
    this.path = `/datasets/${encodeURIComponent(dataset)}`;
    this.view = new GridView((index) => this.view.move(index));
    this.journal = new Journal(dataset, (waiting, problem) => showSaved(this.journal, waiting, problem), tellLeftOut);
    this.memory = new TabMemory(dataset);
    watchServer((isAway) => showAway(isAway));
    this.loop = new LoopView({
      openQueue: (queue) => this.openQueue(queue),
      person: () => this.person(),
      send: (body) => this.settle(body),
    });
    this.current = null;
    // The grids that come next, each a promise, so that Enter waits for it, and the grid once it is there.
    this.ahead = [];
    // The one of them that is waited for.
    this.taken = null;
    this.previous = [];
    this.palette = new Palette(dataset, (name) => this.label(name));
    // The grid whose images without a label are left out by another Enter.
    this.skipping = "";
    this.serverNow = 0;
    this.sinceMs = performance.now();
    this.loopShownMs = 0;
    this.isAdvancing = false;
  }

  async open() {
    document.title = `${this.dataset} - Headway`;
    find("title").textContent = this.dataset;
    find("by").value = localStorage.getItem("headway.by") ?? "";
    const [facts, listed] = await persist(() => Promise.all([ask("GET", this.path), ask("GET", `${this.path}/queues`)]));
    this.facts = facts;
    this.queues = listed.queues;
    this.setClasses(Object.keys(facts.classes), true);
    const saved = await this.memory.restore();
    this.wish = saved.length ? saved[0].wish : readWish(this.queues, facts);
    this.ahead = saved.map((state) => (state.samples.length ? makeEntry(state) : this.begin(state.grid, state.wish, false)));
    this.leave();
    this.showFilters();
    this.listen();
    this.journal.run();
    await this.advance();
    const asked = readWish(this.queues, facts);
    // The address asks for other samples than this tab had: what was set in them is sent, as if a filter were changed.
    if (location.search && !isSameWish(asked, this.wish)) {
      await this.change(asked);
      this.showFilters();
    }
    if (saved.length) this.renew();
    setInterval(() => this.renew(), RENEW_MS);
    this.refreshLoop();
    setInterval(() => this.refreshLoop(), LOOP_MS);
  }

  save() {
    const coming = [this.taken, ...this.ahead].filter((one) => one);
    const ahead = coming.map(({ state, grid, wish }) => state ?? buildGrid(grid, wish, { samples: [], left: 0 }));
    if (!this.memory.save([this.current, ...ahead])) {
      notify("This browser has no room to keep labels: what you set before Enter is lost if you reload.");
    }
  }

  // --- Grids

  person() {
    return find("by").value.trim();
  }

  async lease(grid, wish, count) {
    const body = JSON.stringify({ ...wish, by: this.person(), count });
    return persist(() => ask("PUT", `${this.path}/grids/${grid}`, body));
  }

  async fetchGrid(grid, wish) {
    const answer = await this.lease(grid, wish, GRID);
    this.setClasses(answer.classes, answer.fixed_classes);
    this.serverNow = answer.now_s;
    return { ...buildGrid(grid, wish, answer), by: this.person() };
  }

  // A grid that comes next. isHidden: its images are decoded before it counts as there, so that Enter shows them at
  // once; if Enter comes earlier, it shows those that are there, and asks for the others.
  begin(grid, wish, isHidden) {
    const entry = { grid, wish, state: null, isTaken: false };
    const taken = new Promise((resolve) => (entry.hurry = resolve));
    entry.promise = this.fetchGrid(grid, wish).then(async (state) => {
      if (isHidden) await Promise.race([prefetch(state), taken]);
      entry.state = state;
      // The person has gone elsewhere meanwhile.
      if (!entry.isTaken && !this.ahead.includes(entry)) this.release([state]);
      this.save();
      return state;
    });
    // Who waits for it sees the problem.
    entry.promise.catch(() => {});
    return entry;
  }

  async advance() {
    const wish = this.wish;
    this.isAdvancing = true;
    find("grid").classList.add("waiting");
    const timer = setTimeout(() => tellWaiting(WAITING), PATIENCE_MS);
    try {
      this.take(this.ahead.shift() ?? this.begin(drawKey(), wish, false));
      let state = await this.taken.promise;
      // A grid that was empty some time ago may not be so now, once the server knows what was left out.
      if (!state.samples.length) {
        await this.journal.settle(SETTLE_MS);
        this.take(this.begin(drawKey(), wish, false));
        state = await this.taken.promise;
      }
      if (this.wish === wish) this.showGrid(state);
      else this.release([state]);
    } catch (error) {
      this.tellProblem(error);
    } finally {
      clearTimeout(timer);
      if (this.wish === wish) this.isAdvancing = false;
    }
  }

  tellProblem(error) {
    const changeToken = () => {
      forgetToken();
      location.reload();
    };
    if (error.status === 403) notify(error.message, "Use another token", changeToken);
    else notify(`${error.message} Press Enter to try again.`);
  }

  // From now on the page waits for this grid. A reload asks for it by its name, so that no lease is forgotten.
  take(entry) {
    entry.isTaken = true;
    entry.hurry();
    this.taken = entry;
    this.save();
  }

  // Gives samples back, so that others can get them, or the same person by another filter.
  release(states) {
    const path = (state) => `${this.path}/grids/${state.grid}`;
    return Promise.allSettled(states.filter((one) => one?.grid).map((one) => ask("DELETE", path(one))));
  }

  showGrid(state) {
    this.current = state;
    this.taken = null;
    find("grid").classList.remove("waiting");
    this.view.show(state, (name) => this.palette.findHue(name));
    const isEmpty = !state.samples.length;
    find("empty").hidden = !isEmpty;
    find("empty").textContent = isEmpty ? EMPTY : "";
    if (isEmpty) this.view.enlarge(false);
    const left = state.left + state.samples.length;
    find("progress").textContent = isEmpty ? "" : `${formatCount(left)} to go`;
    clearNotice();
    this.describe();
    this.save();
    this.sinceMs = performance.now();
    if (!isEmpty && !this.ahead.length) {
      this.ahead.push(this.begin(drawKey(), this.wish, true));
      this.save();
    }
  }

  // Sends a grid. onlyMarked: only what was touched, since the person goes elsewhere.
  send(onlyMarked) {
    const state = this.current;
    const labels = listLabels(state, this.takeSeconds(), onlyMarked);
    if (!labels.length) return;
    const { queue, again } = state.wish;
    this.journal.add({ grid: state.grid, queue, again: again > 0, by: state.by || this.person(), labels });
    this.previous = [...this.previous, state].slice(-MOST_PREVIOUS);
  }

  async enter() {
    if (this.isAdvancing || !this.current) return;
    const state = this.current;
    const open = state.samples.findIndex((one) => decide(state, one) === undefined);
    if (open >= 0 && this.skipping !== state.grid) {
      const count = state.samples.filter((one) => decide(state, one) === undefined).length;
      this.skipping = state.grid;
      this.view.move(open);
      this.describe();
      notify(`${plural(count, "image")} without a label. Press Enter again to leave ${count === 1 ? "it" : "them"} out.`);
      return;
    }
    notify("");
    this.send(false);
    this.leave();
    await this.advance();
    if (performance.now() - this.loopShownMs > LOOP_LEAST_MS) this.refreshLoop();
  }

  // Kept until the server has it, as labels of a grid are.
  async settle(body) {
    this.journal.add(body);
    await this.journal.settle(SETTLE_MS);
    await this.refreshLoop();
  }

  // The grid is done: a reload must not show it again.
  leave() {
    this.current = buildGrid("", this.wish, { samples: [], left: 0 });
    this.save();
  }

  // Other samples: nothing that was set is lost, and nothing else is accepted.
  async change(wish) {
    if (this.current) this.send(true);
    const left = [this.current, ...this.ahead.map((one) => one.state)];
    this.wish = wish;
    this.ahead = [];
    this.taken = null;
    this.isAdvancing = true;
    this.leave();
    writeWish(wish);
    // First the labels, so that what they are about does not come again.
    await this.journal.settle(SETTLE_MS);
    await this.release(left);
    if (this.wish === wish) await this.advance();
  }

  undo() {
    if (this.current && undoMark(this.current)) {
      this.repaint();
    } else if (this.previous.length) {
      // The grid before: Enter sends it again.
      const state = this.current;
      if (state?.samples.length) this.ahead.unshift(makeEntry(state));
      this.showGrid(this.previous.pop());
    }
  }

  repaint() {
    this.current.samples.forEach((_, index) => this.view.update(index));
    this.view.move(this.current.cursor);
    this.describe();
    this.save();
  }

  async renew() {
    for (const state of [this.current, ...this.ahead.map((one) => one.state)]) {
      if (!state?.samples.length) continue;
      const answer = await this.lease(state.grid, state.wish, 0).catch(() => null);
      if (!answer) continue;
      this.setClasses(answer.classes, answer.fixed_classes);
      // Others got samples whose lease was over; those that were marked here count as a second opinion.
      const own = new Set(answer.samples.map((one) => one.sha256));
      const kept = state.samples.filter((one) => own.has(one.sha256) || state.marks[one.sha256]);
      const gone = state.samples.length - kept.length;
      if (!gone) continue;
      state.samples = kept;
      state.cursor = Math.min(state.cursor, Math.max(0, kept.length - 1));
      if (state !== this.current) continue;
      if (kept.length) this.showGrid(state);
      else await this.advance();
      notify(`${plural(gone, "image")} went to somebody else while this page was asleep.`);
    }
  }

  // --- Labels

  takeSeconds() {
    const now = performance.now();
    const seconds = (now - this.sinceMs) / 1000;
    this.sinceMs = now;
    return seconds;
  }

  label(name) {
    const state = this.current;
    const sample = state?.samples[state.cursor];
    if (!sample) return;
    setMark(state, sample, name, this.takeSeconds());
    this.view.update(state.cursor);
    this.view.move(Math.min(state.cursor + 1, state.samples.length - 1));
    this.describe();
    this.save();
  }

  takeProposal() {
    const state = this.current;
    const sample = state?.samples[state.cursor];
    if (sample?.proposed) this.label(sample.proposed);
  }

  setClasses(classes, isFixed) {
    if (this.palette.set(classes, isFixed) && this.wish) this.showFilters();
  }

  addClass(name) {
    if (this.palette.add(name)) this.showFilters();
    this.label(name);
  }

  // --- Keys

  listen() {
    document.addEventListener("keydown", (event) => this.press(event));
    document.addEventListener("visibilitychange", () => {
      this.sinceMs = performance.now();
      if (!document.hidden) this.renew();
    });
    find("zoom").addEventListener("click", () => this.view.enlarge(false));
    find("open-loop").addEventListener("click", () => this.toggleLoop());
    // After a click, keys are about the images again. Whoever comes with Tab stays on the button.
    document.addEventListener("click", ({ target, detail }) => detail && target.closest("button")?.blur());
    find("by").addEventListener("change", () => {
      localStorage.setItem("headway.by", this.person());
      this.change({ ...this.wish });
    });
    find("new-class").addEventListener("submit", (event) => {
      event.preventDefault();
      const name = find("class-name").value.trim();
      find("class-name").value = "";
      find("class-name").blur();
      if (name) this.addClass(name);
    });
  }

  press(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target.closest("input, select, textarea, dialog")) {
      const isDone = event.key === "Enter" && ["by", "slice"].includes(event.target.id);
      if (isDone || event.key === "Escape") event.target.blur();
      return;
    }
    // Of a button that has the focus: they press it, and must not accept a grid.
    if (event.target.closest("button, a") && ["Enter", " "].includes(event.key)) return;
    // While the loop is shown, keys scroll it.
    if (!find("loop").hidden) {
      if (event.key === "Escape") this.toggleLoop();
      return;
    }
    // Until the next grid is there, a key would be about images that nobody sees.
    if (!this.isAdvancing && this.act(event.key, event.repeat)) event.preventDefault();
  }

  // Does what a key says; returns true if it means something.
  act(key, isRepeated) {
    const cursor = this.current?.cursor ?? 0;
    const last = (this.current?.samples.length ?? 0) - 1;
    const moves = {
      ArrowLeft: () => Math.max(0, cursor - 1),
      ArrowRight: () => Math.min(last, cursor + 1),
      ArrowUp: () => this.view.findBeside(cursor, -1),
      ArrowDown: () => this.view.findBeside(cursor, 1),
      Home: () => 0,
      End: () => last,
    };
    if (key in moves) {
      this.palette.begin("");
      if (last >= 0) this.view.move(moves[key]());
      this.describe();
      this.save();
      return true;
    }
    const commands = {
      // A key that is held down must not accept a second grid.
      Enter: () => isRepeated || this.enter(),
      " ": () => this.takeProposal(),
      Escape: () => this.view.enlarge(false),
      Backspace: () => this.undo(),
    };
    const letters = { u: () => this.undo(), x: () => this.label(null), z: () => this.view.enlarge(!this.view.isLarge) };
    const run = commands[key] ?? (this.palette.prefix ? undefined : letters[key.toLowerCase()]);
    if (run) {
      const hadPrefix = this.palette.prefix !== "";
      this.palette.begin("");
      if (!(hadPrefix && (key === "Escape" || key === "Backspace"))) run();
      return true;
    }
    return key.length === 1 && this.palette.type(key.toLowerCase());
  }

  // --- What is shown

  showFilters() {
    const { wish, queues, facts } = this;
    const { classes } = this.palette;
    const listSlices = async () => (await ask("GET", `${this.path}/slices`).catch(() => ({ slices: [] }))).slices;
    buildFilters({ wish, queues, facts, classes }, (wanted) => this.change(wanted), () => this.serverNow, listSlices);
  }

  openQueue(queue) {
    this.toggleLoop();
    const wish = { queue, class: "", split: "", slice: "", differs: false, copies: false, again: 0 };
    const done = this.change(wish);
    this.showFilters();
    return done;
  }

  describe() {
    const sample = this.current?.samples[this.current.cursor];
    find("about").textContent = sample ? describeSample(sample) : "";
  }

  toggleLoop() {
    const isOpen = find("loop").hidden;
    find("loop").hidden = !isOpen;
    find("labelling").hidden = find("foot").hidden = isOpen;
    find("open-loop").setAttribute("aria-expanded", String(isOpen));
    if (isOpen) this.refreshLoop();
    this.sinceMs = performance.now();
  }

  async refreshLoop() {
    this.loopShownMs = performance.now();
    try {
      const data = await ask("GET", `${this.path}/loop`);
      this.loop.show(data, !find("loop").hidden);
      // How many images are left, and queues that are new; but not under somebody's hands.
      this.queues = data.queues;
      if (!document.activeElement?.closest(".bar")) this.showFilters();
    } catch (error) {
      if (!(error instanceof Problem)) throw error;
    }
  }
}

async function begin() {
  const [, , dataset] = location.pathname.split("/");
  if (dataset) {
    await new LabelPage(decodeURIComponent(dataset)).open();
    return;
  }
  const { datasets } = await persist(() => ask("GET", "/datasets"));
  if (datasets.length === 1) {
    location.replace(`/label/${encodeURIComponent(datasets[0].dataset)}`);
    return;
  }
  document.body.classList.add("choosing");
  find("empty").hidden = false;
  find("empty").replaceChildren(
    ...(datasets.length ? [] : ["This store has no data set yet. Make one: headway dataset create NAME"]),
    ...datasets.map((one) => make("a", { href: `/label/${encodeURIComponent(one.dataset)}` }, `${one.dataset}, version ${one.number}`)),
  );
}

begin().catch((error) => {
  document.body.classList.add("choosing");
  find("empty").hidden = false;
  const message = error.status === 404 ? "The store has no data set of this name." : error.message;
  find("empty").replaceChildren(message, make("a", { href: "/label" }, "All data sets"));
});
