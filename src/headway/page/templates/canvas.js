// Draws parallel coordinates and paths on canvases: a thousand lines take milliseconds there, and seconds as SVG.
// charts.js asks for a chart by its kind and gets a function that draws it in the colours of the style sheet.
globalThis.canvasCharts = (() => {
  "use strict";
  const FONT_PX = 12;
  const SHADES = 32; // lines of one shade are one path, so a thousand lines are 32 strokes
  const MANY = 300; // lines from which each is drawn a little fainter
  const MISSING_PX = 26; // between the lowest number of an axis and the place of lines that lack it
  const AXIS_PX = 84; // least distance of two parallel axes: below it the drawing scrolls
  const GRAB_PX = 14; // distance from an axis at which the mouse selects on it
  const MOST_DOTS = 8; // points from which a line is a curve: no dots, and the readout names its last point alone
  const NEAR_PX = 12; // distance from a line or point at which the mouse names it

  const extent = (values) => values.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);

  // Ticks at 1, 2 or 5 times a power of ten.
  const roundTicks = (low, high, most, isWhole) => {
    const rough = (high - low) / most;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = Math.max([1, 2, 5, 10].find((times) => times * power >= rough) * power, isWhole ? 1 : 0);
    const ticks = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i += 1) ticks.push(Number((i * step).toPrecision(12)));
    return ticks;
  };

  const logTicks = (low, high, most) => {
    const ticks = [];
    const decades = Math.log10(high / low);
    const times = decades > most / 2 ? [1] : [1, 2, 5];
    const every = times.length > 1 ? 1 : Math.ceil(decades / most);
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power += 1)
      if (power % every === 0) times.forEach((one) => ticks.push(Number(`${one}e${power}`)));
    const within = ticks.filter((tick) => tick >= low * 0.999 && tick <= high * 1.001);
    return within.length > 1 ? within : roundTicks(low, high, most, false);
  };

  // Places of an axis in pixels. Numbers lie between both ends; lines that lack one have a place at one of them.
  const buildScale = (axis, lowEnd, highEnd, brief, margin) => {
    const [from, to] = axis.missing_is_high ? [highEnd, lowEnd] : [lowEnd, highEnd];
    const values = axis.values.flat();
    const known = values.filter((value) => value !== null);
    const lacks = known.length < values.length;
    const near = from + (lacks ? Math.sign(to - from) * MISSING_PX : 0);
    const [start, end] = axis.missing_is_high ? [to, near] : [near, to];
    const isLog = axis.scale === "log";
    const warp = isLog ? Math.log10 : (value) => value;
    const most = Math.max(2, Math.min(6, Math.abs(end - start) / 40));
    let place, ticks;
    if (axis.scale === "category") {
      const band = (end - start) / axis.categories.length;
      place = (value) => start + (value + 0.5) * band;
      // Of more categories than fit, every second one has its name, or every third.
      const every = Math.ceil(15 / Math.abs(band));
      ticks = axis.categories.map((label, at) => ({ at: place(at), label, band: Math.abs(band) * every })).filter((_, at) => at % every === 0);
    } else {
      let [low, high] = known.length ? extent(known.map(warp)) : [0, 1];
      if (low === high) [low, high] = isLog ? [low - 0.3, high + 0.3] : [low - (Math.abs(low) || 1) * 0.1, high + (Math.abs(high) || 1) * 0.1];
      const pad = (high - low) * margin;
      place = (value) => start + ((warp(value) - low + pad) / (high - low + 2 * pad)) * (end - start);
      const numbers = axis.ticks.length
        ? axis.ticks
        : (isLog ? logTicks(10 ** low, 10 ** high, most) : roundTicks(low, high, most, known.every(Number.isInteger))).map((at) => ({ at, label: brief(at) }));
      ticks = (known.length ? numbers : []).map((tick) => ({ at: place(tick.at), label: tick.label }));
    }
    return { ticks, missing: lacks ? { at: from, label: axis.missing } : null, place: (value) => (value === null ? from : place(value)) };
  };

  const write = (axis, value, brief) => {
    if (value === null) return axis.missing;
    if (axis.scale === "category") return axis.categories[value];
    return axis.ticks.find((tick) => tick.at === value)?.label ?? brief(value);
  };

  const mix = (one, other, share) =>
    "#" + [1, 3, 5].map((at) => Math.round(parseInt(one.slice(at, at + 2), 16) * (1 - share) + parseInt(other.slice(at, at + 2), 16) * share).toString(16).padStart(2, "0")).join("");

  // Line numbers by shade, the worst first, so that the best are drawn on top; those without a rank are below all.
  const groupByShade = (ranks) => {
    const [best, worst] = extent(ranks.filter((rank) => rank !== null));
    const groups = Array.from({ length: SHADES + 1 }, () => []);
    ranks.forEach((rank, line) => groups[rank === null ? 0 : 1 + Math.round(worst > best ? ((worst - rank) / (worst - best)) * (SHADES - 1) : SHADES - 1)].push(line));
    return groups;
  };

  const pickColor = (look, shade) => {
    if (!shade) return look.series[8];
    const at = ((shade - 1) / (SHADES - 1)) * 3;
    const low = Math.min(2, Math.floor(at));
    return mix(look.ramp[1 + low], look.ramp[2 + low], at - low);
  };

  const addLayers = (parent) => {
    const layers = [0, 1].map(() => document.createElement("canvas"));
    layers.forEach((layer) => layer.setAttribute("aria-hidden", "true"));
    parent.append(...layers);
    return layers;
  };

  const open = (layer, width, height) => {
    const ratio = globalThis.devicePixelRatio || 1;
    layer.width = Math.round(width * ratio);
    layer.height = Math.round(height * ratio);
    layer.style.width = `${width}px`;
    layer.style.height = `${height}px`;
    const pen = layer.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.lineJoin = "round";
    return pen;
  };

  // A text of at most so many pixels, on the colour of the page, so that lines behind it do not hide it.
  const label = (pen, look, text, x, y, most, { color = look.muted, align = "start", weight = 400, size = FONT_PX } = {}) => {
    pen.font = `${weight} ${size}px ${look.sans}`;
    pen.textAlign = align;
    pen.textBaseline = "middle";
    let shown = text;
    while (shown.length > 1 && pen.measureText(shown).width > most) shown = shown.replace(/.\u2026?$/u, "") + "\u2026";
    const wide = pen.measureText(shown).width + 4;
    pen.fillStyle = look.surface + "f0";
    pen.fillRect(x + 2 - { start: 4, center: wide / 2 + 2, end: wide }[align], y - size / 2 - 1, wide, size + 2);
    pen.fillStyle = color;
    pen.fillText(shown, x, y);
  };

  const trace = (pen, points) => points.forEach(([x, y], i) => (i ? pen.lineTo(x, y) : pen.moveTo(x, y)));

  const dot = (pen, [x, y], radius) => {
    pen.moveTo(x + radius, y);
    pen.arc(x, y, radius, 0, 2 * Math.PI);
  };

  const mark = (pen, look, points, dots = points) => {
    for (const [width, color] of [[6, look.surface], [2.5, look.ink]]) {
      pen.beginPath();
      trace(pen, points);
      pen.lineWidth = width;
      pen.strokeStyle = color;
      pen.stroke();
    }
    pen.beginPath();
    dots.forEach((point) => dot(pen, point, 4));
    pen.fillStyle = look.ink;
    pen.fill();
  };

  // The text beside the mouse, which screen readers hear as well.
  const addReadout = (target) => {
    // Beside the drawing and not in it, so that it does not scroll away; an output is read aloud when it changes.
    const box = document.createElement("output");
    box.className = "readout";
    box.hidden = true;
    target.after(box);
    return (text, x, y) => {
      box.hidden = !text;
      if (!text) return;
      if (box.textContent !== text) box.textContent = text;
      const room = target.clientWidth - box.offsetWidth;
      box.style.left = `${Math.max(0, Math.min(x + 16 > room ? x - 16 - box.offsetWidth : x + 16, room))}px`;
      box.style.top = `${Math.max(0, Math.min(y + 12, target.clientHeight - box.offsetHeight))}px`;
    };
  };

  const prepare = (target, panel) => {
    target.tabIndex = 0;
    target.setAttribute("role", "group");
    target.setAttribute("aria-label", `${panel.title}: a chart of ${panel.data.names.length} lines. Arrow up and down read one after another by rank.`);
    target.dataset.drawn = panel.data.names.length;
  };

  // The line after this one by rank, among those that are selected.
  const step = (ranks, isSelected, line, by) => {
    const order = ranks.map((rank, i) => [rank ?? Infinity, i]).filter(([, i]) => isSelected(i)).sort((one, other) => one[0] - other[0] || one[1] - other[1]).map(([, i]) => i);
    const at = order.indexOf(line);
    return order[at < 0 ? 0 : Math.max(0, Math.min(order.length - 1, at + by))] ?? -1;
  };

  const head = (data, line) => data.names[line] + (data.ranks[line] === null ? "" : `, rank ${data.ranks[line]}`);

  const watch = (target, redraw) => {
    let [width, height] = [target.clientWidth, target.clientHeight];
    new ResizeObserver(() => {
      if (width === target.clientWidth && height === target.clientHeight) return;
      [width, height] = [target.clientWidth, target.clientHeight];
      redraw();
    }).observe(target);
  };

  const parallel = (article, target, panel, { brief, PAPER_PX }) => {
    const { data } = panel;
    const { axes, ranks } = data;
    const [counter, clear] = [article.querySelector(".count"), article.querySelector(".clear")];
    const stage = document.createElement("div");
    stage.className = "stage";
    target.append(stage);
    const [base, above] = addLayers(stage);
    const say = addReadout(target);
    const groups = groupByShade(ranks);
    // Ranges of axes by their number, as shares of the height, so that they survive another size of the window.
    const brushes = new Map();
    let look, scales, xs, points, top, bottom, width, height, isPaper, drag;
    let marked = -1;
    let chosen = -1;
    prepare(target, panel);

    const toShare = (y) => (y - top) / (bottom - top);
    const isSelected = (line) => [...brushes].every(([axis, [low, high]]) => toShare(points[line][axis][1]) >= low && toShare(points[line][axis][1]) <= high);

    const drawAxis = (pen, axis, number) => {
      const [x, scale, isLast] = [xs[number], scales[number], number === axes.length - 1];
      const room = isLast ? width - x - 10 : xs[number + 1] - x - 14;
      pen.beginPath();
      pen.moveTo(x, top);
      pen.lineTo(x, bottom);
      pen.strokeStyle = number === chosen ? look.ink : look.muted;
      pen.lineWidth = number === chosen ? 2.5 : 1;
      pen.stroke();
      [...scale.ticks, ...(scale.missing ? [scale.missing] : [])].forEach((tick) => {
        pen.fillStyle = look.muted;
        pen.fillRect(x - 3, tick.at - 0.5, 6, 1);
        label(pen, look, tick.label, x + 7, tick.at, room);
      });
      // "optimizer." above "lr": the end of a dotted key says most.
      const cut = axis.label.lastIndexOf(".") + 1;
      if (cut) label(pen, look, axis.label.slice(0, cut), x - 6, 10, room + 8, { size: 11 });
      label(pen, look, axis.label.slice(cut), x - 6, 25, room + 8, { color: look.ink, weight: 600 });
      if (!brushes.has(number)) return;
      const [low, high] = brushes.get(number);
      pen.fillStyle = look.ink + "24";
      pen.strokeStyle = look.ink;
      pen.lineWidth = 1.5;
      pen.fillRect(x - 8, top + low * (bottom - top), 16, (high - low) * (bottom - top));
      pen.strokeRect(x - 8, top + low * (bottom - top), 16, (high - low) * (bottom - top));
    };

    const drawLines = (pen) => {
      const chosenLines = groups.map((group) => group.filter(isSelected));
      const count = chosenLines.reduce((sum, group) => sum + group.length, 0);
      const stroke = (group, color, alpha, dash) => {
        pen.beginPath();
        group.forEach((line) => trace(pen, points[line]));
        pen.setLineDash(dash);
        pen.strokeStyle = color;
        pen.globalAlpha = alpha;
        pen.stroke();
      };
      pen.lineWidth = 1.4;
      if (count < data.names.length) groups.forEach((group) => stroke(group.filter((line) => !isSelected(line)), look.line, 0.7, []));
      chosenLines.forEach((group, shade) => stroke(group, pickColor(look, shade), count > MANY ? 0.6 : 0.9, shade ? [] : [5, 4]));
      pen.setLineDash([]);
      pen.globalAlpha = 1;
      counter.textContent = brushes.size ? `${count} of ${data.names.length} selected` : "";
      clear.hidden = !brushes.size;
      target.dataset.selected = count;
    };

    const drawMark = (x, y) => {
      const pen = open(above, width, height);
      if (marked < 0) return say("");
      mark(pen, look, points[marked]);
      const values = axes.map((axis) => `${axis.label}: ${write(axis, axis.values[marked], brief)}`);
      return say([head(data, marked), ...values].join("\n"), x - target.scrollLeft, y);
    };

    const redraw = () => {
      width = Math.max(isPaper ? PAPER_PX : target.clientWidth, AXIS_PX * axes.length);
      if (isPaper) width = PAPER_PX;
      height = target.clientHeight;
      [top, bottom] = [48, height - 18];
      const [left, right] = [14, 76];
      xs = axes.map((_, i) => left + (axes.length > 1 ? (i / (axes.length - 1)) * (width - left - right) : 0));
      scales = axes.map((axis) => buildScale(axis, bottom, top, brief, 0));
      points = data.names.map((_, line) => axes.map((axis, i) => [xs[i], scales[i].place(axis.values[line])]));
      const pen = open(base, width, height);
      drawLines(pen);
      axes.forEach((axis, number) => drawAxis(pen, axis, number));
      drawMark(xs[0], top);
    };

    const locate = (event) => {
      const bounds = stage.getBoundingClientRect();
      return [event.clientX - bounds.left, event.clientY - bounds.top];
    };
    const findAxis = (x) => xs.findIndex((at) => Math.abs(at - x) <= GRAB_PX);
    const findLine = (x, y) => {
      const after = xs.findIndex((at) => at >= x);
      if (after < 0 || axes.length < 2) return -1;
      const right = Math.max(1, after);
      const share = (x - xs[right - 1]) / (xs[right] - xs[right - 1]);
      let [found, nearest] = [-1, NEAR_PX];
      points.forEach((own, line) => {
        const distance = Math.abs(own[right - 1][1] * (1 - share) + own[right][1] * share - y);
        if (distance < nearest && isSelected(line)) [found, nearest] = [line, distance];
      });
      return found;
    };
    const select = (axis, one, other) => {
      const [low, high] = [Math.min(one, other), Math.max(one, other)].map((y) => toShare(Math.max(top - 6, Math.min(bottom + 6, y))));
      brushes.set(axis, [low, high]);
    };

    stage.addEventListener("pointerdown", (event) => {
      const [x, y] = locate(event);
      const axis = findAxis(x);
      // A finger scrolls.
      if (axis < 0 || event.button || event.pointerType === "touch") return;
      event.preventDefault();
      target.focus({ preventScroll: true });
      drag = { axis, y };
    });
    addEventListener("pointermove", (event) => {
      if (!drag) return;
      const [, y] = locate(event);
      if (Math.abs(y - drag.y) > 3) select(drag.axis, drag.y, y);
      marked = -1;
      redraw();
    });
    addEventListener("pointerup", (event) => {
      if (!drag) return;
      if (Math.abs(locate(event)[1] - drag.y) <= 3) brushes.delete(drag.axis);
      drag = undefined;
      redraw();
    });
    stage.addEventListener("pointermove", (event) => {
      if (drag) return;
      const [x, y] = locate(event);
      stage.style.cursor = findAxis(x) < 0 ? "default" : "ns-resize";
      const line = findLine(x, y);
      if (line < 0 && marked < 0) return;
      marked = line;
      drawMark(x, y);
    });
    stage.addEventListener("pointerleave", () => {
      if (drag || marked < 0) return;
      marked = -1;
      drawMark();
    });
    clear.addEventListener("click", () => {
      brushes.clear();
      redraw();
    });
    target.addEventListener("keydown", (event) => {
      const axis = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      const line = { ArrowUp: -1, ArrowDown: 1 }[event.key];
      if (axis) chosen = Math.max(0, Math.min(axes.length - 1, chosen + axis));
      else if (line) marked = step(ranks, isSelected, marked, line);
      else if (event.key === "Escape") [brushes.clear(), (marked = -1), (chosen = -1)];
      else if (event.key === "Enter" && marked >= 0 && chosen >= 0) {
        const reach = (bottom - top) / 10;
        select(chosen, points[marked][chosen][1] - reach, points[marked][chosen][1] + reach);
      } else return;
      event.preventDefault();
      if (axis) target.scrollLeft = xs[chosen] - target.clientWidth / 2;
      redraw();
    });
    watch(target, redraw);
    return (newLook, paper) => {
      [look, isPaper] = [newLook, paper];
      redraw();
    };
  };

  const paths = (article, target, panel, { brief, PAPER_PX }) => {
    const { data } = panel;
    const { names, ranks, y: yAxis } = data;
    const groups = groupByShade(ranks);
    const say = addReadout(target);
    target.classList.toggle("single", data.x.length === 1);
    prepare(target, panel);
    let look;
    let isPaper;
    let marked = -1;
    // Points of one category are spread over its width: golden steps leave no pattern.
    const spread = (axis, line, value, band) => (axis.scale === "category" && value !== null ? (((line * 0.618034) % 1) - 0.5) * 0.7 * band : 0);

    const pictures = data.x.map((xAxis) => {
      const frame = document.createElement("div");
      frame.className = "facet";
      target.append(frame);
      const [base, above] = addLayers(frame);
      let width, height, points;

      const drawTicks = (pen, xScale, yScale, left, right, top, bottom) => {
        [...yScale.ticks, ...(yScale.missing ? [yScale.missing] : [])].forEach((tick) => {
          pen.fillStyle = look.grid;
          pen.fillRect(left, tick.at - 0.5, right - left, 1);
          label(pen, look, tick.label, left - 8, tick.at, left - 10, { align: "end" });
        });
        pen.fillStyle = look.line;
        pen.fillRect(left, bottom - 0.5, right - left, 1);
        let free = -Infinity;
        [...(xScale.missing ? [xScale.missing] : []), ...xScale.ticks].forEach((tick) => {
          pen.font = `${FONT_PX}px ${look.sans}`;
          const most = tick.band ?? 90;
          const half = Math.min(pen.measureText(tick.label).width, most - 6) / 2;
          // Of two labels that would touch, the left one stays.
          if (tick.at - half < free + 6) return;
          free = tick.at + half;
          const x = Math.max(half + 1, Math.min(width - half - 1, tick.at));
          label(pen, look, tick.label, x, bottom + 13, most - 6, { align: "center" });
        });
        // The middle of the axis lies to the right of that of the canvas: a long name ends at its edge.
        label(pen, look, xAxis.label, (left + right) / 2, height - 8, 2 * width - left - right, { align: "center" });
        label(pen, look, yAxis.label, 0, 8, width);
      };

      const draw = () => {
        width = isPaper ? Math.min(PAPER_PX, frame.clientWidth) : frame.clientWidth;
        height = frame.clientHeight;
        const pen = open(base, width, height);
        const [top, bottom, right] = [26, height - 40, width - 14];
        const yScale = buildScale(yAxis, bottom - 4, top, brief, 0.02);
        pen.font = `${FONT_PX}px ${look.sans}`;
        const widest = Math.max(...[...yScale.ticks, { label: yScale.missing?.label ?? "" }].map((tick) => pen.measureText(tick.label).width));
        const left = Math.min(widest, width / 3) + 12;
        const xScale = buildScale(xAxis, left + 12, right - 6, brief, 0.02);
        const band = xScale.ticks[0]?.band ?? 0;
        drawTicks(pen, xScale, yScale, left, right, top, bottom);
        points = names.map((_, line) => yAxis.values[line].map((y, i) => {
          const x = xAxis.values[line][i];
          return [xScale.place(x) + spread(xAxis, line, x, band), yScale.place(y)];
        }));
        pen.lineWidth = 1.3;
        groups.forEach((group, shade) => {
          pen.strokeStyle = pen.fillStyle = pickColor(look, shade);
          pen.globalAlpha = names.length > MANY ? 0.55 : 0.8;
          pen.beginPath();
          group.forEach((line) => trace(pen, points[line]));
          pen.stroke();
          pen.globalAlpha = names.length > MANY ? 0.7 : 0.95;
          pen.beginPath();
          group.filter((line) => points[line].length <= MOST_DOTS).forEach((line) => points[line].forEach((point) => dot(pen, point, names.length > MANY ? 2 : 2.8)));
          pen.fill();
        });
        pen.globalAlpha = 1;
        drawMark();
      };
      const drawMark = () => {
        const pen = open(above, width, height);
        const own = points[marked] ?? [];
        if (own.length) mark(pen, look, own, own.length > MOST_DOTS ? own.slice(-1) : own);
      };
      frame.addEventListener("pointermove", (event) => {
        const bounds = frame.getBoundingClientRect();
        const [x, y] = [event.clientX - bounds.left, event.clientY - bounds.top];
        let [found, nearest] = [-1, NEAR_PX];
        points.forEach((own, line) => own.forEach((point) => {
          const distance = Math.hypot(point[0] - x, point[1] - y);
          if (distance < nearest) [found, nearest] = [line, distance];
        }));
        if (found >= 0 || marked >= 0) choose(found, frame.offsetLeft + x, frame.offsetTop + y);
      });
      frame.addEventListener("pointerleave", () => marked >= 0 && choose(-1));
      return { draw, drawMark };
    });

    const choose = (line, x = 0, y = 0) => {
      marked = line;
      pictures.forEach((picture) => picture.drawMark());
      if (line < 0) return say("");
      const own = yAxis.values[line].map((value, i) => {
        const where = data.x.map((axis) => `${axis.label}: ${write(axis, axis.values[line][i], brief)}`);
        const what = `${yAxis.label}: ${write(yAxis, value, brief)}`;
        return data.x.length > 1 ? [what, ...where].join("\n") : `${where[0]}, ${what}`;
      });
      const shown = own.length > MOST_DOTS ? [`the last of ${own.length} points:`, own.at(-1)] : own;
      return say([head(data, line), ...shown].join("\n"), x, y);
    };
    const redraw = () => pictures.forEach((picture) => picture.draw());
    target.addEventListener("keydown", (event) => {
      const by = { ArrowUp: -1, ArrowDown: 1 }[event.key];
      if (!by && event.key !== "Escape") return;
      event.preventDefault();
      choose(by ? step(ranks, (line) => yAxis.values[line].length > 0, marked, by) : -1);
    });
    target.addEventListener("blur", () => choose(-1));
    watch(target, redraw);
    return (newLook, paper) => {
      [look, isPaper] = [newLook, paper];
      redraw();
    };
  };

  return { parallel, paths };
})();
