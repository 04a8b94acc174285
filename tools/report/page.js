// What tools/report/page.py put into #data: the runs, what is chosen of them, and the words about them. charts.js and
// quantities.js draw them. One state, one function per section, all redrawn by draw().
"use strict";

let data = JSON.parse(document.getElementById("data").textContent);
let entities = []; // what is a line of its own: the runs, or the means over seeds
const $ = (id) => document.getElementById(id);
const dark = matchMedia("(prefers-color-scheme: dark)");
const state = {
  hidden: new Set(), step: null, place: "median", heat: null, axis: "steps", log: false, whole: false, smooth: 0.8,
  colour: "run", dash: "run", seeds: false, find: "", zoom: null, resets: 1, sort: "val loss", falling: false,
};
const FEW = 30; // points up to which a line shows them
const MANY = 100; // points from which it is smoothed
const SVG_DASHES = { solid: "", dash: "7 4", dot: "2 3" };
const GAIN_MARKERS = {
  next_norm: "circle", post_norm: "diamond", out_norm: "square", q_norm: "triangle-up", k_norm: "triangle-down",
};
const quantity = (id) => data.tables.find((q) => q.id === id);
const matches = (run) => state.find.toLowerCase().split(/\s+/)
  .every((word) => `${run.label} ${Object.values(run.settings).join(" ")}`.toLowerCase().includes(word));
const shown = () => entities.filter((run) => !state.hidden.has(run.label) && matches(run));
const last = (list) => list[list.length - 1];
const number = (v) => {
  if (v === null || v === undefined) return "–";
  if (Math.abs(v) >= 1e12 || (v !== 0 && Math.abs(v) < 1e-4)) return v.toExponential(3);
  return v.toLocaleString("en", Number.isInteger(v) ? {} : { maximumSignificantDigits: 4 });
};

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
  if (values[low] === null || values[high] === null) return null;
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
  const seeds = `(${members.length} seeds)`;
  return {
    ...members[0], seeds, label: `${members[0].label} ${seeds}`, name: `${members[0].name} ${seeds}`, marks: { spike: [], diverged: [] },
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
  const groups = [...new Set(order.map((run) => run.group))].map((group) => order.filter((run) => run.group === group));
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
