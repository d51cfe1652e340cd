// Draws every panel that carries its JSON beside it. Colours come from the style sheet, so light, dark and paper
// are one code; texts of others are escaped, because Plotly reads markup in them.
(() => {
  "use strict";
  const root = document.documentElement;
  const PAPER_PX = 680; // A4 and Letter less their margins and the panel's own
  const FEW_POINTS = 40; // up to here every point of a line gets a marker
  const LABELLED = 50; // rows of a matrix up to which every name is legible
  const SHOWN = 250; // rows of a matrix up to which a cell is larger than a pixel
  const WRITTEN = 20; // rows of a matrix up to which numbers are written,
  const WRITTEN_PX = 24; // if a cell gets this much of the width

  const plain = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const short = (text, length) => plain(text.length > length ? text.slice(0, length - 1) + "\u2026" : text);

  // Axis categories must differ: equal names are told apart by invisible characters.
  const categories = (names) => {
    const seen = new Map();
    return names.map((name) => {
      const count = seen.get(name) ?? 0;
      seen.set(name, count + 1);
      return plain(name) + "\u200b".repeat(count + (name ? 0 : 1));
    });
  };

  // 950, 12.3k, 1.2M, 4.5e-5: short enough for a bar, a cell or a tick.
  const compact = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 4 });
  const whole = new Intl.NumberFormat("en", { maximumSignificantDigits: 4 });
  const brief = (value) => {
    const size = Math.abs(value);
    if (size && size < 1e-3) return value.toExponential().replace(/(\.\d)\d+/, "$1");
    return (size < 1e5 ? whole : compact).format(value).replace("K", "k");
  };

  const theme = () => {
    const style = getComputedStyle(root);
    const names = ["surface", "ink", "muted", "grid", "line", "sans", "agree-low", "agree-high", "differ-low", "differ-high"];
    const look = Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
    look.ramp = Array.from({ length: 5 }, (_, i) => style.getPropertyValue(`--ramp-${i}`).trim());
    look.series = Array.from({ length: 10 }, (_, i) => style.getPropertyValue(`--series-${i}`).trim());
    return look;
  };

  const { RULE_PX, drawRules, drawLevels, chooseRange } = globalThis.chartRules(short);

  const axis = (look, more) => ({
    gridcolor: look.grid,
    linecolor: look.line,
    zeroline: false,
    automargin: true,
    ticks: "",
    tickfont: { color: look.muted },
    separatethousands: true,
    ...more,
  });

  const heading = (text, look) => ({ text: plain(text), font: { color: look.muted, size: 12 }, standoff: 8 });

  const layout = (look, more) => ({
    autosize: true,
    margin: { l: 8, r: 12, t: 26, b: 8 },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: look.sans, size: 12, color: look.ink },
    showlegend: false,
    hoverlabel: { bgcolor: look.surface, bordercolor: look.line, font: { color: look.ink, family: look.sans }, namelength: 40, align: "left" },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: look.muted, activecolor: look.ink },
    ...more,
  });

  // The label of a y axis, above it.
  const topLabel = (text, look) => ({ text: plain(text), xref: "paper", yref: "paper", x: 0, y: 1, xanchor: "left", yanchor: "bottom", yshift: 5, showarrow: false, font: { color: look.muted, size: 12 } });

  // A number axis for these values. "390k" is read at a glance, "10 micro" for a learning rate is not: powers of ten
  // below one. On a logarithmic axis every label is a whole number, not the bare digits between two powers.
  const scaled = (look, values, log, bounds, more) => {
    const known = values.filter((value) => value !== null && (!log || value > 0));
    const [least, most] = known.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);
    const largest = Math.max(-least, most);
    // A little below 10,000 the axis still ends there: "8,000" and "10,000", not powers of ten.
    const plain = largest >= 1000 ? { minexponent: 5 } : {};
    const linear = { type: "linear", ...(largest >= 10000 ? { exponentformat: "B" } : { exponentformat: "power", ...plain }) };
    const nticks = known.length ? Math.min(8, Math.max(3, Math.floor(Math.log10(most / least) / 0.35))) : 3; // 1, 2, 5
    const tickformat = least < 1e-3 ? ".3~e" : least >= 1 && most >= 1e4 ? ".4~s" : ",.6~g";
    const logarithmic = { type: "log", tickformat, nticks };
    // Around a single value, plotly shows one unit to each side: of an accuracy, from below 0 to above 1.
    const near = known.length && least === most && !log ? [least - 0.1 * (Math.abs(least) || 10), least + 0.1 * (Math.abs(least) || 10)] : undefined;
    const shown = bounds ?? near;
    const range = shown ? { range: log ? shown.map(Math.log10) : shown } : {};
    return axis(look, { ...(log ? logarithmic : linear), ...range, ...more });
  };

  // Two lines without ink, and what is between them filled; where a bound is missing there is a gap in the fill.
  const drawBand = (band, data, look, hidden) => {
    const series = data.series[band.of];
    const color = look.series[band.of % look.series.length];
    const known = (i) => band.low[i] !== null && band.high[i] !== null;
    const parts = [];
    series.x.forEach((_, i) => known(i) && (i && known(i - 1) ? parts.at(-1).push(i) : parts.push([i])));
    const still = { type: "scatter", mode: "lines", hoverinfo: "skip", line: { width: 0, color }, visible: !hidden.has(band.of) };
    return parts.flatMap((part) => [
      { ...still, x: part.map((i) => series.x[i]), y: part.map((i) => band.low[i]) },
      { ...still, x: part.map((i) => series.x[i]), y: part.map((i) => band.high[i]), fill: "tonexty", fillcolor: color + "30" },
    ]);
  };

  const drawLines = (data, look, hidden, width, paper, height) => {
    const rules = data.rules ?? [];
    const bands = (data.bands ?? []).flatMap((band) => drawBand(band, data, look, hidden));
    const bounds = (data.bands ?? []).flatMap((band) => [...band.low, ...band.high]);
    const traces = data.series.map((series, index) => {
      const gap = (i) => i < 0 || i >= series.y.length || series.y[i] === null;
      const few = series.y.length <= FEW_POINTS;
      const sizes = series.y.map((_, i) => (series.y.length === 1 ? 9 : few ? 5 : !gap(i) && gap(i - 1) && gap(i + 1) ? 4 : 0));
      const color = look.series[index % look.series.length];
      return {
        type: "scatter",
        name: short(series.name, 40),
        x: series.x,
        y: series.y,
        mode: few || sizes.some((size) => size) ? "lines+markers" : "lines",
        line: { color, width: 1.75, dash: ["solid", "dash", "dot"][Math.floor(index / look.series.length) % 3] },
        marker: { color, size: sizes, line: { width: 0 } },
        visible: !hidden.has(index),
      };
    });
    const across = [...new Set(data.series.flatMap((series) => series.x))].sort((low, high) => low - high);
    const read = rules.map((rule) => ({ type: "scatter", name: short(rule.name, 40), x: across, y: across.map(() => rule.at), mode: "lines", line: { color: look.ink, width: 0 } })); // by the mouse
    const values = [...data.series.flatMap((series) => series.y), ...bounds, ...rules.map((rule) => rule.at)];
    const shown = data.y_range ?? (rules.length ? chooseRange(values, data.log_y) : null);
    const one = traces.length === 1 && !rules.length;
    return [
      [...bands, ...read, ...traces.map((trace) => (one ? { ...trace, hovertemplate: "%{y}<extra></extra>" } : trace))],
      layout(look, {
        hovermode: "x unified",
        ...(rules.length ? drawLevels(rules, look, data.log_y, shown, height, topLabel(data.y_label, look)) : { annotations: [topLabel(data.y_label, look)] }),
        xaxis: scaled(look, data.series.flatMap((series) => series.x), data.log_x, null, {
          title: heading(data.x_label, look),
          showgrid: false,
          showline: true,
          hoverformat: ",.6~g",
          unifiedhovertitle: { text: plain(data.x_label) + " %{x}" },
        }),
        yaxis: scaled(look, values, data.log_y, shown, { hoverformat: ",.5~g" }),
      }),
    ];
  };

  // Symbols change with the colour, so that a series is told apart on paper too.
  const drawPoints = (data, look, hidden) => {
    const symbols = ["circle", "square", "diamond", "cross", "triangle-up", "star"];
    const all = data.series.flatMap((series) => series.points);
    const across = all.map((point) => point.x);
    // Over more powers of ten than this, labels between them would overlap in half a page.
    const powers = data.log_x && Math.max(...across) > 300 * Math.min(...across) ? { dtick: 1 } : {};
    const traces = data.series.map((series, index) => ({
      type: "scatter",
      mode: "markers",
      name: short(series.name, 40),
      x: series.points.map((point) => point.x),
      y: series.points.map((point) => point.y),
      text: series.points.map((point) => short(point.name, 60)),
      marker: { color: look.series[index % look.series.length], symbol: symbols[index % symbols.length], size: 9, opacity: 0.85, line: { color: look.surface, width: 1 } },
      hovertemplate: "%{text}<br>" + plain(data.x_label) + " %{x:,.4~g}<br>" + plain(data.y_label) + " %{y:,.5~g}<extra></extra>",
      visible: !hidden.has(index),
    }));
    return [
      traces,
      layout(look, {
        hovermode: "closest",
        annotations: [topLabel(data.y_label, look)],
        xaxis: scaled(look, across, data.log_x, null, { title: heading(data.x_label, look), showline: true, ...powers }),
        yaxis: scaled(look, all.map((point) => point.y), false, null, {}),
      }),
    ];
  };

  // A logarithmic axis begins at a power of ten, far enough to the left that the shortest bar is seen.
  const drawBars = (data, look, hidden, width) => {
    const names = categories(data.names);
    const log = Boolean(data.log_x);
    const rules = data.rules ?? [];
    const several = data.stacks.length > 1;
    const values = data.stacks.flatMap((stack) => stack.values);
    const seen = [...values, ...rules.map((rule) => rule.at)].filter((value) => value > 0);
    const most = Math.max(...seen);
    const bounds = log ? [10 ** Math.floor(Math.log10(Math.min(...seen) / 2)), 2 * most] : null;
    const traces = data.stacks.map((stack, index) => ({
      type: "bar",
      orientation: "h",
      name: short(stack.name, 40),
      x: stack.values,
      y: names,
      marker: { color: look.series[index % look.series.length], line: { color: look.surface, width: 1 } },
      text: stack.values.map((value) => (several && !value ? "" : brief(value))),
      textposition: several && !log ? "inside" : "auto",
      insidetextanchor: "middle",
      textangle: 0,
      hovertemplate: "%{y}<br>" + (!several ? "" : short(stack.name, 40) + ": ") + "%{x:,.5~g}<extra></extra>",
      visible: !hidden.has(index),
    }));
    const numbers = scaled(look, log ? seen : values, log, bounds, { title: heading(data.x_label, look) });
    if (log) numbers.nticks = Math.min(numbers.nticks, Math.max(3, Math.floor(width / 100))); // "100k" beside "200k"
    return [
      traces,
      layout(look, {
        barmode: "relative",
        bargap: 0.3,
        hovermode: "closest",
        uniformtext: { mode: "hide", minsize: 10 },
        margin: { l: 8, r: 24, t: 8 + RULE_PX * rules.length, b: 48 },
        ...drawRules(rules, look, log, log ? Math.sqrt(bounds[0] * bounds[1]) : most / 2),
        xaxis: numbers,
        yaxis: axis(look, {
          type: "category",
          autorange: "reversed",
          showgrid: false,
          tickvals: names,
          ticktext: data.names.map((name) => short(name, 28) + " "),
          tickfont: { color: look.ink },
        }),
      }),
    ];
  };

  // Beyond SHOWN classes a cell would be smaller than a pixel: consecutive classes share one, which holds their sum.
  const grouped = (names, values) => {
    const size = Math.ceil(names.length / SHOWN);
    const count = Math.ceil(names.length / size);
    const sums = Array.from({ length: count }, () => new Array(count).fill(0));
    values.forEach((row, y) => row.forEach((value, x) => (sums[Math.floor(y / size)][Math.floor(x / size)] += value)));
    const spans = sums.map((_, i) => `${names[i * size]} \u2026 ${names[Math.min(names.length, (i + 1) * size) - 1]}`);
    return size === 1 ? [1, names, values] : [size, spans, sums];
  };

  // One heat map from -1 to 1: agreement below zero as the share of its row, all else above zero by its square root, so
  // that a single error stays in sight beside thousands of right answers.
  const drawMatrix = (data, look, hidden, width) => {
    const [size, labels, values] = grouped(data.names, data.values);
    const count = labels.length;
    const names = categories(labels);
    const sums = values.map((row) => row.reduce((sum, value) => sum + value, 0));
    const most = values.reduce((high, row, y) => row.reduce((best, value, x) => (x === y ? best : Math.max(best, value)), high), 0);
    const written = count <= WRITTEN && width / count >= WRITTEN_PX;
    const faint = 0.12; // a cell that is not zero never looks like one that is
    const shade = (value, x, y) => {
      if (!value) return 0;
      return x === y ? -faint - (1 - faint) * (value / sums[y]) : faint + (1 - faint) * Math.sqrt(value / most);
    };
    const unit = size === 1 ? "" : ` (${size} classes to a cell)`;
    const ticks = { type: "category", showgrid: false, showticklabels: count <= LABELLED, tickvals: names, ticktext: labels.map((name) => short(name, 16)) };
    return [
      [
        {
          type: "heatmap",
          x: names,
          y: names,
          z: values.map((row, y) => row.map((value, x) => shade(value, x, y))),
          hovertext: values,
          text: written ? values.map((row) => row.map((value) => (value ? brief(value) : ""))) : undefined,
          customdata: values.map((row, y) => row.map((value) => (sums[y] ? value / sums[y] : 0))),
          zmin: -1,
          zmax: 1,
          showscale: false,
          colorscale: [
            [0, look["agree-high"]],
            [0.5 - faint / 2, look["agree-low"]],
            [0.5, look.surface],
            [0.5 + faint / 2, look["differ-low"]],
            [1, look["differ-high"]],
          ],
          xgap: count <= LABELLED ? 1 : 0,
          ygap: count <= LABELLED ? 1 : 0,
          texttemplate: written ? "%{text}" : "",
          hovertemplate:
            plain(data.y_label) + ": %{y}<br>" + plain(data.x_label) + ": %{x}<br>%{hovertext:,.6~g} (%{customdata:.1%} of the row)<extra></extra>",
        },
      ],
      layout(look, {
        margin: { l: 8, r: 8, t: 26, b: 8 },
        xaxis: axis(look, { ...ticks, title: heading(data.x_label + unit, look), constrain: "domain", tickangle: count > 12 ? -90 : count > 5 ? -45 : 0 }),
        yaxis: axis(look, { ...ticks, title: heading(data.y_label + unit, look), autorange: "reversed", scaleanchor: "x", constrain: "domain" }),
      }),
    ];
  };

  const WIDE = 760; // pixels from which both pictures of a surface stand side by side
  const SOLID = 12; // surfaces in three dimensions: of more than 16, browsers take the first ones away again
  // Asked by the first surface only: browsers without a GPU complain on the console about the question.
  let solid;
  const hasWebGL = () => {
    const canvas = document.createElement("canvas");
    return Boolean(canvas.getContext("webgl") || canvas.getContext("webgl2"));
  };
  const surfaces = [];

  // Lines of equal height, and the same in three dimensions where the browser can draw them. Heights that span powers of
  // ten are drawn by their logarithm, and written as they are.
  const drawSurface = (data, look, hidden, width, paper) => {
    const known = data.z.flat().filter((value) => value !== null && (!data.log_z || value > 0));
    const [least, most] = known.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);
    const height = (value) => (value === null ? null : data.log_z ? (value > 0 ? Math.log10(value) : Math.log10(least)) : value);
    const levels = 12;
    const [low, high] = [height(least), height(most)];
    const ticks = Array.from({ length: 5 }, (_, i) => low + ((high - low) * i) / 4);
    const written = { tickvals: ticks, ticktext: ticks.map((value) => brief(data.log_z ? 10 ** value : value)) };
    if (!surfaces.includes(data)) surfaces.push(data);
    solid ??= hasWebGL();
    const both = solid && !paper && width >= WIDE && surfaces.indexOf(data) < SOLID;
    const share = both ? 0.46 : 1;
    const shared = {
      x: data.x,
      y: data.y,
      z: data.z.map((row) => row.map(height)),
      customdata: data.z,
      text: data.z.map((row) => row.map((value) => (value === null ? "" : brief(value)))),
      hovertemplate: `${plain(data.z_label)} %{text}<br>${plain(data.x_label)} %{x:.4~g}<br>${plain(data.y_label)} %{y:.4~g}<extra></extra>`,
      colorscale: [
        [0, look["agree-high"]],
        [0.45, look["agree-low"]],
        [0.55, look["differ-low"]],
        [1, look["differ-high"]],
      ],
    };
    const traces = [
      {
        ...shared,
        type: "contour",
        contours: { start: low, end: high, size: (high - low) / levels || 1, coloring: "fill" },
        line: { color: look.muted, width: 0.6 },
        colorbar: { x: share, xpad: 6, thickness: 10, outlinewidth: 0, tickfont: { color: look.muted }, ...written },
      },
      {
        type: "scatter",
        x: data.marks.map((mark) => mark.x),
        y: data.marks.map((mark) => mark.y),
        customdata: data.marks.map((mark) => plain(mark.name)),
        text: data.marks.map((mark, i) => (data.path && i && i + 1 < data.marks.length ? "" : short(mark.name, 24))),
        textposition: "top center",
        textfont: { color: look.ink },
        mode: data.path ? "lines+markers+text" : "markers+text",
        line: { color: look.ink, width: 1.5 },
        marker: { color: look.ink, size: 7, symbol: data.path ? "circle" : "x" },
        hovertemplate: "%{customdata}<extra></extra>",
        cliponaxis: false,
      },
    ];
    if (both) traces.push({ ...shared, type: "surface", showscale: false, contours: { z: { show: true, color: look.muted, width: 1 } } });
    const side = (text) => axis(look, { title: heading(text, look), showgrid: false });
    const edge = (text) => ({ title: { text: plain(text), font: { color: look.muted, size: 11 } }, color: look.muted, gridcolor: look.grid, nticks: 4 });
    return [
      traces,
      layout(look, {
        margin: { l: 8, r: 8, t: 12, b: 8 },
        hovermode: "closest",
        xaxis: { ...side(data.x_label), domain: [0, share - 0.01] },
        yaxis: side(data.y_label),
        scene: {
          domain: { x: [0.56, 1] },
          xaxis: edge(data.x_label),
          yaxis: edge(data.y_label),
          zaxis: { ...edge(data.z_label), ...written },
          camera: { eye: { x: 1.55, y: -1.55, z: 0.9 }, center: { x: 0, y: 0, z: -0.15 } },
        },
      }),
    ];
  };

  const CELL_PX = 90; // width of a column from which the texts of its cells fit

  const drawGrid = (data, look, hidden, width) => {
    const columns = data.columns?.length ? categories(data.columns) : null;
    const written = data.texts?.length && width / data.x.length >= CELL_PX;
    // Under a text only the colours on which the ink of this theme is legible.
    const ramp = data.texts?.length ? look.ramp.slice(0, 3) : look.ramp;
    const across = columns
      ? axis(look, { type: "category", title: heading(data.x_label, look), showgrid: false, tickvals: columns, ticktext: data.columns.map((name) => short(name, 16)), tickangle: width / data.x.length < CELL_PX ? -45 : 0 })
      : scaled(look, data.x, false, null, { title: heading(data.x_label, look), showgrid: false });
    const names = categories(data.names);
    const shade = (value) => (value === null || (data.log && value <= 0) ? null : data.log ? Math.log10(value) : value);
    const shades = data.values.map((row) => row.map(shade));
    const known = shades.flat().filter((value) => value !== null);
    const [least, most] = known.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);
    const ticks = Array.from({ length: 5 }, (_, i) => least + ((most - least) * i) / 4);
    const texts = ticks.map((tick) => brief(Number((data.log ? 10 ** tick : tick).toPrecision(2))));
    return [
      [
        {
          type: "heatmap",
          x: columns ?? data.x,
          y: names,
          z: shades,
          hovertext: data.values,
          text: written ? data.texts.map((row) => row.map((text) => plain(text).replaceAll("\n", "<br>"))) : undefined,
          texttemplate: written ? "%{text}" : "",
          textfont: { color: look.ink },
          colorscale: ramp.map((color, i) => [i / (ramp.length - 1), color]),
          colorbar: { tickvals: ticks, ticktext: texts, thickness: 10, outlinewidth: 0, tickfont: { color: look.muted }, title: { text: plain(data.z_label), side: "right", font: { color: look.muted, size: 12 } } },
          xgap: columns ? 1 : 0,
          ygap: data.names.length <= LABELLED ? 1 : 0,
          hoverongaps: false,
          hovertemplate: "%{y}<br>" + plain(data.x_label) + (columns ? " %{x}" : " %{x:,.6~g}") + "<br>%{hovertext:,.4~g}<extra></extra>",
        },
      ],
      layout(look, {
        hovermode: "closest",
        margin: { l: 8, r: 8, t: 8, b: 8 },
        xaxis: across,
        yaxis: axis(look, {
          type: "category",
          autorange: "reversed",
          showgrid: false,
          title: columns || data.names.length > LABELLED ? heading(data.y_label, look) : undefined,
          showticklabels: data.names.length <= LABELLED,
          tickvals: names,
          ticktext: data.names.map((name) => short(name, 28) + " "),
          tickfont: { color: look.ink, size: 11 },
        }),
      }),
    ];
  };

  const draw = { lines: drawLines, points: drawPoints, bars: drawBars, matrix: drawMatrix, surface: drawSurface, grid: drawGrid };

  const charts = Array.from(document.querySelectorAll('script[type="application/json"]'), (script) => {
    const article = script.closest("article");
    const panel = JSON.parse(script.textContent);
    const target = article.querySelector(".chart > div");
    const onCanvas = globalThis.canvasCharts?.[panel.kind];
    if (onCanvas) return onCanvas(article, target, panel, { brief, PAPER_PX });
    const hidden = new Set();
    const show = (look, paper) => {
      const [data, arrangement] = draw[panel.kind](panel.data, look, hidden, target.clientWidth, paper, target.clientHeight);
      const height = target.clientHeight;
      Object.assign(arrangement, paper ? { autosize: false, width: PAPER_PX, height: Math.min(height, PAPER_PX) } : {});
      return Plotly.react(target, data, arrangement, {
        responsive: true,
        displaylogo: false,
        displayModeBar: "hover",
        modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]], // none that would send the data away
        toImageButtonOptions: { format: "svg", filename: panel.name },
      });
    };
    article.querySelectorAll(".legend button").forEach((button, index) =>
      button.addEventListener("click", () => {
        const visible = hidden.delete(index) || !hidden.add(index);
        button.setAttribute("aria-pressed", String(visible));
        show(theme(), false);
      }),
    );
    return show;
  });

  const drawAll = (paper) => {
    const look = theme();
    charts.forEach((show) => show(look, paper));
  };
  drawAll(false);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawAll(false));
  addEventListener("beforeprint", () => {
    root.classList.add("printing");
    drawAll(true);
  });
  addEventListener("afterprint", () => {
    root.classList.remove("printing");
    drawAll(false);
  });

  // Enlarged pixels of a small image are what the network saw; a large one is shown smooth.
  document.querySelectorAll("figure img").forEach((image) => {
    const mark = () => image.classList.toggle("small", image.naturalWidth < 96);
    image.complete ? mark() : image.addEventListener("load", mark);
  });
})();
