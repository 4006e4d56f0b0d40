"use strict";
// Draws runs from the JSON objects that run_figures.py makes. `jaxtune report` puts them into the page itself;
// `jaxtune watch` serves them, and this script asks for them again every two seconds.

const SVG = "http://www.w3.org/2000/svg";
const COLOURS = 12;
const DASHES = ["none", "7 3", "2 3", "9 3 2 3"]; // of the first twelve runs, of the next, ...
const HEIGHT = 210, LEFT = 58, RIGHT = 10, TOP = 10, BOTTOM = 24;
const hidden = new Set(); // folders of the runs that are not drawn
let runs = [];

// ---- elements

function element(name, attributes, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) made.setAttribute(key, value);
  made.append(...children.filter((child) => child !== null && child !== ""));
  return made;
}

function shape(name, attributes, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

const colour = (index) => `var(--run${index % COLOURS})`;
const dashes = (index) => DASHES[Math.floor(index / COLOURS) % DASHES.length];
const shownRuns = () => runs.map((run, index) => ({ run, index })).filter(({ run }) => !run.error && !hidden.has(run.folder));

// ---- numbers

function ofNumber(value) {
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2);
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(4)));
}

// Round numbers, about `count` of them, that lie within an interval.
function ticks(low, high, count) {
  const raw = (high - low) / count, size = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((times) => times * size).find((each) => each >= raw * 0.999);
  const found = [];
  for (let number = Math.ceil(low / step - 1e-9); number * step <= high + 1e-9 * step; number++) found.push(number * step || 0);
  return found;
}

// The interval of an axis: a curve that hardly moves must not look like a cliff, so that the interval is at least a
// tenth of the largest value; where a chart says so, it begins at zero.
function interval(values, fromZero, logarithmic) {
  let low = Infinity, high = -Infinity;
  for (const value of values) { low = Math.min(low, value); high = Math.max(high, value); }
  if (logarithmic) {
    [low, high] = [Math.log10(low), Math.log10(high)];
    return high - low < 0.05 ? [low - 0.05, high + 0.05] : [low, high];
  }
  if (fromZero && low >= 0) return [0, high > 0 ? high * 1.08 : 1];
  const least = 0.1 * Math.max(Math.abs(low), Math.abs(high)) || 1, lack = least - (high - low);
  if (lack > 0) [low, high] = [low >= 0 ? Math.max(0, low - lack / 2) : low - lack / 2, high + lack / 2];
  return [low, high];
}

// An exponential moving average that begins unbiased; weight 0 changes nothing.
function smoothed(values, weight) {
  let sum = 0, total = 0;
  return values.map((value) => {
    sum = weight * sum + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return sum / total;
  });
}

// ---- charts

function chart(key) {
  const weight = Number(document.querySelector("#smoothing").value), wantsLog = document.querySelector("#log").checked;
  const byShare = document.querySelector("#share").checked;
  const parts = shownRuns()
    .map(({ run, index }) => ({ run, index, chart: (run.charts || []).find((each) => each.key === key) }))
    .filter((part) => part.chart)
    .map((part) => (byShare ? { ...part, chart: shared(part.run, part.chart) } : part));
  if (!parts.length) return null;
  const first = parts[0].chart;
  const all = parts.flatMap(({ chart: { line, dots } }) => [...(line.low || line.y), ...(line.high || []), ...dots.y]);
  const logarithmic = wantsLog && all.every((value) => value > 0);
  const steps = parts.flatMap(({ chart: { line, dots } }) => [...line.x, ...dots.x]);
  const [from, to] = steps.reduce(([a, b], x) => [Math.min(a, x), Math.max(b, x)], [Infinity, -Infinity]);
  const [low, high] = interval(all, first.zero, logarithmic);

  const figure = element("figure", { "data-key": key });
  const unit = first.unit ? element("span", { class: "soft" }, ` ${first.unit}`) : null;
  const notes = [];
  if (parts.some(({ chart: { line, dots } }) => line.x.length && dots.x.length)) notes.push("line: training, dots: evaluation");
  if (parts.some(({ chart: { line } }) => line.low)) notes.push("band: lowest to highest");
  const note = notes.length ? element("span", { class: "soft" }, `  ${notes.join("; ")}`) : null;
  figure.append(element("figcaption", {}, first.title, unit, note));
  const width = Math.max(260, Math.min(900, (document.querySelector("#charts").clientWidth || 560)));
  const columns = Math.max(1, Math.floor((width + 14) / 394)), w = Math.floor((width - 14 * (columns - 1)) / columns) - 26;
  const X = (step) => LEFT + (w - LEFT - RIGHT) * (to > from ? (step - from) / (to - from) : 0.5);
  const scale = (value) => (logarithmic ? Math.log10(value) : value);
  const Y = (value) => TOP + (HEIGHT - TOP - BOTTOM) * (high - scale(value)) / (high - low);
  const path = (x, y) => x.map((step, i) => `${i ? "L" : "M"}${X(step).toFixed(1)} ${Y(y[i]).toFixed(1)}`).join("");

  const svg = shape("svg", { viewBox: `0 0 ${w} ${HEIGHT}`, role: "img", "aria-label": `${first.title} by step` });
  for (const tick of ticks(low, high, 5)) {
    const value = logarithmic ? 10 ** tick : tick, y = Y(value).toFixed(1);
    svg.append(shape("line", { class: "rule", x1: LEFT, x2: w - RIGHT, y1: y, y2: y }));
    svg.append(shape("text", { x: LEFT - 6, y: Number(y) + 4, "text-anchor": "end", class: "ytick" }, ofNumber(value)));
  }
  const across = to > from ? ticks(from, to, 5).filter((tick) => byShare || Number.isInteger(tick)) : [from];
  let free = -Infinity; // where the next label has room
  for (const tick of across) {
    const text = byShare ? `${ofNumber(100 * tick)} %` : `${free < 0 ? "step " : ""}${tick.toLocaleString("en")}`;
    const size = 7 * text.length, at = Math.min(X(tick), w - size / 2);
    if (at - size / 2 < free) continue;
    free = at + size / 2 + 8;
    svg.append(shape("text", { x: at, y: HEIGHT - 6, "text-anchor": "middle", class: "xtick" }, text));
  }

  for (const { index, chart: { line, dots } } of parts) {
    const stroke = colour(index);
    if (line.low) {
      const back = [...line.x].reverse(), edge = path(back, [...line.low].reverse()).replace("M", "L");
      svg.append(shape("path", { class: "band", fill: stroke, d: `${path(line.x, line.high)}${edge}Z` }));
    }
    if (line.x.length === 1) svg.append(shape("circle", { cx: X(line.x[0]), cy: Y(line.y[0]), r: 3, fill: stroke }));
    else if (line.x.length) {
      if (weight > 0 && !line.low) svg.append(shape("path", { class: "raw", stroke, d: path(line.x, line.y) }));
      svg.append(shape("path", { class: "curve", stroke, "stroke-dasharray": dashes(index), d: path(line.x, smoothed(line.y, weight)) }));
    }
    // Two evaluations, before and after training, say nothing of what lies between them.
    if (dots.x.length > 2) svg.append(shape("path", { class: "joined", stroke, d: path(dots.x, dots.y) }));
    dots.x.forEach((step, i) =>
      svg.append(shape("circle", { cx: X(step).toFixed(1), cy: Y(dots.y[i]).toFixed(1), r: 3.4, fill: "var(--panel)", stroke, "stroke-width": 1.8 })));
  }
  figure.append(svg);
  addHover(figure, svg, parts, { X, w, from, to });
  return figure;
}

// A chart whose steps are shares of the whole run, so that a short and a long run have the same width.
function shared(run, { line, dots, ...rest }) {
  const whole = run.total || run.step || 1, over = (points) => ({ ...points, x: points.x.map((step) => step / whole) });
  return { ...rest, line: over(line), dots: over(dots) };
}

function nearest(points, step) {
  let best = -1;
  points.forEach((x, i) => { if (best < 0 || Math.abs(x - step) < Math.abs(points[best] - step)) best = i; });
  return best;
}

function ofPlace(step) {
  return document.querySelector("#share").checked ? `${ofNumber(100 * step)} % of the run` : `step ${step.toLocaleString("en")}`;
}

// The values of all runs at the step under the pointer.
function addHover(figure, svg, parts, { X, w, from, to }) {
  const cross = shape("line", { class: "cross", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
  const tip = element("div", { class: "tip", hidden: "" });
  svg.append(cross);
  figure.append(tip);
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect(), at = ((event.clientX - box.left) / box.width) * w;
    const wanted = from + (to - from) * Math.min(1, Math.max(0, (at - LEFT) / (w - LEFT - RIGHT)));
    tip.textContent = "";
    let step = null;
    for (const { run, index, chart: { line, dots } } of parts) {
      for (const [series, what] of [[line, ""], [dots, " (evaluation)"]]) {
        const i = nearest(series.x, wanted);
        if (i < 0) continue;
        if (step === null) step = series.x[i];
        const name = element("span", { style: `color: ${colour(index)}` }, runs.length > 1 ? run.name : "value");
        const where = series.x[i] === step ? "" : ` at ${ofPlace(series.x[i])}`;
        tip.append(element("div", {}, name, `${what}: ${ofNumber(series.y[i])}${where}`));
      }
    }
    if (step === null) return;
    tip.prepend(element("div", { class: "soft" }, ofPlace(step)));
    tip.hidden = false;
    cross.setAttribute("x1", X(step)); cross.setAttribute("x2", X(step)); cross.setAttribute("visibility", "visible");
    const left = (X(step) / w) * box.width;
    tip.style.left = `${left < box.width / 2 ? left + 22 : Math.max(0, left - tip.offsetWidth)}px`;
    tip.style.top = "40px";
  });
  svg.addEventListener("pointerleave", () => { tip.hidden = true; cross.setAttribute("visibility", "hidden"); });
}

// ---- what stands above and below the charts

const STATES = {
  running: ["running", "good"], finished: ["finished", "good"], stopped: ["stopped", "soft"],
  failed: ["failed", "bad"], killed: ["killed", "bad"], unknown: ["", "soft"],
};

function card(run, index) {
  const swatch = element("span", { class: "swatch", style: `background: ${colour(index)}` });
  const box = element("section", { class: "run" });
  if (run.error) {
    box.append(element("header", {}, swatch, element("b", {}, run.name)), element("div", { class: "soft why" }, run.error));
    return box;
  }
  const [word, style] = STATES[run.state] || STATES.unknown;
  const header = element("header", {}, swatch, element("b", {}, run.name), element("span", { class: `state ${style}` }, word));
  if (runs.length > 1) {
    const tick = element("input", { type: "checkbox", "aria-label": `draw ${run.name}` });
    tick.checked = !hidden.has(run.folder);
    tick.addEventListener("change", () => { tick.checked ? hidden.delete(run.folder) : hidden.add(run.folder); drawCharts(); });
    header.prepend(tick);
  }
  box.append(header);
  if (run.total) {
    const left = run.left ? `, about ${run.left} left` : "";
    const words = `step ${run.step.toLocaleString("en")} of ${run.total.toLocaleString("en")}${left}`;
    box.append(element("progress", { value: run.step, max: run.total, class: style }), element("div", { class: "progress" }, words));
  }
  if (run.why) box.append(element("div", { class: `why ${style}` }, run.why));
  return box;
}

function table(id, head, rows) {
  const made = element("table", { id });
  if (head.length) made.append(element("tr", {}, ...head.map((cell) => element("th", {}, cell))));
  for (const row of rows)
    made.append(element("tr", {}, ...row.map((cell) => (cell instanceof Node ? cell : element("td", {}, cell ?? "")))));
  return element("div", { class: "wide" }, made);
}

// A table with a row for each name and a column for each run. pairs: gives [[name, value], ...] of a run.
function byRun(id, pairs, onlyDifferent) {
  const readable = runs.filter((run) => !run.error), columns = readable.map((run) => new Map(pairs(run)));
  const names = [...new Set(columns.flatMap((column) => [...column.keys()]))];
  const rows = names.map((name) => [name, ...columns.map((column) => column.get(name) ?? "")]);
  const kept = onlyDifferent && readable.length > 1 ? rows.filter(([, ...values]) => new Set(values).size > 1) : rows;
  return table(id, readable.length > 1 ? ["", ...readable.map((run) => run.name)] : [], kept);
}

function samples(run) {
  const mark = (given, expected) =>
    element("td", { class: given.trim() === expected.trim() ? "good" : "bad" }, given);
  const asked = run.samples.some((sample) => sample.before !== "");
  const head = ["question", "expected", ...(asked ? ["before training"] : []), "after training"];
  const rows = run.samples.map(({ question, expected, before, given }) =>
    [question, expected, ...(asked ? [mark(before, expected)] : []), mark(given, expected)]);
  return table("samples", head, rows);
}

function rollouts(run) {
  const text = (words) => element("td", { class: "text" }, words);
  const scored = run.rollouts.some((each) => each.reward !== "-");
  const head = ["prompt", "answer", ...(scored ? ["rewards", "reward", "advantage"] : []), "tokens", "ended"];
  const rows = run.rollouts.map(({ prompt, answer, rewards, reward, advantage, tokens, ended }) =>
    [text(prompt), text(answer), ...(scored ? [rewards, reward, advantage] : []), tokens, ended]);
  return table("rollouts", head, rows);
}

// The points of all charts of the shown runs, as a file of comma-separated values.
function saveNumbers() {
  const quoted = (value) => (/[",\n\r]/.test(value) ? `"${String(value).replaceAll('"', '""')}"` : value);
  const rows = [["run", "metric", "kind", "step", "value"]];
  for (const { run } of shownRuns())
    for (const { title, unit, line, dots } of run.charts || [])
      for (const [series, kind] of [[line, line.low ? "mean" : "training"], [dots, "evaluation"]])
        series.x.forEach((step, i) => rows.push([run.name, unit ? `${title} (${unit})` : title, kind, step, series.y[i]]));
  const text = rows.map((row) => row.map(quoted).join(",")).join("\n") + "\n";
  const address = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
  element("a", { href: address, download: "numbers.csv" }).click();
  URL.revokeObjectURL(address);
}

function titled(title, run) {
  return element("h2", {}, runs.filter((each) => !each.error).length > 1 ? `${title} of ${run.name}` : title);
}

function drawCharts() {
  const keys = [...new Set(runs.flatMap((run) => (run.charts || []).map((each) => each.key)))];
  const place = document.querySelector("#charts");
  place.replaceChildren(...keys.map(chart).filter(Boolean));
  document.querySelector(".controls").hidden = !keys.length;
  document.querySelector("#shares").hidden = runs.length < 2;
}

function draw(found) {
  runs = found;
  document.querySelector("#runs").replaceChildren(...runs.map(card));
  drawCharts();
  const below = [];
  const readable = runs.filter((run) => !run.error);
  document.querySelector("#figures").replaceChildren(...(readable.length ? [byRun("facts", (run) => run.facts, false)] : []));
  for (const run of readable) {
    if (run.samples.length) below.push(titled("Samples", run), samples(run));
    if (run.rollouts.length)
      below.push(titled(`Answers sampled for step ${run.rollouts[0].step.toLocaleString("en")}`, run), rollouts(run));
    if (run.plan.length)
      below.push(titled("Plan", run), element("div", { class: "plan" }, ...run.plan.map((line) =>
        element("div", { style: `padding-left: ${line.search(/\S|$/)}ch` }, line.trim()))));
  }
  if (readable.length) {
    const title = readable.length > 1 ? "Settings that differ between the runs" : "Settings that differ from the defaults";
    below.push(element("h2", {}, title), byRun("settings", (run) => Object.entries(run.settings), true));
    for (const run of readable)
      if (run.config)
        below.push(element("details", {}, element("summary", {}, `all settings of ${run.name}`), element("pre", {}, run.config)));
  }
  const open = [...document.querySelectorAll("#below details")].map((each) => each.open);
  document.querySelector("#below").replaceChildren(...below);
  document.querySelectorAll("#below details").forEach((each, i) => { each.open = open[i] || false; });
}

// ---- the page

let version = "";
async function look() {
  const note = document.querySelector("#note");
  try {
    const found = await (await fetch(`runs?seen=${version}`)).json();
    note.textContent = "";
    if (found.runs) { version = found.version; draw(found.runs); }
  } catch {
    note.textContent = "jaxtune watch has ended: the figures stay as they were";
  }
}

document.querySelector("#smoothing").addEventListener("input", drawCharts);
document.querySelector("#log").addEventListener("change", drawCharts);
document.querySelector("#share").addEventListener("change", drawCharts);
document.querySelector("#numbers").addEventListener("click", saveNumbers);
window.addEventListener("resize", drawCharts);
const data = document.querySelector("#data");
if (data) draw(JSON.parse(data.textContent));
else { look(); setInterval(look, 2000); }
