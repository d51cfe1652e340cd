// The loop above the grid: versions on a line, runs by the version that they pinned, queues, and what labels cost.

import { draw, find, formatCount, formatSeconds, formatShare, make, plural } from "./dom.js";
import { loadPicture } from "./service.js";

const MARGIN = 48;

export class LoopView {
  // openQueue: called with the ID of a queue; person: returns who labels; send: called with labels that settle something.
  constructor({ openQueue, person, send }) {
    this.openQueue = openQueue;
    this.person = person;
    this.send = send;
    this.data = null;
    new ResizeObserver(() => this.data && this.drawStrip()).observe(find("strip-drawing"));
  }

  show(data, isOpen) {
    this.data = data;
    find("strip-facts").replaceChildren(...this.listFacts());
    this.drawStrip();
    if (isOpen) this.showAll();
  }

  drawStrip() {
    const place = find("strip-drawing");
    place.replaceChildren(drawLoop(this.data, place.clientWidth || 800, 96, false));
  }

  listFacts() {
    const { versions, runs } = this.data;
    const cost = sumCost(this.data);
    const best = findBest(runs);
    const facts = [
      ["version", versions.length ? `v${versions.at(-1).number}` : "none"],
      ["a label", cost.samples ? formatSeconds(cost.seconds / cost.samples) : "-"],
      ["best accuracy", best === null ? "-" : formatShare(best.accuracy)],
    ];
    return facts.map(([name, value]) => make("span", {}, make("b", {}, value), make("small", {}, name)));
  }

  showAll() {
    const { data } = this;
    // Within the paddings of the page and of the panel.
    const width = Math.min(1314, Math.max(600, find("loop").clientWidth - 86));
    const drawing = drawLoop(data, width, 300, true);
    find("loop").replaceChildren(
      make("div", { class: "inner" },
        cards(data),
        panel("Versions, runs and queues", "A run stands above the version that it was trained on, a queue below the version that it was mined from. Dashed: the run that mined a queue. Solid: the version that has its labels.", drawing),
        panel("Queues", "", this.tableOfQueues()),
        make("div", { class: "pair" },
          panel("People", "Time counts at most a minute for one image.", tableOfPeople(data)),
          panel("Agreement", "One image in 20 is given to two people, who do not see each other's labels.", tableOfAgreement(data))),
        data.disagreements.length ? panel("Labelled differently", "The first person's label stands. Click a label to settle it.", this.listDisagreements()) : null),
    );
  }

  tableOfQueues() {
    const rows = [];
    for (const queue of this.data.queues) {
      const open = make("button", { type: "button", class: "link", click: () => this.openQueue(queue.queue) }, queue.name);
      const cost = queue.marked ? formatSeconds(queue.seconds / queue.marked) : "-";
      const source = this.data.versions.find((one) => one.version === queue.version);
      rows.push([open, source ? `v${source.number}` : queue.version.slice(0, 12), `${formatCount(queue.marked)} of ${formatCount(queue.size)}`, String(queue.unsure), cost, "", ""]);
      for (const arm of queue.arms) {
        const share = arm.labelled ? `${formatShare(arm.share)} (${formatShare(arm.low)} to ${formatShare(arm.high)})` : "-";
        rows.push([make("span", { class: "arm" }, arm.name), "", `${formatCount(arm.labelled)} of ${formatCount(arm.picks)}`, "", "", formatCount(arm.wrong), share]);
      }
    }
    return rows.length
      ? table(["queue", "mined from", "looked at", "not sure", "cost per label", "proposals wrong", "share, 95 % interval"], rows)
      : make("p", { class: "note" }, "There is no queue yet. Send one: headway mine, then POST its mine.json to /datasets/NAME/mine.");
  }

  listDisagreements() {
    return make("div", { class: "differences" },
      ...this.data.disagreements.map((one) => {
        const image = make("img", { alt: one.name });
        loadPicture(one.sha256, 128).then((picture) => (image.src = picture.src), () => {});
        const buttons = one.labels.map(({ by, label }) =>
          make("button", { type: "button", "aria-pressed": String(label === one.now), click: () => this.settle(one, label) }, `${label} (${by})`));
        return make("figure", { title: one.name }, image, make("figcaption", {}, ...buttons));
      }));
  }

  settle(sample, label) {
    this.send({ queue: sample.queue, again: true, by: this.person(), labels: [{ sha256: sample.sha256, label, seconds: 0 }] });
  }
}

function cards(data) {
  const cost = sumCost(data);
  const best = findBest(data.runs);
  const head = data.versions.at(-1);
  const total = data.agreement.reduce((sum, one) => sum + one.samples, 0);
  const equal = data.agreement.reduce((sum, one) => sum + one.equal, 0);
  const shown = [
    ["newest version", head ? `v${head.number}` : "-", head ? head.version.slice(0, 12) : ""],
    ["looked at", formatCount(cost.samples), `${formatCount(cost.unsure)} not sure`],
    ["cost per label", cost.samples ? formatSeconds(cost.seconds / cost.samples) : "-", `${formatSeconds(cost.seconds)} in all`],
    ["best accuracy", best === null ? "-" : formatShare(best.accuracy), best === null ? "no run has pinned a version" : best.name],
    ["agreement", total ? formatShare(equal / total) : "-", total ? `of ${plural(total, "image")} that two people got` : "one person so far"],
  ];
  return make("article", { class: "panel cards" },
    make("dl", {}, ...shown.map(([name, value, note]) => make("div", {}, make("dt", {}, name), make("dd", { class: "value" }, value), make("dd", {}, note)))));
}

function panel(title, note, ...children) {
  return make("article", { class: "panel" }, make("h3", {}, title), note ? make("p", { class: "note" }, note) : null, ...children);
}

function table(columns, rows) {
  return make("div", { class: "scroll" },
    make("table", {},
      make("thead", {}, make("tr", {}, ...columns.map((name) => make("th", {}, name)))),
      make("tbody", {}, ...rows.map((row) => make("tr", {}, ...row.map((cell) => make("td", {}, cell)))))));
}

function tableOfPeople(data) {
  const rows = data.labellers.map((one) => [one.by, formatCount(one.samples), formatCount(one.unsure), formatSeconds(one.seconds), formatSeconds(one.seconds / one.samples)]);
  return rows.length ? table(["who", "looked at", "not sure", "time", "per label"], rows) : make("p", { class: "note" }, "Nobody has labelled here yet.");
}

function tableOfAgreement(data) {
  const rows = data.agreement.map((one) => [`${one.first} and ${one.second}`, formatCount(one.samples), formatShare(one.equal / one.samples), one.kappa === null ? "-" : one.kappa.toFixed(2)]);
  return rows.length ? table(["who", "images", "equal", "Cohen's kappa"], rows) : make("p", { class: "note" }, "No image was labelled by two people yet.");
}

function sumCost(data) {
  const sum = (name) => data.labellers.reduce((total, one) => total + one[name], 0);
  return { samples: sum("samples"), seconds: sum("seconds"), unsure: sum("unsure") };
}

function findBest(runs) {
  const known = runs.filter((run) => run.accuracy !== null);
  return known.length ? known.reduce((best, run) => (run.accuracy > best.accuracy ? run : best)) : null;
}

// --- The drawing

function drawLoop(data, width, height, isLarge) {
  const { versions, queues } = data;
  const runs = data.runs.filter((run) => run.accuracy !== null);
  const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", class: "drawing-loop" });
  svg.append(draw("title", {}, `${plural(versions.length, "version")}, ${plural(runs.length, "run")}, ${plural(queues.length, "queue")}`));
  if (!versions.length) return svg;
  const line = isLarge ? height * 0.66 : height * (runs.length ? 0.6 : 0.4);
  const step = versions.length > 1 ? (width - 2 * MARGIN) / (versions.length - 1) : 0;
  const find = (index) => (versions.length > 1 ? MARGIN + index * step : width / 2);
  // Versions with the same contents have one ID: runs and queues hang at the newest of them.
  const place = new Map(versions.map((one, index) => [one.version, find(index)]));
  svg.append(draw("line", { class: "spine", x1: MARGIN, x2: width - MARGIN, y1: line, y2: line }));
  const dots = drawRuns(svg, runs, place, { top: isLarge ? 24 : 22, bottom: line - (isLarge ? 40 : 14), isLarge });
  drawQueues(svg, queues, place, dots, { line, below: line + (isLarge ? 62 : 29), isLarge });
  versions.forEach((one, index) => drawVersion(svg, one, find(index), line, { isHead: index === versions.length - 1, isLarge, isDense: step > 0 && step < 46 && index % 2 === 1 }));
  return svg;
}

function drawVersion(svg, one, x, line, { isHead, isLarge, isDense }) {
  const changes = Object.entries(one.counts).filter(([, count]) => count).map(([kind, count]) => `${formatCount(count)} ${kind === "relabelled" ? "labelled" : kind}`);
  const when = new Date(1000 * one.time).toLocaleString("en");
  const text = [`v${one.number} ${one.version.slice(0, 12)}`, when, Object.keys(one.people).join(", "), changes.join(", "), one.message, one.tags.join(", ")];
  const group = draw("g", { class: isHead ? "version head" : "version" });
  group.append(draw("circle", { cx: x, cy: line, r: isHead ? 6 : 4.5 }), draw("title", {}, text.filter((part) => part).join("\n")));
  if (!isDense) {
    group.append(draw("text", { x, y: line + (isLarge ? 20 : 18), "text-anchor": "middle" }, `v${one.number}`));
    if (isLarge) {
      const tag = one.tags[0] ?? (changes[0] ? `+${changes[0]}` : "");
      group.append(draw("text", { class: "fine", x, y: line + 36, "text-anchor": "middle" }, tag));
    }
  }
  svg.append(group);
}

function drawRuns(svg, runs, place, { top, bottom, isLarge }) {
  const dots = new Map();
  const shown = runs.filter((run) => place.has(run.version));
  if (!shown.length) return dots;
  const values = shown.map((run) => run.accuracy);
  const low = Math.min(...values);
  const span = Math.max(...values) - low || 1;
  const findY = (value) => bottom - ((value - low) / span) * (bottom - top);
  // The best run of each version, joined: what the labels were worth.
  const best = new Map();
  for (const run of shown) {
    if (!best.has(run.version) || best.get(run.version).accuracy < run.accuracy) best.set(run.version, run);
  }
  const points = [...best.values()].map((run) => [place.get(run.version), findY(run.accuracy)]).sort((a, b) => a[0] - b[0]);
  svg.append(draw("polyline", { class: "trend", points: points.map((point) => point.join(",")).join(" ") }));
  for (const run of shown) {
    const point = [place.get(run.version), findY(run.accuracy)];
    dots.set(run.path, point);
    dots.set(run.name, point);
    const isBest = best.get(run.version) === run;
    const group = draw("g", { class: isBest ? "run best" : "run" }, draw("circle", { cx: point[0], cy: point[1], r: isBest ? 4 : 3 }));
    const other = run.eval_version && run.eval_version !== run.version ? `\nevaluated on ${run.eval_version.slice(0, 12)}` : "";
    group.append(draw("title", {}, `${run.name}: ${formatShare(run.accuracy)}${other}`));
    if (isBest && (isLarge || best.size < 7)) group.append(draw("text", { x: point[0], y: point[1] - 8, "text-anchor": "middle" }, formatShare(run.accuracy)));
    svg.append(group);
  }
  return dots;
}

function drawQueues(svg, queues, place, dots, { line, below, isLarge }) {
  const rows = new Map();
  for (const queue of [...queues].reverse()) {
    const x = place.get(queue.version);
    if (x === undefined) continue;
    const row = rows.get(queue.version) ?? 0;
    rows.set(queue.version, row + 1);
    if (row > (isLarge ? 2 : 0)) continue;
    const y = below + row * 28;
    const group = draw("g", { class: "queue" });
    if (isLarge) {
      for (const run of queue.about.runs ?? []) {
        const dot = dots.get(run) ?? dots.get(run.split("/").at(-1));
        if (dot) group.append(draw("path", { class: "edge", d: `M${dot[0]},${dot[1] + 5} C${dot[0] + 80},${dot[1] + 40} ${x + 80},${y - 30} ${x + 12},${y}` }));
      }
    }
    const target = place.get(queue.labelled_version);
    if (isLarge && target !== undefined && target > x) {
      group.append(draw("path", { class: "flow", d: `M${x + 12},${y} C${x + 60},${y} ${target - 30},${y} ${target},${line + 42}` }));
    }
    const done = queue.size ? queue.marked / queue.size : 0;
    const [left, size] = [x - 12, 24];
    group.append(
      draw("rect", { class: "whole", x: left, y: y - 3, width: size, height: 6, rx: 3 }),
      draw("rect", { class: "done", x: left, y: y - 3, width: size * done, height: 6, rx: 3 }),
      draw("title", {}, `${queue.name}: ${formatCount(queue.marked)} of ${formatCount(queue.size)} looked at`),
    );
    if (isLarge) group.append(draw("text", { class: "fine", x: x - 12, y: y + 17 }, queue.name));
    svg.append(group);
  }
}
