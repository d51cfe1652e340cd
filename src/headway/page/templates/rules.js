// Named lines across a chart: across bars, and at some y of lines. charts.js gives it `short`, which cuts and escapes.
globalThis.chartRules = (short) => {
  "use strict";
  const RULE_PX = 16; // what a rule's name takes above the bars: each has a row of its own, so that none hides another

  // Lines across the bars; each name stands on that side of its line where there is more room.
  const drawRules = (rules, look, log, middle) => ({
    shapes: rules.map((rule, index) => ({
      type: "line",
      yref: "paper",
      x0: rule.at,
      x1: rule.at,
      y0: 0,
      y1: 1,
      line: { color: look.ink, width: 1.5, dash: ["solid", "dash", "dot"][index % 3] },
    })),
    annotations: rules.map((rule, index) => ({
      text: short(rule.name, 60),
      x: log ? Math.log10(rule.at) : rule.at,
      xanchor: rule.at > middle ? "right" : "left",
      yref: "paper",
      y: 1,
      yanchor: "bottom",
      yshift: RULE_PX * (rules.length - 1 - index),
      showarrow: false,
      font: { color: look.ink, size: 12 },
    })),
  });

  const LABEL_PX = 14; // what a name takes beside a chart
  const AROUND_PX = 72; // what labels take above and below the axes

  // Names of horizontal lines, right of the chart: as near to their lines as none covers another.
  const drawLevels = (rules, look, log, bounds, height, topLabel) => {
    const place = (at) => (log ? Math.log10(at) : at);
    const scale = (height - AROUND_PX) / (place(bounds[1]) - place(bounds[0]));
    const upwards = [...rules].sort((one, other) => one.at - other.at);
    const stands = upwards.map((rule) => place(rule.at) * scale);
    // Those that would meet share the mean of their distances.
    const pools = [];
    stands.forEach((stand, index) => {
      pools.push([stand - index * LABEL_PX, 1]);
      while (pools.length > 1 && pools.at(-2)[0] > pools.at(-1)[0]) {
        const [[one, count], [other, more]] = pools.splice(-2);
        pools.push([(one * count + other * more) / (count + more), count + more]);
      }
    });
    const starts = pools.flatMap(([start, count]) => new Array(count).fill(start));
    const names = upwards.map((rule, index) => ({
      text: short(rule.name, 40),
      xref: "paper",
      x: 1,
      xanchor: "left",
      y: place(rule.at),
      yanchor: "middle",
      yshift: starts[index] + index * LABEL_PX - stands[index],
      showarrow: false,
      font: { color: look.ink, size: 11 },
    }));
    const longest = Math.max(...rules.map((rule) => Math.min(40, rule.name.length)));
    return {
      margin: { l: 8, r: 12 + 6 * longest, t: 26, b: 8 },
      shapes: rules.map((rule) => ({ type: "line", xref: "paper", x0: 0, x1: 1, y0: rule.at, y1: rule.at, line: { color: look.ink, width: 1.5, dash: "dash" } })),
      annotations: [topLabel, ...names],
    };
  };

  // A range with room for all values: plotly's own leaves out lines that are no data.
  const chooseRange = (values, log) => {
    const known = values.filter((value) => value !== null && (!log || value > 0));
    const [least, most] = [Math.min(...known), Math.max(...known)];
    return log ? [least / 1.15, most * 1.15] : [Math.min(0, least), most + 0.1 * Math.abs(most)];
  };

  return { RULE_PX, drawRules, drawLevels, chooseRange };
};
