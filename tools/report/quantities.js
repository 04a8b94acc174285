// What each chart shows of the recorded quantities, and then the page begins.

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
  const smooth = state.smooth > 0 && curve.steps.length > MANY && look.smooth;
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

// The runs that have not diverged, which set the scales; all where there is no other.
function steady(runs) {
  const found = runs.filter((run) => run.state !== "diverged");
  return found.length ? found : runs;
}

function lossRange() {
  const numbers = [], first = [];
  for (const run of steady(shown())) {
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
    return run.seeds ? [...spread(run, x, pick(table.low[row]), pick(table.high[row])), line] : [line];
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

// One colour scale for all runs, from the 1st to the 99th percentile of those that have not diverged, also the hidden ones.
function drawHeats() {
  const q = quantity(state.heat), part = q.alarm === "low" ? "low" : "high";
  const runs = entities.filter((run) => run.tables[q.id]);
  figures("heats", runs.map((run) => ({ id: `heat-${run.index}`, title: run.label, about: "" })));
  const cells = (table) => table[part] || table.values;
  const tone = (v) => (positive(q, v) === null ? null : q.log ? Math.log10(v) : v);
  const all = steady(runs).flatMap((run) => cells(run.tables[q.id]).flat()).map(tone).filter((v) => v !== null).sort((a, b) => a - b);
  const low = all[Math.floor(0.01 * all.length)] ?? 0, high = all[Math.ceil(0.99 * all.length) - 1] ?? 1;
  const back = (v) => String(+(q.log ? 10 ** v : v).toPrecision(3));
  const colorscale = data.palette.heat.map((colour, i, list) => [i / (list.length - 1), colour]);
  [$("heat-low").textContent, $("heat-high").textContent] = [back(low), back(high)];
  $("heat-bar").style.background = `linear-gradient(90deg, ${data.palette.heat.join(", ")})`;
  $("heat-hint").textContent = `one scale for all runs${q.log ? ", logarithmic" : ""}, from the 1st to the 99th percentile of those that have not diverged; where several steps share a column, the ${part === "low" ? "least" : "largest"} of them`;
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
      if (v !== null && (best === null || sign * v > sign * best.v)) best = { v, words: `${run.name}, ${place}, step ${number(table.steps[i])}` };
    });
  }
  return best ? `${side === "low" ? "least" : "largest"} ${number(best.v)}: ${best.words}` : "";
}

// ---- the page begins

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
