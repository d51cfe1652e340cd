// A grid of samples: what a person has set so far, and how it looks. Each key changes one or two tiles.

import { find, formatShare, make } from "./dom.js";
import { findPicture, loadPicture } from "./service.js";

const THUMB_SIDE = 256;
const LARGE_SIDE = 512;
const MOST_SECONDS = 60;
// Pictures of the next grid that are on their way at once: more would hold up keys, here and on the server.
const PREFETCHED_AT_ONCE = 2;

// What a grid is, as plain data: it goes into the browser's storage with every key.
export function buildGrid(grid, wish, answer) {
  return { grid, wish, samples: answer.samples, marks: {}, steps: [], cursor: 0, left: answer.left };
}

// The label that Enter sends: what was set; else the label that is there; else the proposal. Undefined: nothing yet.
export function decide(state, sample) {
  const mark = state.marks[sample.sha256];
  if (mark) return mark.label;
  return sample.label ?? (sample.proposed || undefined);
}

export function setMark(state, sample, label, seconds) {
  const before = state.marks[sample.sha256] ?? null;
  const spent = (before ? before.seconds : 0) + Math.min(seconds, MOST_SECONDS);
  state.steps.push({ sha256: sample.sha256, before, cursor: state.cursor });
  state.marks[sample.sha256] = { label, seconds: spent };
}

export function undoMark(state) {
  const step = state.steps.pop();
  if (!step) return false;
  if (step.before) state.marks[step.sha256] = step.before;
  else delete state.marks[step.sha256];
  state.cursor = Math.max(0, Math.min(step.cursor, state.samples.length - 1));
  return true;
}

// The labels to send. onlyMarked: leave out what nobody has touched. seconds: since the last key, for all others.
export function listLabels(state, seconds, onlyMarked) {
  const chosen = state.samples.filter((one) => decide(state, one) !== undefined && (!onlyMarked || state.marks[one.sha256]));
  const accepted = chosen.filter((one) => !state.marks[one.sha256]);
  const share = accepted.length ? Math.min(seconds, MOST_SECONDS) / accepted.length : 0;
  for (const one of accepted) state.marks[one.sha256] = { label: decide(state, one), seconds: share, accepted: true };
  return chosen.map((one) => {
    // Accepted: nobody has touched it, so it must not replace a label that came meanwhile.
    const { label, seconds: spent, accepted = false } = state.marks[one.sha256];
    return { sha256: one.sha256, label, seconds: Math.round(1000 * spent) / 1000, accepted };
  });
}

export function prefetch(state) {
  const coming = state.samples.values();
  const load = async () => {
    for (const one of coming) await loadPicture(one.sha256, THUMB_SIDE).catch(() => {});
  };
  return Promise.all(Array.from({ length: PREFETCHED_AT_ONCE }, load));
}

export class GridView {
  // pick: called with the number of a tile that was clicked.
  constructor(pick) {
    this.root = find("grid");
    this.pick = pick;
    this.tiles = [];
    this.state = null;
    this.hue = () => null;
    this.isLarge = false;
  }

  show(state, hue) {
    this.state = state;
    this.hue = hue;
    this.tiles.forEach(({ figure }) => figure.classList.remove("at"));
    // The tiles of the grid before are used again: the browser builds and styles nothing anew.
    while (this.tiles.length < state.samples.length) this.tiles.push(this.build(this.tiles.length));
    for (const { figure } of this.tiles.splice(state.samples.length)) figure.remove();
    this.root.classList.toggle("few", state.samples.length <= 6);
    state.samples.forEach((sample, index) => {
      this.fill(this.tiles[index], sample);
      this.update(index);
    });
    this.move(state.cursor);
  }

  build(index) {
    const chip = make("span", { class: "chip" });
    const note = make("small", {});
    const figure = make(
      "figure",
      { class: "tile", click: () => this.pick(index), dblclick: () => this.enlarge(true) },
      make("figcaption", {}, chip, note),
    );
    this.root.append(figure);
    return { figure, chip, note, sample: null };
  }

  // Puts the decoded picture itself into the tile: another one with its address would be loaded and decoded again.
  fill(tile, sample) {
    tile.sample = sample;
    tile.figure.title = sample.name;
    tile.figure.classList.remove("broken");
    const put = (image) => {
      image.alt = sample.name;
      // None is there if the tile that was filled before has it now.
      tile.figure.querySelector("img")?.remove();
      tile.figure.prepend(image);
    };
    const picture = findPicture(sample.sha256, THUMB_SIDE);
    if (picture) {
      put(picture);
      return;
    }
    put(make("img", {}));
    loadPicture(sample.sha256, THUMB_SIDE).then(
      (loaded) => tile.sample === sample && put(loaded),
      () => tile.sample === sample && tile.figure.classList.add("broken"),
    );
  }

  update(index) {
    const sample = this.state.samples[index];
    const { figure, chip, note } = this.tiles[index];
    const label = decide(this.state, sample);
    const isSet = Boolean(this.state.marks[sample.sha256]);
    figure.classList.toggle("set", isSet && label !== null);
    figure.classList.toggle("unsure", label === null);
    figure.classList.toggle("proposed", !isSet && label !== undefined && sample.label === null);
    figure.classList.toggle("undecided", label === undefined);
    chip.textContent = label === null ? "not sure" : (label ?? "?");
    const hue = label ? this.hue(label) : null;
    chip.dataset.hue = hue === null ? "" : String(hue);
    note.textContent = describeTile(sample, label, isSet);
  }

  move(cursor) {
    this.tiles[this.state.cursor]?.figure.classList.remove("at");
    this.state.cursor = cursor;
    const tile = this.tiles[cursor];
    if (!tile) return;
    tile.figure.classList.add("at");
    // Before the next frame, when all that a key changes is there: now it would be laid out twice.
    requestAnimationFrame(() => tile.figure.scrollIntoView({ block: "nearest" }));
    if (this.isLarge) this.showLarge();
  }

  // The tile above or below, by where it lies on the screen.
  findBeside(cursor, rows) {
    const columns = this.countColumns();
    const wanted = cursor + rows * columns;
    return wanted >= 0 && wanted < this.tiles.length ? wanted : cursor;
  }

  countColumns() {
    const top = this.tiles[0]?.figure.offsetTop;
    const next = this.tiles.findIndex((tile) => tile.figure.offsetTop !== top);
    return next < 0 ? this.tiles.length : next;
  }

  enlarge(isLarge) {
    this.isLarge = isLarge && this.tiles.length > 0;
    find("zoom").hidden = !this.isLarge;
    if (this.isLarge) this.showLarge();
  }

  showLarge() {
    const { samples, cursor } = this.state;
    const sample = samples[cursor];
    const image = find("zoomed");
    const show = (picture) => {
      if (this.state.samples[this.state.cursor] === sample) image.src = picture.src;
    };
    // The small picture at once, then a larger one, then all that the store has.
    loadPicture(sample.sha256, THUMB_SIDE).then(show, () => {});
    loadPicture(sample.sha256, LARGE_SIDE)
      .then(show, () => {})
      .then(() => loadPicture(sample.sha256, 0))
      .then(show, () => {});
    const label = decide(this.state, sample);
    find("zoom-caption").textContent = `${label === null ? "not sure" : (label ?? "no label")} · ${sample.name}`;
    for (const next of samples.slice(cursor + 1, cursor + 3)) loadPicture(next.sha256, LARGE_SIDE).catch(() => {});
  }
}

function describeTile(sample, label, isSet) {
  const parts = [];
  if (!isSet && sample.label === null && sample.proposed && sample.probability !== null) {
    parts.push(`${Math.round(100 * sample.probability)} %`);
  } else if (sample.label !== null && sample.label !== label) {
    parts.push(`was ${sample.label}`);
  } else if (sample.proposed && sample.proposed !== label) {
    parts.push(`${sample.proposed}?`);
  }
  if (sample.copies) parts.push(`+${sample.copies} near`);
  return parts.join(" · ");
}

// A grid that is there.
export function makeEntry(state) {
  const { grid, wish } = state;
  return { state, grid, wish, isTaken: false, hurry: () => {}, promise: Promise.resolve(state) };
}

export function describeSample(sample) {
  const parts = [sample.name, sample.split];
  if (sample.label !== null) parts.push(`label ${sample.label}`);
  if (sample.proposed) {
    const share = sample.probability === null ? "" : ` ${formatShare(sample.probability)}`;
    parts.push(`proposal ${sample.proposed}${share}`);
  }
  return parts.join("  ·  ");
}
