// The machinery of every chart: drawn when looked at, lifted, read out, zoomed together, enlarged; and its axes.

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
    if (!trace.meta || trace.spread || trace.x.length < 2 || trace.x[0] === null) continue;
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
    ...changes, title: { text: title }, showlegend: true, legend: { orientation: "h", traceorder: "normal", y: -0.12, yanchor: "top" },
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
