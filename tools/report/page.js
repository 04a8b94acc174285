// Draws what tools/report/page.py put into #data. One state, one function per section, all redrawn by draw().
"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);

// Okabe & Ito 2008, "Color Universal Design", without the yellow that white paper swallows; lighter on dark.
// Seven colours and three dashes have no common factor, so 21 runs differ, and neighbours differ in both.
const COLOURS = {
  light: ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#16191D"],
  dark: ["#4DA3E0", "#F2833A", "#2DC39B", "#E39AC6", "#F0B429", "#9AD4F5", "#F4F5F7"],
};
const DASHES = ["solid", "dash", "dot"];
const SVG_DASHES = ["", "7 4", "2 3"];
const GAIN_MARKERS = { next_norm: "circle", out_norm: "square", q_norm: "triangle-up", k_norm: "triangle-down" };

const dark = matchMedia("(prefers-color-scheme: dark)");
const state = { hidden: new Set(), step: null, place: "max", heat: "residual_rms", axis: "steps", log: false };
const shown = () => data.runs.map((run, i) => ({ run, i })).filter(({ i }) => !state.hidden.has(i));
const recorded = data.quantities.filter((q) => data.runs.some((run) => run.tables[q.id]));

function style(i) {
  const colours = dark.matches ? COLOURS.dark : COLOURS.light;
  return { color: colours[i % 7], dash: DASHES[i % 3] };
}

function layout(changes) {
  const css = getComputedStyle(document.documentElement);
  const [ink, line] = ["--soft", "--line"].map((name) => css.getPropertyValue(name).trim());
  const axis = { gridcolor: line, linecolor: line, zerolinecolor: line, tickcolor: line, automargin: true };
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false,
    font: { family: "system-ui, sans-serif", size: 12, color: ink },
    margin: { l: 44, r: 12, t: 8, b: 36 }, hoverlabel: { namelength: -1 },
    ...changes,
    xaxis: { ...axis, ...changes.xaxis }, yaxis: { ...axis, hoverformat: ".5g", ...changes.yaxis },
  };
}

// A chart is drawn when it comes into view: a phone need not draw fifty at once.
const waiting = new Map();
const inView = new IntersectionObserver(
  (entries) => entries.filter((e) => e.isIntersecting).forEach((e) => drawNow(e.target.id)), { rootMargin: "400px" },
);

function drawNow(id) {
  const make = waiting.get(id);
  waiting.delete(id);
  if (!make) return;
  const [traces, changes] = make();
  Plotly.react(id, traces, layout(changes), { displayModeBar: false, responsive: true });
}

// make() gives [traces, changes of the layout]; observing anew reports at once whether the chart is in view.
function plot(id, make) {
  waiting.set(id, make);
  inView.unobserve($(id));
  inView.observe($(id));
}

addEventListener("beforeprint", () => [...waiting.keys()].forEach(drawNow));

function yaxis(quantity, traces) {
  if (!quantity.log) return {};
  const [low, high] = extent(traces.flatMap((trace) => trace.y).filter((v) => v !== null).map(Math.log10));
  if (high - low < 0.5) return {};
  const { tickvals, ticktext } = ticks(low, high);
  return { type: "log", tickvals: tickvals.map((v) => 10 ** v), ticktext };
}

const extent = (numbers) =>
  [numbers.reduce((a, b) => Math.min(a, b), Infinity), numbers.reduce((a, b) => Math.max(a, b), -Infinity)];

// Ticks of a logarithmic scale from the decimal logarithms of its ends, written as plain numbers.
function ticks(low, high) {
  const span = high - low;
  const digits = span > 4 ? [1] : span > 1.5 ? [1, 3] : span > 0.4 ? [1, 2, 5] : [1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9];
  const every = Math.ceil(span / 8);
  const tickvals = [];
  for (let power = Math.floor(low); power <= Math.ceil(high); power += 1) {
    if (power % every) continue;
    tickvals.push(...digits.map((digit) => power + Math.log10(digit)));
  }
  return { tickvals, ticktext: tickvals.map((v) => String(+(10 ** v).toPrecision(2))) };
}

const positive = (quantity, v) => (quantity.log && v !== null && v <= 0 ? null : v);

function figures(parent, entries) {
  for (const chart of $(parent).querySelectorAll(".chart")) {
    waiting.delete(chart.id);
    inView.unobserve(chart);
  }
  $(parent).replaceChildren();
  for (const { id, title, about } of entries) {
    const figure = document.createElement("figure");
    const caption = document.createElement("figcaption");
    const small = document.createElement("span");
    caption.textContent = title;
    small.textContent = about;
    caption.append(small);
    const chart = document.createElement("div");
    chart.className = "chart";
    chart.id = id;
    figure.append(caption, chart);
    $(parent).append(figure);
  }
}

function drawLoss() {
  plot("loss", () => [shown().flatMap(lossTraces), {
    xaxis: { title: { text: state.axis } },
    yaxis: { title: { text: "nats per token" }, type: state.log ? "log" : "linear" },
  }]);
}

function lossTraces({ run, i }) {
  const { color, dash } = style(i);
  const scale = state.axis === "tokens" ? run.tokensPerStep : 1;
  const look = {
    train: { mode: "lines", opacity: 0.55, line: { color, width: 1 } },
    val: { mode: "lines+markers", line: { color, dash, width: 2.4 }, marker: { color, size: 6 } },
  };
  return Object.entries(run.loss).map(([kind, [steps, y]]) => (
    { x: steps.map((step) => step * scale), y, name: `${run.label}, ${kind}`, ...look[kind] }
  ));
}

// The last recorded row at or before the chosen step; the first one if there is none.
function rowAt(table, step) {
  let row = 0;
  while (row + 1 < table.steps.length && table.steps[row + 1] <= step) row += 1;
  return row;
}

function drawProfiles() {
  for (const quantity of recorded) {
    plot(`profile-${quantity.id}`, () => {
      const traces = shown().flatMap((entry) => profileTraces(quantity, entry));
      return [traces, { xaxis: { title: { text: "layer" } }, yaxis: yaxis(quantity, traces) }];
    });
  }
}

function profileTraces(quantity, { run, i }) {
  const table = run.tables[quantity.id];
  if (!table) return [];
  const values = table.values[rowAt(table, state.step)];
  return [...kinds(quantity, table)].map(([kind, indices]) => ({
    x: indices.map((k) => table.heights[k]),
    y: indices.map((k) => positive(quantity, values[k])),
    text: indices.map((k) => table.places[k]),
    hovertemplate: "%{text}: %{y:.5g}", name: run.label,
    mode: run.layers > 24 ? "lines" : "lines+markers", line: { ...style(i), width: 1.8 },
    marker: { color: style(i).color, size: 5, symbol: GAIN_MARKERS[kind] || "circle" },
  }));
}

// Places at a depth, in groups that a line may join: the gains of each kind of norm are a line of their own.
function kinds(quantity, table) {
  const groups = new Map();
  table.places.forEach((place, k) => {
    if (table.heights[k] === null) return;
    const kind = quantity.gains ? place.split(".").pop() : "";
    const key = kind === "entry" ? "next_norm" : kind;
    groups.set(key, [...(groups.get(key) || []), k]);
  });
  return groups;
}

function drawHeats() {
  const quantity = recorded.find((q) => q.id === state.heat);
  const entries = shown().filter(({ run }) => run.tables[quantity.id]);
  figures("heats", entries.map(({ run, i }) => ({ id: `heat-${i}`, title: run.label, about: "" })));
  const tone = (v) => (v === null || (quantity.log && v <= 0) ? null : quantity.log ? Math.log10(v) : v);
  const rows = entries.map(({ run }) => {
    const table = run.tables[quantity.id];
    const keep = table.places.map((_, k) => k).filter((k) => table.heights[k] !== null);
    return { table, keep, z: keep.map((k) => table.values.map((row) => tone(row[k]))) };
  });
  const [low, high] = extent(rows.flatMap(({ z }) => z.flat()).filter((v) => v !== null));
  entries.forEach(({ i }, n) => {
    const { table, keep, z } = rows[n];
    plot(`heat-${i}`, () => [[{
      type: "heatmap", x: table.steps, y: keep.map((k) => table.places[k]), z, zmin: low, zmax: high,
      customdata: keep.map((k) => table.values.map((row) => row[k])),
      hovertemplate: "step %{x}<br>%{y}: %{customdata:.5g}<extra></extra>",
      colorscale: "Cividis", colorbar: { thickness: 10, outlinewidth: 0, ...(quantity.log ? ticks(low, high) : {}) },
    }], {
      xaxis: { title: { text: "steps" } },
      yaxis: { type: "category", nticks: 8, tickfont: { size: 10 } }, margin: { l: 84, r: 0, t: 8, b: 36 },
    }]);
  });
}

const within = (place, chosen) =>
  place === chosen || place.startsWith(`${chosen}.`) || chosen.startsWith(`${place}.`);

function summarize(values, places) {
  const present = (k) => values[k] !== null && values[k] !== undefined;
  const all = values.map((_, k) => k).filter(present);
  const chosen = ["max", "mean"].includes(state.place) ? all : all.filter((k) => within(places[k], state.place));
  if (!chosen.length) return null;
  const numbers = chosen.map((k) => values[k]);
  return state.place === "max" ? Math.max(...numbers) : numbers.reduce((a, b) => a + b) / numbers.length;
}

function drawTimes() {
  for (const quantity of recorded) {
    plot(`time-${quantity.id}`, () => {
      const traces = shown().flatMap((entry) => timeTraces(quantity, entry));
      return [traces, { xaxis: { title: { text: "steps" } }, yaxis: yaxis(quantity, traces) }];
    });
  }
}

function timeTraces(quantity, { run, i }) {
  const table = run.tables[quantity.id];
  if (!table) return [];
  const y = table.values.map((row) => positive(quantity, summarize(row, table.places)));
  const mode = table.steps.length > 1 ? "lines" : "markers";
  return [{ x: table.steps, y, name: run.label, mode, line: { ...style(i), width: 1.8 } }];
}

function number(value) {
  if (value === null) return "–";
  return value.toLocaleString("en", Number.isInteger(value) ? {} : { maximumSignificantDigits: 4 });
}

function drawTable() {
  const fields = Object.keys(data.differences);
  const finals = Object.keys(data.runs[0].finals);
  const cell = (tag, text, best) => {
    const element = document.createElement(tag);
    element.textContent = text;
    if (best) element.className = "best";
    return element;
  };
  const row = (cells) => {
    const element = document.createElement("tr");
    element.append(...cells);
    return element;
  };
  const losses = data.runs.map((run) => run.finals["best val loss"]).filter((v) => v !== null);
  const best = losses.length > 1 ? Math.min(...losses) : null;
  const head = row(["run", ...fields, ...finals].map((name) => cell("th", name)));
  const body = data.runs.map((run, i) => row([
    cell("td", run.label),
    ...fields.map((field) => cell("td", data.differences[field][i])),
    ...finals.map((name) => {
      const value = run.finals[name];
      return cell("td", number(value), name === "best val loss" && value === best);
    }),
  ]));
  $("table").replaceChildren(head, ...body);
}

// One press hides or shows a run, two show it alone, or all again.
function makeRuns() {
  data.runs.forEach((run, i) => {
    const button = document.createElement("button");
    button.innerHTML = `<svg><line x1="0" y1="5" x2="30" y2="5" stroke-width="3" stroke-dasharray="${SVG_DASHES[i % 3]}"/></svg>`;
    const loss = document.createElement("small");
    loss.textContent = run.finals["val loss"] === null ? "" : number(run.finals["val loss"]);
    button.append(run.label, loss);
    button.onclick = () => {
      state.hidden.has(i) ? state.hidden.delete(i) : state.hidden.add(i);
      draw();
    };
    button.ondblclick = () => {
      const alone = shown().length === 1 && !state.hidden.has(i);
      state.hidden = new Set(alone ? [] : data.runs.keys());
      state.hidden.delete(i);
      draw();
    };
    $("runs").append(button);
  });
}

function drawRuns() {
  [...$("runs").children].forEach((button, i) => {
    button.setAttribute("aria-pressed", String(!state.hidden.has(i)));
    button.querySelector("line").setAttribute("stroke", style(i).color);
  });
}

function draw() {
  drawRuns();
  drawLoss();
  drawProfiles();
  if (recorded.length) drawHeats();
  drawTimes();
}

function option(select, value, text) {
  const element = document.createElement("option");
  element.value = value;
  element.textContent = text;
  select.append(element);
}

function start() {
  const count = data.runs.length;
  $("summary").textContent = count > 1 ? `${count} runs; press one to hide it, twice to see it alone` : "";
  makeRuns();
  figures("profiles", recorded.map((q) => ({ ...q, id: `profile-${q.id}` })));
  figures("times", recorded.map((q) => ({ ...q, id: `time-${q.id}` })));
  const steps = [...new Set(data.runs.flatMap((run) => Object.values(run.tables).flatMap((t) => t.steps)))];
  steps.sort((a, b) => a - b);
  Object.assign($("step"), { max: Math.max(steps.length - 1, 0), value: steps.length - 1 });
  const choose = () => {
    state.step = steps[$("step").value];
    $("step-shown").textContent = state.step;
  };
  choose();
  $("step").oninput = () => { choose(); drawProfiles(); };
  recorded.forEach((q) => option($("heat-quantity"), q.id, q.title));
  $("heat-quantity").onchange = (event) => { state.heat = event.target.value; drawHeats(); };
  option($("place"), "max", "largest of all depths");
  option($("place"), "mean", "mean of all depths");
  const places = data.runs.flatMap((run) => (run.tables.grad_norm || { places: [] }).places);
  [...new Set(places)].forEach((place) => option($("place"), place, place));
  $("place").onchange = (event) => { state.place = event.target.value; drawTimes(); };
  $("loss-axis").onchange = (event) => { state.axis = event.target.value; drawLoss(); };
  $("loss-log").onchange = (event) => { state.log = event.target.checked; drawLoss(); };
  dark.addEventListener("change", draw);
  drawTable();
  draw();
}

start();
