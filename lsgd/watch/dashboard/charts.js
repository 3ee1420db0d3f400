"use strict";
// The charts of the page, as data and layouts for Plotly; nothing here touches the page.

const charts = (() => {
  // Okabe and Ito's colors, except the yellow, which is invisible on white; dashes distinguish further workers.
  const LIGHT = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c8c8c"];
  const DARK = ["#56b4e9", "#e69f00", "#00b386", "#cc79a7", "#d55e00", "#0072b2", "#8c8c8c"];
  const DASHES = ["solid", "dash", "dot", "dashdot", "longdash"];
  const FEW = 8; // with more workers, all are grey but a chosen one
  const ACTS = ["compute", "waiting", "exchange", "straggler", "cut", "away", "left"];
  const SIGNS = { straggler: "triangle-up", cut: "square-x-open", away: "circle-open", left: "x" };
  const LEVELS = 20;
  const room = (narrow, margin) => ({ ...margin, t: narrow ? 8 : 32 });  // for Plotly's buttons above a chart, which phones lack

  const theme = (dark) => ({
    lines: dark ? DARK : LIGHT,
    text: dark ? "#e8ebee" : "#1b1f24",
    quiet: dark ? "#5d6873" : "#b3bac2",
    grid: dark ? "#2b333b" : "#e3e6ea",
    back: dark ? "#191f25" : "#f6f7f9",
    consensus: dark ? "#ffffff" : "#000000",
    acts: dark
      ? ["#56b4e9", "#e69f00", "#00b386", "#d55e00", "#cc79a7", "#7a838c", "#3a424b"]
      : ["#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#a8b0b8", "#d3d8dd"],
  });

  // Plotly reads tags in texts; names and reasons come from other machines.
  const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const local = (seconds) => new Date(seconds * 1000 - new Date(seconds * 1000).getTimezoneOffset() * 60000);
  // The browser's own format may have 12 hours, and axes have 24.
  const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString("en", { hourCycle: "h23" });
  const dates = (narrow) => ({ type: "date", nticks: narrow ? 4 : 0, tickformatstops: [  // the day is said where a span has several
    { dtickrange: [null, 1000], value: "%H:%M:%S.%L" }, { dtickrange: [1000, 60000], value: "%H:%M:%S" },
    { dtickrange: [60000, 86400000], value: "%H:%M" }, { dtickrange: [86400000, null], value: "%b %-d" },
  ] });
  const short = (name) => plain(name.replace(/^node(\d+)\/worker(\d+)$/, "$1/$2"));

  function layout(t, more) {
    const axis = { gridcolor: t.grid, zeroline: false, linecolor: t.grid, automargin: false };
    const { xaxis, yaxis, ...others } = more;
    return {
      paper_bgcolor: t.back, plot_bgcolor: t.back, font: { color: t.text, size: 12 }, uirevision: "kept",
      hoverlabel: { bgcolor: t.back, font: { color: t.text } },
      xaxis: { ...axis, ...xaxis }, yaxis: { ...axis, ...yaxis }, ...others,
    };
  }

  // Many workers' curves as one trace, because every trace takes time to draw.
  function crowd(data, t) {
    const x = [], y = [], text = [];
    for (const [name, losses] of Object.entries(data.workers)) {
      losses.forEach((loss, k) => { if (loss !== false) { x.push(data.counts[k]); y.push(loss); text.push(name); } });
      x.push(null); y.push(null); text.push("");
    }
    return {
      x, y, text: text.map(plain), name: "workers", type: "scatter", mode: "lines", line: { color: t.quiet, width: 0.7 },
      hovertemplate: "%{text}: %{y:.5g} at %{x}<extra></extra>",
    };
  }

  function loss(data, t, { logarithmic, chosen, narrow }) {
    const names = Object.keys(data.workers), few = names.length <= FEW;
    const own = (name) => data.workers[name].map((_, k) => k).filter((k) => data.workers[name][k] !== false);
    const line = (name, i) => ({
      x: own(name).map((k) => data.counts[k]), y: own(name).map((k) => data.workers[name][k]), name: short(name), type: "scatter", mode: "lines",
      opacity: few && chosen && name !== chosen ? 0.3 : 1,
      line: {
        color: t.lines[i % t.lines.length], width: name === chosen ? 3 : 1.5,
        dash: DASHES[(i + Math.floor(i / t.lines.length)) % DASHES.length],
      },
      hovertemplate: `${plain(name)}: %{y:.5g} at %{x}<extra></extra>`,
    });
    const traces = few ? names.map(line) : [crowd(data, t)];
    if (!few && chosen in data.workers) traces.push(line(chosen, names.indexOf(chosen)));
    traces.push({
      x: data.consensus.map((p) => p[0]), y: data.consensus.map((p) => p[1]), name: "mean", type: "scatter",
      mode: "lines", line: { color: t.consensus, width: 2.5 }, hovertemplate: "mean: %{y:.5g} at %{x}<extra></extra>",
    });
    for (const [i, [name, points]] of Object.entries(data.held_out).entries()) traces.push({
      x: points.map((p) => p[0]), y: points.map((p) => p[1]), name: `${plain(name)} (held out)`, type: "scatter", mode: "lines+markers",
      line: { color: t.consensus, width: 2, dash: DASHES[1 + i % 4] }, marker: { size: 5 },
      hovertemplate: `${plain(name)}: %{y:.5g} at %{x}<extra></extra>`,
    });
    traces.push({
      x: data.leaders.map((p) => p[0]), y: data.leaders.map((p) => p[1]), name: "new leader", type: "scatter",
      mode: "markers", text: data.leaders.map((p) => plain(p[2])),
      marker: { symbol: "diamond-open", size: narrow || data.leaders.length > 50 ? 5 : 8, color: t.consensus, line: { width: 1.5 } },
      hovertemplate: "%{text} leads from %{x}<extra></extra>",
    });
    const legend = { orientation: "h", y: narrow ? -0.3 : -0.25 };  // the buttons are above
    return [traces, layout(t, {
      xaxis: { title: { text: "iterations of the run" }, rangemode: "tozero" },
      yaxis: { title: { text: "loss" }, type: logarithmic ? "log" : "linear" },
      legend, showlegend: true, margin: room(narrow, { l: 56, r: 12, b: narrow ? 100 : 76 }), uirevision: logarithmic ? "log" : "linear",
    })];
  }

  // The first layer is on top. Names are cut from the left, where many begin alike.
  function agreement(data, t, { narrow }) {
    const most = narrow ? 14 : 30, rows = data.layers.length;
    const names = data.layers.map((name) => plain(name.length > most ? `…${name.slice(1 - most)}` : name));
    const trace = {
      type: "heatmap", x: data.counts, y: data.layers.map((_, i) => i), z: data.rows, text: data.layers.map((name) => data.counts.map(() => plain(name))),
      colorscale: "Cividis", colorbar: { thickness: 12, tickfont: { size: 11 } },
      hovertemplate: "%{text}: %{z:.3f} at %{x}<extra></extra>", hoverongaps: false,
    };
    return [[trace], layout(t, {
      xaxis: { title: { text: "iterations of the run" }, nticks: narrow ? 4 : 0 },
      yaxis: { tickvals: data.layers.map((_, i) => i), ticktext: names, range: [rows - 0.5, -0.5], fixedrange: true, showgrid: false, tickfont: { size: 11 } },
      margin: room(narrow, { l: narrow ? 104 : 210, r: 12, b: 46 }), height: Math.max(170, 84 + 16 * rows),
    })];
  }

  const rowsOf = (workers) => workers <= 4 ? 20 : workers <= 16 ? 10 : 5;

  // Each worker is a band of thin rows. In a column, the number of rows in an act's color is the act's share of time.
  function timeline(span, gaps, t, { chosen, narrow }) {
    const names = Object.keys(span.rows), many = names.length;
    const rows = rowsOf(many), z = [], middle = {};
    const ends = [local(span.begin), local(span.begin + span.number * span.width_s)];
    names.forEach((name, i) => {
      const band = Array.from({ length: rows }, () => new Array(span.number).fill(null));
      const acts = span.rows[name].map((text) => Array.from(text, (c) => parseInt(c, 36) / LEVELS * rows));
      for (let k = 0; k < span.number; k++) {
        let sum = 0, from = 0;
        acts.forEach((act, number) => {
          sum += act[k];
          for (const to = Math.round(sum); from < to && from < rows; from++) band[from][k] = number;
        });
      }
      for (const [, state, , , begin, end] of gaps.filter((gap) => gap[0] === name)) {
        const first = Math.max(0, Math.round((begin - span.begin) / span.width_s));
        const last = end === null ? span.number : Math.min(span.number, Math.round((end - span.begin) / span.width_s));
        for (const row of band) for (let k = first; k < last; k++) row[k] = ACTS.indexOf(state);
      }
      middle[name] = z.length + (rows - 1) / 2;
      z.push(...band, new Array(span.number).fill(null));
    });
    const steps = t.acts.flatMap((colour, i) => [[i / ACTS.length, colour], [(i + 1) / ACTS.length, colour]]);
    const traces = [{
      x0: local(span.begin + span.width_s / 2), dx: span.width_s * 1000, y0: 0, dy: 1, z, type: "heatmap", showscale: false,
      zmin: -0.5, zmax: ACTS.length - 0.5, colorscale: steps, hoverinfo: "none", hoverongaps: true,
    }];
    const end = span.begin + span.number * span.width_s;
    const place = (r) => r[2] ? middle[r[2]] : (z.length - 2) / 2;  // of all bands where nobody leads
    for (const scope of ["local", "global"]) {
      const rounds = span.rounds.filter((r) => r[1] === scope && place(r) !== undefined);
      traces.push({
        x: rounds.map((r) => local(r[0])), y: rounds.map(place), type: "scatter", mode: "markers",
        marker: {
          symbol: scope === "global" ? "diamond" : "circle", size: (scope === "global" ? 8 : 5) - (narrow || rounds.length > 80 ? 2 : 0), color: "#fff",
          line: { color: "#000", width: 1 },
        },
        text: rounds.map((r) => `${scope} round ${r[6]}, ${plain(r[5])}${r[2] ? `<br>${plain(r[2])} leads` : ""}` +
          (r[3] === null ? "" : `<br>took ${r[3].toPrecision(3)} s`) + (r[4] === null ? "" : `, ${bytes(r[4])}`)),
        hovertemplate: "%{text}<extra></extra>", showlegend: false,
      });
    }
    const seen = gaps.filter((gap) => gap[0] in middle && (gap[5] ?? end) > span.begin);
    traces.push({
      x: seen.map((gap) => local(Math.max(gap[4], span.begin))), y: seen.map((gap) => middle[gap[0]]), type: "scatter",
      mode: "markers", showlegend: false, text: seen.map((gap) => plain(`${gap[0]} ${gap[1]}: ${gap[3] || gap[2]}`)),
      marker: { symbol: seen.map((gap) => SIGNS[gap[1]] || "x"), size: 10, color: t.text }, hovertemplate: "%{text}<extra></extra>",
    });
    const every = Math.ceil(many / 24), ticks = names.filter((_, i) => i % every === 0);
    const shapes = chosen in middle ? [{
      type: "rect", xref: "paper", x0: 0, x1: 1, y0: middle[chosen] - rows / 2, y1: middle[chosen] + rows / 2,
      line: { color: t.text, width: 2 },
    }] : [];
    return [traces, layout(t, {
      xaxis: { ...dates(narrow), range: ends }, shapes, uirevision: span.name,
      yaxis: { tickvals: ticks.map((n) => middle[n]), ticktext: ticks.map(short), range: [z.length - 0.5, -0.5], fixedrange: true, showgrid: false },
      margin: room(narrow, { l: 68, r: 68, b: 36 }), height: Math.min(680, Math.max(170, 84 + many * (many > 16 ? 9.5 : 34))),
    })];
  }

  function traffic(span, t, { narrow }) {
    const x = span.bytes_per_s.map((_, k) => local(span.begin + (k + 0.5) * span.width_s));
    const traces = [
      { x, y: span.bytes_per_s, name: "bytes per second", type: "scatter", mode: "lines", line: { color: t.acts[0], width: 2 } },
      { x, y: span.bytes_per_iteration, name: "bytes per iteration", type: "scatter", mode: "lines", yaxis: "y2", connectgaps: true, line: { color: t.acts[3], width: 2, dash: "dash" } },
    ].map((trace) => ({ ...trace, hovertemplate: `%{y:.3s}B ${trace.name.slice(6)}<extra></extra>` }));
    const axis = { rangemode: "tozero", tickformat: ".2~s", ticksuffix: "B", gridcolor: t.grid, zeroline: false };
    return [traces, layout(t, {
      xaxis: { ...dates(narrow), range: [local(span.begin), local(span.begin + span.number * span.width_s)] },
      yaxis: { ...axis, title: { text: narrow ? "" : "per second" } }, uirevision: span.name,
      yaxis2: { ...axis, title: { text: narrow ? "" : "per iteration" }, overlaying: "y", side: "right", showgrid: false },
      legend: { orientation: "h", y: narrow ? -0.2 : -0.15 }, margin: room(narrow, { l: 68, r: 68, b: narrow ? 72 : 42 }),
    })];
  }

  // The numbers of a column, for the line below the timeline.
  function column(span, gaps, row, k) {
    const names = Object.keys(span.rows), name = names[Math.floor(row / (rowsOf(names.length) + 1))];
    if (!name) return "";
    const seconds = span.begin + (k + 0.5) * span.width_s;
    const gap = gaps.find((g) => g[0] === name && g[4] <= seconds && (g[5] === null || seconds < g[5]));
    const acts = span.rows[name].map((text, i) => `${ACTS[i]} ${Math.round(parseInt(text[k], 36) / LEVELS * 100)} %`);
    return `${name} at ${clock(span.begin + k * span.width_s)}: ` + (gap ? `${gap[1]}, ${gap[3] || gap[2]}` : acts.join(", "));
  }

  function bytes(n) {
    if (n === null || n === undefined) return "–";
    const steps = ["B", "kB", "MB", "GB", "TB", "PB"];
    let i = 0;
    for (; n >= 999.5 && i < steps.length - 1; i++) n /= 1000;
    return `${i ? n.toPrecision(3) : Math.round(n)} ${steps[i]}`;
  }

  return { ACTS, theme, loss, agreement, timeline, traffic, column, bytes, clock };
})();
