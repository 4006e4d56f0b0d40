"use strict";
// Data comes from the script element "data"; everything is put in as text, never as markup.
const data = JSON.parse(document.getElementById("data").textContent);
const SVG = "http://www.w3.org/2000/svg";
const color = (category) => `var(--c${Math.max(0, data.categories.indexOf(category))})`;

function make(tag, attributes, text) {
  const node = document.createElementNS(tag === "svg" || tag === "rect" || tag === "text" ? SVG : "http://www.w3.org/1999/xhtml", tag);
  for (const [key, value] of Object.entries(attributes || {})) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

const tip = document.body.appendChild(make("div", { class: "tip" }));
function showTip(event, text) {
  tip.textContent = text;
  tip.style.display = "block";
  tip.style.left = Math.min(event.clientX + 12, window.innerWidth - 430) + "px";
  tip.style.top = event.clientY + 14 + "px";
}
function hideTip() { tip.style.display = "none"; }

// ---- stacked bars: all sides on one scale

function bars() {
  const place = document.getElementById("bars");
  const longest = Math.max(...data.sides.map((side) => side.step_ms));
  for (const side of data.sides) {
    const row = place.appendChild(make("div", { class: "bar-row" }));
    row.appendChild(make("b", {}, side.label));
    const svg = row.appendChild(make("svg", { viewBox: "0 0 1000 34", preserveAspectRatio: "none", role: "img", "aria-label": `step of ${side.label} by category` }));
    let at = 0;
    for (const [name, ms] of side.categories) {
      const width = (1000 * ms) / longest;
      const rect = svg.appendChild(make("rect", { x: at, y: 3, width: Math.max(0, width - 1), height: 28, rx: 1.5, "data-category": name, "data-ms": ms.toFixed(3) }));
      rect.style.fill = color(name);
      const text = `${side.label} ${name}: ${ms.toFixed(2)} ms, ${((100 * ms) / side.step_ms).toFixed(1)} %`;
      rect.addEventListener("pointermove", (event) => showTip(event, text));
      rect.addEventListener("pointerleave", hideTip);
      at += width;
    }
    row.appendChild(make("span", { class: "total" }, side.step_ms.toFixed(side.step_ms < 10 ? 2 : 1) + " ms"));
  }
  const legend = document.getElementById("legend");
  for (const name of data.categories) {
    if (!data.sides.some((side) => side.categories.some(([n, ms]) => n === name && ms > 0))) continue;
    const item = legend.appendChild(make("li"));
    item.appendChild(make("span", { class: "swatch" })).style.background = color(name);
    item.appendChild(document.createTextNode(name));
  }
}

// ---- timeline: one row a stream; wheel zooms, dragging moves

function timeline(side) {
  const place = document.getElementById("timelines");
  const streams = Object.entries(side.timeline.streams || {});
  if (!streams.length) return;
  const box = place.appendChild(make("div", { class: "timeline", "data-side": side.label }));
  const step = side.timeline.step + 1;
  const head = box.appendChild(make("div", { class: "tools soft" }, `${side.label} step ${step}`));
  const whole = head.appendChild(make("button", { type: "button" }, "whole step"));
  const range = head.appendChild(make("span"));
  // All sides have one scale; a narrow window gets fewer units across, so that names stay legible.
  const full = Math.max(...data.sides.map((each) => each.timeline.length_us || 0));
  const width = Math.min(1100, Math.max(340, place.clientWidth - 18)), left = width < 700 ? 70 : 110;
  const rowHeight = 26, height = streams.length * rowHeight + 4;
  const svg = box.appendChild(make("svg", { viewBox: `0 0 ${width} ${height}`, height: height }));
  const view = { start: 0, length: full };

  function draw() {
    svg.replaceChildren();
    const scale = (width - left) / view.length;
    streams.forEach(([name, events], index) => {
      const y = index * rowHeight + 2;
      let lastPixel = -1, lastColor = "";
      for (const [start, length, category, kernel, scope] of events) {
        if (start + length < view.start || start > view.start + view.length) continue;
        const x = left + Math.max(0, start - view.start) * scale;
        const end = left + Math.min(view.length, start + length - view.start) * scale;
        const pixel = Math.floor(x * 2);
        if (end - x < 0.5 && pixel === lastPixel && category === lastColor) continue; // nothing more to see there
        lastPixel = pixel;
        lastColor = category;
        const rect = svg.appendChild(make("rect", { x: x.toFixed(2), y: y, width: Math.max(0.4, end - x).toFixed(2), height: rowHeight - 6 }));
        rect.style.fill = color(category);
        rect.info = `${kernel}\n${scope} · ${category} · ${length.toFixed(1)} us at ${(start / 1000).toFixed(3)} ms`;
      }
      svg.appendChild(make("rect", { x: 0, y: y - 2, width: left - 4, height: rowHeight })).style.fill = "var(--panel)";
      svg.appendChild(make("text", { x: 0, y: y + 14 }, name.slice(0, left < 100 ? 11 : 18)));
    });
    range.textContent = `${(view.start / 1000).toFixed(2)} to ${((view.start + view.length) / 1000).toFixed(2)} ms`;
  }
  function limit() {
    view.length = Math.min(Math.max(view.length, 20), full);
    view.start = Math.min(Math.max(view.start, 0), full - view.length);
    draw();
  }
  const at = (event) => {
    const box = svg.getBoundingClientRect();
    return Math.max(0, ((event.clientX - box.left) / box.width * width - left) / (width - left));
  };
  svg.addEventListener("wheel", (event) => {
    event.preventDefault();
    const share = at(event), factor = event.deltaY > 0 ? 1.25 : 0.8;
    const point = view.start + share * view.length;
    view.length *= factor;
    view.start = point - share * Math.min(view.length, full);
    limit();
  }, { passive: false });
  let dragging = null;
  svg.addEventListener("pointerdown", (event) => { dragging = { share: at(event), start: view.start }; });
  window.addEventListener("pointerup", () => { dragging = null; });
  svg.addEventListener("pointermove", (event) => {
    if (dragging) {
      view.start = dragging.start - (at(event) - dragging.share) * view.length;
      limit();
    } else if (event.target.info) showTip(event, event.target.info);
    else hideTip();
  });
  svg.addEventListener("pointerleave", hideTip);
  whole.addEventListener("click", () => { view.start = 0; view.length = full; draw(); });
  draw();
}

// ---- kernels: sorted by a click, filtered by words, both kept in the address after #

const wanted = new URLSearchParams(window.location.hash.slice(1));
const state = { filter: wanted.get("filter") || "", sort: wanted.get("sort") || data.kernels.sort, down: wanted.get("order") !== "up" };

function kernels() {
  const { columns, rows } = data.kernels;
  const head = document.querySelector("#kernels thead tr"), body = document.querySelector("#kernels tbody");
  columns.forEach((column) => {
    const cell = head.appendChild(make("th", { scope: "col", "data-sort": column.key, tabindex: 0, class: column.number ? "n" : "" }, column.title));
    const choose = () => {
      state.down = state.sort === column.key ? !state.down : Boolean(column.number);
      state.sort = column.key;
      fill();
    };
    cell.addEventListener("click", choose);
    cell.addEventListener("keydown", (event) => { if (event.key === "Enter") choose(); });
  });
  const search = document.getElementById("filter");
  search.value = state.filter;
  search.addEventListener("input", () => { state.filter = search.value; fill(); });

  function fill() {
    const words = state.filter.toLowerCase().split(/\s+/).filter(Boolean);
    const index = Math.max(0, columns.findIndex((column) => column.key === state.sort));
    const found = rows.filter((row) => {
      const text = row.filter((value) => typeof value === "string").join(" ").toLowerCase();
      return words.every((word) => text.includes(word));
    });
    const magnitude = (value) => (columns[index].signed ? Math.abs(value) : value);
    found.sort((a, b) => {
      const order = columns[index].number ? magnitude(a[index]) - magnitude(b[index]) : String(a[index]).localeCompare(b[index]);
      return state.down ? -order : order;
    });
    head.querySelectorAll("th").forEach((cell) => {
      if (cell.dataset.sort === state.sort) cell.setAttribute("aria-sort", state.down ? "descending" : "ascending");
      else cell.removeAttribute("aria-sort");
    });
    body.replaceChildren();
    for (const row of found.slice(0, 300)) {
      const line = body.appendChild(make("tr"));
      columns.forEach((column, i) => {
        if (column.key === "shape") return;
        const value = row[i];
        const cell = line.appendChild(make("td", { class: (column.number ? "n " : "name ") + (column.key === "verdict" ? value : "") }));
        cell.textContent = column.number ? (value ? (column.signed && value > 0 ? "+" : "") + value.toFixed(column.digits) : "") : value;
        if (column.key === "name") {
          const shape = row[columns.findIndex((c) => c.key === "shape")];
          if (shape) cell.appendChild(make("span", { class: "shape" }, shape));
        }
      });
    }
    const total = (key) => found.reduce((sum, row) => sum + row[columns.findIndex((c) => c.key === key)], 0).toFixed(2);
    const sums = data.kernels.sums.map((key) => `${columns.find((c) => c.key === key).title} ${total(key)}`).join(", ");
    document.getElementById("found").textContent = `${found.length} of ${rows.length} kernels: ${sums}` + (found.length > 300 ? "; the first 300 are shown" : "");
    const hash = new URLSearchParams();
    if (state.filter) hash.set("filter", state.filter);
    if (state.sort !== data.kernels.sort) hash.set("sort", state.sort);
    if (!state.down) hash.set("order", "up");
    history.replaceState(null, "", hash.size ? "#" + hash : window.location.pathname);
  }
  // The shape stands under the kernel's name.
  head.querySelectorAll('[data-sort="shape"]').forEach((cell) => { cell.hidden = true; });
  fill();
}

bars();
data.sides.forEach(timeline);
kernels();
document.body.dataset.ready = "yes";
