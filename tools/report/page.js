// Draws what tools/report/page.py put into #data. One state, one function per section, all redrawn by draw().
"use strict";

let data = JSON.parse(document.getElementById("data").textContent);
let entities = []; // what is a line of its own: the runs, or the means over seeds
const $ = (id) => document.getElementById(id);
const dark = matchMedia("(prefers-color-scheme: dark)");
const state = {
  hidden: new Set(), step: null, place: "median", heat: null, axis: "steps", log: false, whole: false, smooth: 0.8,
  colour: "run", dash: "run", seeds: false, find: "", zoom: null, resets: 1, sort: "val loss", falling: false,
};
const FEW = 30; // points up to which a line shows them, and from which it can be smoothed
const SVG_DASHES = { solid: "", dash: "7 4", dot: "2 3" };
const GAIN_MARKERS = {
  next_norm: "circle", post_norm: "diamond", out_norm: "square", q_norm: "triangle-up", k_norm: "triangle-down",
};
const quantity = (id) => data.tables.find((q) => q.id === id);
const matches = (run) => state.find.toLowerCase().split(/\s+/)
  .every((word) => `${run.label} ${Object.values(run.settings).join(" ")}`.toLowerCase().includes(word));
const shown = () => entities.filter((run) => !state.hidden.has(run.label) && matches(run));
const last = (list) => list[list.length - 1];
const number = (v) => (v === null || v === undefined ? "–"
  : v.toLocaleString("en", Number.isInteger(v) ? {} : { maximumSignificantDigits: 4 }));

function make(tag, text = "", attributes = {}) {
  const element = document.createElement(tag);
  element.textContent = text;
  Object.assign(element, attributes);
  return element;
}

const signed = (v) => (v >= 0 ? `+${v.toFixed(4)}` : v.toFixed(4));

// ---- how a run looks, and where its steps are on the page's x axis

const natural = new Intl.Collator("en", { numeric: true }).compare;
const kindsOf = (field) => [...new Set(data.runs.map((run) => run.settings[field]))].sort(natural);

function style(run) {
  const colours = dark.matches ? data.palette.dark : data.palette.light;
  const rank = (field, otherwise) => (field === "run" ? otherwise : kindsOf(field).indexOf(run.settings[field]));
  const dash = rank(state.dash, state.colour === "run" ? run.index : 0);
  const color = colours[rank(state.colour, run.index) % colours.length];
  return { color, dash: data.palette.dashes[dash % data.palette.dashes.length] };
}

const faint = (color, alpha) => color + Math.round(255 * alpha).toString(16).padStart(2, "0");

// Linear between the points of a curve whose steps rise; outside of them its ends.
function interpolate(steps, values, step) {
  let low = 0, high = steps.length - 1;
  if (step <= steps[0]) return values[0];
  if (step >= steps[high]) return values[high];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (steps[middle] <= step) low = middle; else high = middle;
  }
  return values[low] + (values[high] - values[low]) * (step - steps[low]) / (steps[high] - steps[low]);
}

function xs(run, steps) {
  if (state.axis === "steps") return steps;
  const scale = run.scales[state.axis];
  if (!scale) return steps.map(() => null);
  return steps.map((step) => (state.axis === "hours" ? interpolate(...scale, step) : step * scale));
}

// ---- seeds: a mean of runs has the form of a run, with what its members reach up and down to

function meanOfSeeds(members) {
  if (members.length === 1) return members[0];
  const pairs = (kind, merge) => Object.fromEntries(Object.keys(members[0][kind])
    .filter((id) => members.every((run) => run[kind][id]))
    .map((id) => [id, merge(members.map((run) => run[kind][id]))]));
  return {
    ...members[0], label: `${members[0].label} (${members.length} seeds)`, name: `${members[0].name} (${members.length} seeds)`, marks: { spike: [], diverged: [] },
    curves: pairs("curves", meanOfCurves), tables: pairs("tables", meanOfTables),
  };
}

const average = (numbers) => {
  const finite = numbers.filter((v) => v !== null);
  return finite.length ? finite.reduce((a, b) => a + b, 0) / finite.length : null;
};

function meanOfCurves(curves) {
  const lines = curves.map((c) => c.mean || [c.steps, c.values]);
  const end = Math.min(...lines.map(([steps]) => last(steps)));
  const steps = lines[0][0].filter((step) => step <= end);
  const all = steps.map((step) => lines.map((line) => interpolate(...line, step)));
  return { ...around(all), steps };
}

const around = (all) => ({
  values: all.map(average), low: all.map((v) => extent(v)[0]), high: all.map((v) => extent(v)[1]),
});

function meanOfTables(tables) {
  const [first] = tables;
  const rows = first.steps.map((step) => {
    const theirs = tables.map((t) => rowAt(t, step));
    const column = (part, k) => tables.map((t, n) => (t[part] || t.values)[theirs[n]][k] ?? null);
    return ["values", "low", "high"].map((part, i) => first.places.map((_, k) => (
      i === 0 ? average(column(part, k)) : extent(column(part, k))[i - 1])));
  });
  return { ...first, values: rows.map((r) => r[0]), low: rows.map((r) => r[1]), high: rows.map((r) => r[2]) };
}

// ---- charts: drawn when they come into view, as a phone need not draw fifty at once

function layout(changes) {
  const css = getComputedStyle(document.documentElement);
  const [ink, line] = ["--soft", "--line"].map((name) => css.getPropertyValue(name).trim());
  const axis = { gridcolor: line, linecolor: line, zerolinecolor: line, tickcolor: line };
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false, hovermode: "closest",
    font: { family: "system-ui, sans-serif", size: 12, color: ink }, uirevision: state.resets,
    margin: { l: 58, r: 12, t: 18, b: 38 }, hoverlabel: { namelength: -1 },
    ...changes,
    xaxis: { ...axis, ...changes.xaxis }, yaxis: { ...axis, hoverformat: ".5g", ...changes.yaxis },
  };
}

const charts = new Map(); // id: a function that gives [traces, changes of the layout, words for the caption]
const waiting = new Set();
const queue = []; // of those that are in view: one a frame, so that the page stays quick
const inView = new IntersectionObserver((entries) => {
  const idle = !queue.length;
  queue.push(...entries.filter((e) => e.isIntersecting && waiting.has(e.target.id)).map((e) => e.target.id));
  if (idle && queue.length) requestAnimationFrame(drawNext);
}, { rootMargin: "100px" });

function drawNext() {
  const id = queue.shift();
  if ($(id)) drawNow(id);
  if (queue.length) requestAnimationFrame(drawNext);
}

function drawNow(id) {
  if (!waiting.delete(id) || $(id).closest("[hidden]")) return;
  const [traces, changes, words = ""] = charts.get(id)();
  $(id).parentElement.querySelector(".extreme").textContent = words;
  Plotly.react(id, traces, layout(changes), { displayModeBar: false, responsive: true });
  for (const line of $(id).querySelectorAll(".scatterlayer .trace")) line.style.display = "";
  if ($(id).dataset.listens) return;
  $(id).dataset.listens = "yes";
  $(id).on("plotly_hover", (event) => { lift(event.points[0].data.meta); readOut(id, event.points[0]); });
  $(id).on("plotly_unhover", () => lift(null));
  $(id).on("plotly_relayout", (change) => zoomed(id, change));
}

// Observing anew reports at once whether the chart is in view.
function plot(id, chart) {
  charts.set(id, chart);
  waiting.add(id);
  inView.unobserve($(id));
  inView.observe($(id));
}

addEventListener("beforeprint", () => [...waiting].forEach(drawNow));

function figures(parent, entries) {
  const ids = [...$(parent).querySelectorAll(".chart")].map((chart) => chart.id);
  if (ids.join() === entries.map(({ id }) => id).join()) return;
  ids.forEach((id) => { waiting.delete(id); inView.unobserve($(id)); Plotly.purge(id); });
  $(parent).replaceChildren(...entries.map(({ id, title, about }) => {
    const figure = make("figure"), caption = make("figcaption", title);
    caption.append(make("span", about), make("span", "", { className: "extreme" }));
    const button = make("button", "⤢", { title: "enlarge, save as PNG or SVG", onclick: () => enlarge(id, title) });
    button.setAttribute("aria-label", `enlarge ${title}`);
    figure.append(caption, button, make("div", "", { className: "chart", id }));
    return figure;
  }));
}

// One run before all others: in every chart that is drawn, in the chips and in the table.
function lift(label) {
  for (const line of document.querySelectorAll(".scatterlayer .trace")) {
    const { trace } = line.__data__[0];
    line.style.opacity = label === null || trace.meta === undefined || trace.meta === label ? trace.opacity : 0.1;
  }
  for (const element of document.querySelectorAll("[data-run]")) {
    element.classList.toggle("faded", label !== null && element.dataset.run !== label);
  }
}

// A press shows at once: what it hides goes before the charts are drawn anew with what is left.
function veil() {
  for (const line of document.querySelectorAll(".scatterlayer .trace")) {
    if (state.hidden.has(line.__data__[0].trace.meta)) line.style.display = "none";
  }
}

// What all lines have at the pointer's x, the largest first.
function readOut(id, point) {
  if (!$(id).dataset.linked || !point.data.meta) return;
  const found = new Map();
  for (const trace of $(id).data) {
    if (!trace.meta || trace.spread || trace.x.length < 2) continue;
    const at = interpolate(trace.x, trace.x.map((_, i) => i), point.x);
    const y = trace.y[Math.round(at)];
    if (y !== null && y !== undefined) found.set(trace.name, y);
  }
  const order = [...found].sort((a, b) => b[1] - a[1]).slice(0, 12).map(([name, y]) => `${name} ${number(y)}`);
  $(id).parentElement.querySelector(".extreme").textContent = `at ${number(point.x)} ${state.axis}: ${order.join(" · ")}`;
}

// A zoom in x is that of every chart over time.
function zoomed(id, change) {
  if (!$(id).dataset.linked) return;
  if (change["xaxis.autorange"]) return zoom(null);
  if (change["xaxis.range[0]"] !== undefined) zoom([change["xaxis.range[0]"], change["xaxis.range[1]"]]);
}

function zoom(range) {
  state.zoom = range;
  if (range === null) state.resets += 1;
  $("reset").disabled = range === null;
  draw();
}

function timeAxis(id) {
  $(id).dataset.linked = "yes";
  const range = state.zoom ? { range: [...state.zoom], autorange: false } : { autorange: true };
  return { title: { text: state.axis }, uirevision: JSON.stringify(state.zoom), ...range };
}

function enlarge(id, title) {
  const [traces, changes] = charts.get(id)();
  const css = getComputedStyle(document.documentElement);
  $("enlarged").showModal();
  Plotly.newPlot("large", traces, layout({
    ...changes, title: { text: title }, showlegend: true, legend: { orientation: "h", y: -0.12, yanchor: "top" },
    margin: { l: 60, r: 20, t: 50, b: 50 }, paper_bgcolor: css.getPropertyValue("--panel").trim(),
  }), { displayModeBar: false, responsive: true });
  const save = (format) => Plotly.downloadImage("large", { format, filename: id, width: 1200, height: 750, scale: 2 });
  $("save-png").onclick = () => save("png");
  $("save-svg").onclick = () => save("svg");
  $("enlarged").onclose = () => Plotly.purge("large");
}

// ---- axes

function extent(numbers) {
  let low = Infinity, high = -Infinity;
  for (const v of numbers) if (v !== null && v !== undefined) { low = Math.min(low, v); high = Math.max(high, v); }
  return [low, high];
}

// Logarithmic where the quantity is and the numbers span enough; never so narrow that noise looks like a jump; and of
// the runs that have not diverged, where there are such.
function axes(q, traces, xaxis) {
  const calm = traces.filter((trace) => !shown().find((run) => run.label === trace.meta && run.state === "diverged"));
  const cut = calm.length < traces.length && calm.some((trace) => trace.meta);
  const [low, high] = extent((cut ? calm : traces).flatMap((trace) => trace.y));
  const log = q.log && low > 0 && Math.log10(high / low) >= 0.5;
  const [bottom, top] = log ? [Math.log10(low), Math.log10(high)] : [low, high];
  const least = 0.05 * Math.max(Math.abs(low), Math.abs(high)), middle = (low + high) / 2, room = 0.05 * (top - bottom);
  const narrow = !log && high - low < least;
  const range = narrow ? { range: [middle - least / 2, middle + least / 2] } : cut ? { range: [bottom - room, top + room] } : { autorange: true };
  const { tickvals, ticktext } = log ? ticks(bottom, top) : {};
  const words = { text: [q.unit, log && "log"].filter(Boolean).join(", "), xref: "paper", yref: "paper", x: 0, y: 1 };
  return {
    xaxis, yaxis: { type: log ? "log" : "linear", ...range, ...(log && { tickvals: tickvals.map((v) => 10 ** v), ticktext }) },
    annotations: [{ ...words, showarrow: false, xanchor: "right", yanchor: "bottom", font: { size: 11 } }],
  };
}

// Ticks of a logarithmic scale from the decimal logarithms of its ends, written as plain numbers.
function ticks(low, high) {
  const span = high - low;
  const digits = span > 4 ? [1] : span > 1.5 ? [1, 3] : span > 0.4 ? [1, 2, 5] : [1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9];
  const every = Math.ceil(span / 8);
  const tickvals = [];
  for (let power = Math.floor(low); power <= Math.ceil(high); power += 1) {
    if (power % every === 0) tickvals.push(...digits.map((digit) => power + Math.log10(digit)));
  }
  return { tickvals, ticktext: tickvals.map((v) => String(+(10 ** v).toPrecision(2))) };
}

const positive = (q, v) => (v === undefined || (q.log && v !== null && v <= 0) ? null : v);

// Dotted lines to compare with, each value once, from the least to the largest x of the traces.
function references(id, traces) {
  const ends = extent(traces.flatMap((trace) => trace.x));
  const found = new Map(shown().flatMap((run) => run.references[id] || []).map(([name, y]) => [`${name} ${number(y)}`, y]));
  return [...found].slice(0, 4).map(([name, y]) => ({
    x: ends, y: [y, y], name, mode: "lines", hovertemplate: `${name}<extra></extra>`,
    line: { color: "#8a929c", width: 1.2, dash: "dot" },
  }));
}

// ---- curves over time

function smoothed(steps, values) {
  let mean = null;
  const weight = state.smooth;
  return values.map((v) => {
    if (v === null) return null;
    mean = mean === null ? v : weight * mean + (1 - weight) * v;
    return mean;
  });
}

const hover = (title) => `%{fullData.name}<br>%{x} ${state.axis}<br>${title} %{y}<extra></extra>`;

function spread(run, x, low, high, changes = {}) {
  const { color } = style(run);
  const common = {
    x, meta: run.label, name: run.name, mode: "lines", spread: true, showlegend: false, hoverinfo: "skip",
    line: { color: faint(color, 0.5), width: 0.7 }, ...changes,
  };
  return [{ ...common, y: low }, { ...common, y: high, fill: "tonexty", fillcolor: faint(color, 0.2 / Math.max(shown().length, 1)), ...changes.high }];
}

// The curve as recorded, extremes kept; where there is enough of it, smoothed as well, from the means of its buckets.
function curveTraces(run, curve, title, look) {
  const { color, dash } = style(run);
  const x = xs(run, curve.steps);
  const common = { meta: run.label, name: run.name, hovertemplate: hover(title) };
  if (curve.low) {
    return [...spread(run, x, curve.low, curve.high),
      { ...common, x, y: curve.values, mode: "lines", line: { color, dash, width: 2 } }];
  }
  const mode = curve.steps.length <= FEW ? "lines+markers" : "lines";
  const smooth = state.smooth > 0 && curve.steps.length > FEW && look.smooth;
  const raw = { ...common, x, y: curve.values, mode, marker: { size: 5, color }, line: { color, dash, width: look.width } };
  if (!smooth) return [raw];
  const [steps, values] = curve.mean || [curve.steps, curve.values];
  Object.assign(raw, { opacity: Math.max(0.5 / shown().length ** 0.5, 0.12), showlegend: false, spread: true, line: { color, width: 0.8 } });
  return [raw, { ...common, x: xs(run, steps), y: smoothed(steps, values), mode: "lines", line: { color, dash, width: 1.6 } }];
}

function drawLoss() {
  figures("losses", [{ id: "loss", title: "Loss", about: "nats per token" }]);
  plot("loss", () => {
    const range = state.whole ? null : lossRange();
    const traces = shown().flatMap((run) => lossTraces(run, range));
    const end = range && (state.log ? range.map(Math.log10) : range);
    const y = { title: { text: "nats per token" }, type: state.log ? "log" : "linear", uirevision: `${state.resets} ${end}` };
    return [[...traces, ...references("loss", traces)], { xaxis: timeAxis("loss"), yaxis: end ? { ...y, range: end } : { ...y, autorange: true } }];
  });
}

function lossTraces(run, range) {
  const { train_loss: train, val_loss: val } = run.curves;
  const traces = train ? curveTraces(run, train, "training loss", { width: 1.2, smooth: true }) : [];
  if (val) {
    const apart = val.steps[0] === 0 && val.steps.length > 1; // nothing was measured between step 0 and the next
    const gap = (list) => (apart && list ? [list[0], null, ...list.slice(1)] : list);
    const curve = { steps: gap(val.steps), values: gap(val.values), low: gap(val.low), high: gap(val.high) };
    if (apart) curve.steps[1] = 0;
    traces.push(...curveTraces(run, curve, "validation loss", { width: 2.4 })
      .map((trace) => ({ ...trace, name: `${run.name}, validation`, showlegend: !train })));
  }
  return train ? [...traces, ...lossMarks(run, train, range)] : traces;
}

// What the range cuts off, spikes that training has reported, and where the run ended.
function lossMarks(run, train, range) {
  const { color } = style(run);
  const mark = (steps, y, symbol, text) => ({
    x: xs(run, steps), y, text, mode: "markers", meta: run.label, name: run.name, showlegend: false, spread: true,
    marker: { color, size: 9, symbol }, hovertemplate: `${run.name}: %{text}<extra></extra>`, cliponaxis: false,
  });
  const points = train.steps.map((step, i) => [step, train.values[i]]).filter(([, y]) => y !== null);
  const high = points.filter(([step, y]) => range && y > range[1] && step > beginning(run));
  high.sort((a, b) => b[1] - a[1]).splice(20);
  const told = (list, what) => list.map(([step, y]) => `${what} ${number(y)} at step ${number(step)}`);
  const spikes = points.filter(([step]) => run.marks.spike.includes(step));
  const top = ([, y]) => (range ? Math.min(y, range[1]) : y);
  return [
    mark(high.map(([s]) => s), high.map(top), "triangle-up", told(high, "loss")),
    mark(spikes.map(([s]) => s), spikes.map(top), "star", told(spikes, "spike: loss")),
    ...(run.state === "diverged" && points.length
      ? [mark([last(points)[0]], [top(last(points))], "x", [run.stateText])] : []),
  ];
}

// The step from which the loss chart's range is taken.
const beginning = (run) => Math.max(run.warmup, 0.05 * run.lastStep);

function lossRange() {
  const runs = shown().some((run) => run.state !== "diverged") ? shown().filter((run) => run.state !== "diverged") : shown();
  const numbers = [], first = [];
  for (const run of runs) {
    for (const curve of [run.curves.train_loss, run.curves.val_loss].filter(Boolean)) {
      const x = xs(run, curve.steps);
      const inside = (i) => (state.zoom ? x[i] >= state.zoom[0] && x[i] <= state.zoom[1] : curve.steps[i] >= beginning(run));
      const values = curve.values.filter((v, i) => v !== null && inside(i));
      numbers.push(...values);
      first.push(...values.slice(0, 3));
    }
  }
  if (numbers.length < 2) return null;
  numbers.sort((a, b) => a - b);
  const low = numbers[0], high = Math.max(numbers[Math.floor(0.99 * (numbers.length - 1))], ...first);
  const room = 0.04 * (high - low) || 0.01;
  return [low - room, high + room];
}

function drawCurves() {
  const entries = data.curves.map((q) => ({ ...q, id: `curve-${q.id}` }));
  figures("main-curves", entries.filter((q) => q.main));
  figures("other-curves", entries.filter((q) => !q.main));
  $("others").hidden = entries.every((q) => q.main);
  for (const q of data.curves) {
    plot(`curve-${q.id}`, () => {
      const traces = shown().filter((run) => run.curves[q.id]).flatMap((run) => {
        const curve = run.curves[q.id], clean = (list) => list && list.map((v) => positive(q, v));
        return curveTraces(run, { ...curve, values: clean(curve.values), low: clean(curve.low) }, q.title, { width: 1.6, smooth: q.id !== "train_lr" });
      });
      const all = [...traces, ...references(q.id, traces)];
      const ends = shown().filter((run) => run.curves[q.id]);
      const words = ends.map((run) => `${run.name} ${number(last(run.curves[q.id].values))}`).join(", ");
      return [all, axes(q, all, timeAxis(`curve-${q.id}`)), ends.length < 5 && words ? `last: ${words}` : ""];
    });
  }
}

// ---- tables of depth and time

// The last recorded row at or before the chosen step; the first one if there is none.
function rowAt(table, step) {
  let row = 0;
  while (row + 1 < table.steps.length && table.steps[row + 1] <= step) row += 1;
  return row;
}

const having = (id) => shown().filter((run) => run.tables[id]);
const atPlace = (run, place, step) => `${run.name}, ${place}, step ${number(step)}`;

function drawProfiles() {
  for (const q of data.tables) {
    plot(`profile-${q.id}`, () => {
      const traces = having(q.id).flatMap((run) => profileTraces(q, run));
      const all = [...traces, ...references(q.id, traces)];
      const layers = Math.max(...having(q.id).map((run) => run.layers), 1);
      const every = Math.ceil(layers / 6), ends = Array.from({ length: layers }, (_, i) => i).filter((i) => i % every === 0);
      const names = { tickvals: ends.map((i) => i + 0.5), ticktext: ends.map((i) => `${i} attn`), title: { text: "layer" } };
      const old = having(q.id).map((run) => [run.name, run.tables[q.id].steps[rowAt(run.tables[q.id], state.step)]])
        .filter(([, step]) => step !== state.step).slice(0, 3).map(([name, step]) => `${name} as of step ${number(step)}`);
      return [all, axes(q, all, names), old.join(", ")];
    });
  }
}

function profileTraces(q, run) {
  const table = run.tables[q.id], row = rowAt(table, state.step);
  const values = table.values[row];
  const few = run.layers * shown().length <= FEW;
  const mode = q.per === "head" ? "markers" : few ? "lines+markers" : "lines";
  return [...kinds(q, table)].flatMap(([kind, indices], n) => {
    const x = indices.map((k) => table.heights[k]);
    const pick = (list) => indices.map((k) => positive(q, list[k]));
    const line = {
      x, y: pick(values), text: indices.map((k) => table.places[k]), meta: run.label, name: run.name, showlegend: n === 0,
      hovertemplate: `%{fullData.name}<br>%{text}, step ${number(table.steps[row])}<br>${q.title} %{y}<extra></extra>`,
      mode, line: { ...style(run), width: 1.8 },
      marker: { color: style(run).color, size: 5, symbol: GAIN_MARKERS[kind] || "circle" },
    };
    return run.label.endsWith("seeds)") ? [...spread(run, x, pick(table.low[row]), pick(table.high[row])), line] : [line];
  });
}

// Places at a depth, in groups that a line may join: the gains of each kind of norm are a line of their own.
function kinds(q, table) {
  const groups = new Map();
  table.places.forEach((place, k) => {
    if (table.heights[k] === null) return;
    const kind = q.per === "norm" ? table.norms[k] || "next_norm" : "";
    groups.set(kind, [...(groups.get(kind) || []), k]);
  });
  return groups;
}

// One colour scale for all runs, also the hidden ones, from the 1st to the 99th percentile of what is drawn.
function drawHeats() {
  const q = quantity(state.heat), part = q.alarm === "low" ? "low" : "high";
  const runs = entities.filter((run) => run.tables[q.id]);
  figures("heats", runs.map((run) => ({ id: `heat-${run.index}`, title: run.label, about: "" })));
  const cells = (table) => table[part] || table.values;
  const tone = (v) => (positive(q, v) === null ? null : q.log ? Math.log10(v) : v);
  const all = runs.flatMap((run) => cells(run.tables[q.id]).flat()).map(tone).filter((v) => v !== null).sort((a, b) => a - b);
  const low = all[Math.floor(0.01 * all.length)] ?? 0, high = all[Math.ceil(0.99 * all.length) - 1] ?? 1;
  const back = (v) => String(+(q.log ? 10 ** v : v).toPrecision(3));
  const colorscale = data.palette.heat.map((colour, i, list) => [i / (list.length - 1), colour]);
  [$("heat-low").textContent, $("heat-high").textContent] = [back(low), back(high)];
  $("heat-bar").style.background = `linear-gradient(90deg, ${data.palette.heat.join(", ")})`;
  $("heat-hint").textContent = `one scale for all runs${q.log ? ", logarithmic" : ""}, from the 1st to the 99th percentile; where several steps share a column, the ${part === "low" ? "least" : "largest"} of them`;
  for (const run of runs) {
    const id = `heat-${run.index}`;
    $(id).parentElement.hidden = !shown().includes(run);
    plot(id, () => {
      const table = run.tables[q.id];
      const keep = table.places.map((_, k) => k).filter((k) => table.heights[k] !== null);
      const column = (convert) => keep.map((k) => cells(table).map((row) => convert(row[k])));
      return [[{
        type: "heatmap", x: xs(run, table.steps), y: keep.map((k) => table.places[k]), z: column(tone), zmin: low, zmax: high,
        customdata: column((v) => v), colorscale, showscale: false,
        hovertemplate: `%{x} ${state.axis}<br>%{y}: %{customdata:.5g}<extra></extra>`,
      }], { xaxis: timeAxis(id), yaxis: { type: "category", nticks: 8, tickfont: { size: 10 } }, margin: { l: 84, r: 8, t: 8, b: 36 } }];
    });
  }
}

const within = (place, chosen) =>
  place === chosen || place.startsWith(`${chosen}.`) || chosen.startsWith(`${place}.`);

// Of each row the least, the median or mean, and the largest, over all places or those within the chosen one.
function summary(q, table) {
  const all = ["median", "mean", "max", "min"].includes(state.place);
  const chosen = table.places.map((_, k) => k).filter((k) => all || within(table.places[k], state.place));
  return table.steps.map((_, row) => {
    const pick = (part) => chosen.map((k) => [positive(q, (table[part] || table.values)[row][k]), table.places[k]])
      .filter(([v]) => v !== null).sort((a, b) => a[0] - b[0]);
    const [low, values, high] = ["low", "values", "high"].map(pick);
    if (!values.length) return { low: [null], middle: null, high: [null] };
    const middle = state.place === "mean" ? average(values.map(([v]) => v)) : values[Math.floor(values.length / 2)][0];
    return { low: low[0], middle, high: last(high) };
  });
}

function drawTimes() {
  for (const q of data.tables) {
    const id = `time-${q.id}`;
    plot(id, () => {
      const ends = having(q.id).map((run) => ({ run, table: run.tables[q.id], rows: summary(q, run.tables[q.id]) }));
      const traces = ends.flatMap((end) => timeTraces(q, end));
      const all = [...traces, ...references(q.id, traces)];
      return [all, axes(q, all, timeAxis(id)), extremeOf(q, ends)];
    });
  }
}

function timeTraces(q, { run, table, rows }) {
  const x = xs(run, table.steps), mode = table.steps.length <= FEW ? "lines+markers" : "lines";
  const line = { x, meta: run.label, name: run.name, mode, line: { ...style(run), width: 1.8 }, marker: { size: 5 } };
  const end = { max: "high", min: "low" }[state.place];
  const edge = (side) => ({
    text: rows.map((row) => row[side][1]), hoverinfo: "all", hovertemplate: `%{fullData.name}<br>%{x} ${state.axis}<br>${q.title} %{y} at %{text}<extra></extra>`,
  });
  if (end) return [{ ...line, ...edge(end), y: rows.map((row) => row[end][0]) }];
  const [low, high] = spread(run, x, rows.map((row) => row.low[0]), rows.map((row) => row.high[0]));
  return [{ ...low, ...edge("low") }, { ...high, ...edge("high") }, { ...line, y: rows.map((row) => row.middle), hovertemplate: hover(q.title) }];
}

// The end that means trouble, in words: how far, in which run, where and when.
function extremeOf(q, ends) {
  const side = q.alarm === "low" ? "low" : "high", sign = q.alarm === "low" ? -1 : 1;
  let best = null;
  for (const { run, table, rows } of ends) {
    rows.forEach((row, i) => {
      const [v, place] = row[side];
      if (v !== null && (best === null || sign * v > sign * best.v)) best = { v, words: atPlace(run, place, table.steps[i]) };
    });
  }
  return best ? `${side === "low" ? "least" : "largest"} ${number(best.v)}: ${best.words}` : "";
}

// ---- the words and the runs

const swatch = (run) => `<svg class="line"><line x1="0" y1="5" x2="30" y2="5" stroke-width="3" stroke="${style(run).color}" stroke-dasharray="${SVG_DASHES[style(run).dash]}"/></svg>`;

function lifts(element, label) {
  element.dataset.run = label;
  element.onmouseenter = element.onfocus = () => lift(label);
  element.onmouseleave = element.onblur = () => lift(null);
}

function drawTable() {
  const best = extent(data.runs.filter((run) => run.state !== "diverged").map((run) => run.cells["val loss"]))[0];
  const rows = data.runs.map((run) => ({ run, cells: {
    run: run.label, state: run.stateText, "val loss": run.cells["val loss"],
    "to the best": run.cells["val loss"] === null || run.state === "diverged" ? null : signed(run.cells["val loss"] - best),
    ...Object.fromEntries(data.fields.map((field) => [field, run.settings[field]])), ...run.cells,
  } }));
  const names = Object.keys(rows[0].cells), sign = state.falling ? -1 : 1;
  const order = ({ run, cells }) => [state.sort === "val loss" && run.state === "diverged" ? 1 : 0, cells[state.sort]];
  rows.sort((a, b) => {
    const [[lateA, x], [lateB, y]] = [order(a), order(b)];
    if (lateA !== lateB) return lateA - lateB;
    if (x === null || y === null) return (x === null) - (y === null);
    return sign * (typeof x === "number" && typeof y === "number" ? x - y : natural(String(x), String(y)));
  });
  const head = make("tr");
  for (const name of names) {
    const cell = make("th"), button = make("button", name);
    button.onclick = () => { state.falling = state.sort === name && !state.falling; state.sort = name; drawTable(); };
    cell.append(button);
    if (name === state.sort) cell.setAttribute("aria-sort", state.falling ? "descending" : "ascending");
    head.append(cell);
  }
  $("table").replaceChildren(head, ...rows.map(({ run, cells }) => {
    const row = make("tr");
    row.append(...names.map((name) => make("td", typeof cells[name] === "string" ? cells[name] : number(cells[name]))));
    if (data.runs.length > 1 && cells["val loss"] === best) row.children[names.indexOf("val loss")].className = "best";
    lifts(row, run.label);
    return row;
  }));
}

function drawIdentity() {
  const names = Object.keys(data.runs[0].identity);
  $("identity").replaceChildren(...[["", ...data.runs.map((run) => run.label)], ...names.map(
    (name) => [name, ...data.runs.map((run) => run.identity[name] ?? "unknown")],
  )].map((cells) => {
    const row = make("tr", "", { className: data.differing.includes(cells[0]) ? "differs" : "" });
    row.append(...cells.map((text) => make("td", text, { title: text })));
    return row;
  }));
  $("reports").replaceChildren(...data.runs.filter((run) => run.report.length).flatMap((run) => {
    const details = make("details", "", { open: true });
    details.append(make("summary", `${run.label}: ${run.stateText}`), make("pre", run.report.join("\n")));
    return [details];
  }));
}

// One press hides or shows a run, two show it alone, or all again; the name of a group does so for its runs.
function drawRuns() {
  const groups = state.colour === "run" ? [["", entities]]
    : kindsOf(state.colour).map((value) => [value, entities.filter((run) => run.settings[state.colour] === value)]);
  const press = (runs) => {
    const show = runs.every((run) => state.hidden.has(run.label));
    runs.forEach((run) => (show ? state.hidden.delete(run.label) : state.hidden.add(run.label)));
    veil();
    draw();
  };
  const alone = (run) => {
    const only = shown().length === 1 && !state.hidden.has(run.label);
    state.hidden = new Set(only ? [] : entities.filter((r) => r !== run).map((r) => r.label));
    draw();
  };
  const old = [...$("runs").children];
  const chips = groups.flatMap(([name, runs]) => [
    ...(name && runs.length ? [[`group ${name}`, name, runs]] : []), ...runs.map((run) => [run.label, run.label, run]),
  ]);
  if (old.map((b) => b.dataset.key).join("\n") !== chips.map(([key]) => key).join("\n")) {
    $("runs").replaceChildren(...chips.map(([key]) => make("button")));
  }
  [...$("runs").children].forEach((button, i) => {
    const [key, name, run] = chips[i];
    button.dataset.key = key;
    if (Array.isArray(run)) {
      Object.assign(button, { textContent: `${state.colour} ${name}`, className: "group", onclick: () => press(run) });
      return;
    }
    button.innerHTML = swatch(run);
    button.append(run.name, make("small", run.state === "diverged" ? run.stateText : number(run.cells["val loss"])));
    Object.assign(button, { title: name, onclick: () => press([run]), ondblclick: () => alone(run), hidden: !matches(run) });
    button.setAttribute("aria-pressed", String(!state.hidden.has(run.label)));
    lifts(button, name);
  });
}

function draw() {
  drawRuns();
  drawLoss();
  drawCurves();
  drawProfiles();
  if (data.tables.length) drawHeats();
  drawTimes();
}

// ---- what is chosen

function options(id, choices, chosen) {
  $(id).replaceChildren(...choices.map(([value, text, disabled]) => make("option", text, { value, disabled: !!disabled })));
  $(id).value = chosen;
}

function makeEntities() {
  const name = ({ label, settings }) => (label.length > 24 && data.fields.length ? Object.values(settings).join(", ") : label);
  const order = data.runs.map((run, index) => Object.assign(run, { index, name: name(run) }));
  const groups = Map.groupBy ? [...Map.groupBy(order, (run) => run.group).values()]
    : [...new Set(order.map((run) => run.group))].map((g) => order.filter((run) => run.group === g));
  $("seeds-label").hidden = groups.length === order.length;
  entities = state.seeds ? groups.map(meanOfSeeds) : order;
}

function makeControls() {
  const lacking = (axis) => data.runs.filter((run) => !run.scales[axis]).map((run) => run.label);
  options("axis", ["steps", "tokens", "hours", "FLOPs"].map((axis) => [
    axis, axis, axis !== "steps" && lacking(axis).length === data.runs.length]), state.axis);
  const missing = state.axis === "steps" ? [] : lacking(state.axis);
  $("axis-hint").textContent = [missing.length ? `${state.axis} not recorded: ${missing.join(", ")}.` : "", data.thinned].join(" ");
  const fields = data.fields.map((field) => [field, field]);
  options("colour", [["run", "run"], ...fields], state.colour);
  options("dash", [["run", "–"], ...fields], state.dash);
  options("heat-quantity", data.tables.map((q) => [q.id, q.title]), state.heat);
  const places = [...new Set(data.runs.flatMap((run) => (run.tables.grad_norm || { places: [] }).places))];
  options("place", [["median", "median, band from least to largest"], ["mean", "mean, band from least to largest"],
    ["max", "largest of all depths"], ["min", "least of all depths"], ...places.map((p) => [p, p])], state.place);
}

function makeSteps() {
  const steps = [...new Set(data.runs.flatMap((run) => Object.values(run.tables).flatMap((t) => t.steps)))].sort((a, b) => a - b);
  const atEnd = state.step === null || Number($("step").value) === Number($("step").max);
  const choose = () => { state.step = steps[$("step").value] ?? 0; $("step-shown").textContent = number(state.step); };
  $("step").max = Math.max(steps.length - 1, 0);
  $("step").value = atEnd ? steps.length - 1 : Math.max(steps.findLastIndex((step) => step <= state.step), 0);
  choose();
  $("step").oninput = () => { choose(); drawProfiles(); };
}

// From new data, with what was chosen kept.
function start() {
  const press = `${data.runs.length} runs; press one to hide it, twice to see it alone`;
  $("summary").textContent = [...(data.runs.length > 1 ? [press] : []), data.common].join("; ");
  const list = data.findings.map((text) => make("li", text));
  $("findings").replaceChildren(...list.slice(0, 6));
  $("more-findings").replaceChildren(...list.slice(6));
  $("more-findings").parentElement.hidden = list.length <= 6;
  state.heat = (quantity(state.heat) || data.tables[0] || {}).id;
  makeEntities();
  makeControls();
  makeSteps();
  drawTable();
  drawIdentity();
  figures("profiles", data.tables.map((q) => ({ ...q, id: `profile-${q.id}`, about: q.about + shapes(q) })));
  figures("times", data.tables.map((q) => ({ ...q, id: `time-${q.id}` })));
  draw();
}

function shapes(q) {
  const norms = new Set(data.runs.flatMap((run) => (q.per === "norm" && run.tables[q.id] ? run.tables[q.id].norms : [])));
  const named = Object.entries(GAIN_MARKERS).filter(([norm]) => norms.has(norm));
  return named.length > 1 ? `; ${named.map(([norm, shape]) => `${norm} ${shape}`).join(", ")}` : "";
}

function listen() {
  const choose = (id, key, read, then) => { $(id).oninput = (event) => { state[key] = read(event.target); then(); }; };
  const value = (target) => target.value, checked = (target) => target.checked;
  choose("axis", "axis", value, () => { state.zoom = null; makeControls(); zoom(null); });
  choose("smooth", "smooth", (target) => Number(target.value), () => { drawLoss(); drawCurves(); });
  choose("colour", "colour", value, draw);
  choose("dash", "dash", value, draw);
  choose("seeds", "seeds", checked, () => { state.hidden.clear(); makeEntities(); draw(); });
  choose("find", "find", value, draw);
  choose("whole", "whole", checked, drawLoss);
  choose("loss-log", "log", checked, drawLoss);
  choose("heat-quantity", "heat", value, drawHeats);
  choose("place", "place", value, drawTimes);
  $("smooth").value = state.smooth;
  $("reset").onclick = () => zoom(null);
  dark.addEventListener("change", draw);
}

// Asks the server that the page came from whether there are new rows; a page from a file asks nobody.
async function watch(version) {
  let next = version;
  try {
    const answer = await fetch(`data?after=${version}`);
    if (answer.status === 200) {
      data = await answer.json();
      next = data.version;
      start();
    }
    $("live").textContent = "live";
  } catch {
    $("live").textContent = "the server has ended; this is the last that it told";
  }
  setTimeout(() => watch(next), 2000);
}

// Many runs begin coloured by what differs most usefully.
if (data.runs.length > 8) {
  const few = data.fields.filter((field) => field !== "seed" && kindsOf(field).length <= 7);
  const wanted = ["placement", "norm", "qk_norm", "lr"].filter((field) => few.includes(field)).concat(few);
  if (wanted.length) state.colour = wanted[0];
}
listen();
start();
drawNow("loss");
if (data.watch) watch(data.version);
