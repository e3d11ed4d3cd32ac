// Curves by module: a statistic of each operand over the steps.

const DATA = readData();
const OPERANDS = ["fprop.x", "fprop.w", "dgrad.dy", "dgrad.w", "wgrad.dy", "wgrad.x"];
const ABOUT = {
  amax: "Largest magnitude of the operand, before any rotation.",
  relative_error: "Norm of the rounding error over the norm of the operand, as it was rounded.",
  cosine: "Cosine of the operand and of what its codes stand for: 1 is aligned.",
  zero: "Share of the elements that were not zero and are now.",
  saturated: "Share of the elements beyond the largest number of their block.",
  scale_zero: "Share of the block scales that are 0: blocks of zeros, or too small for any scale.",
  scale_subnormal: "Share of the block scales among the subnormals, which have fewer bits.",
  scale_largest: "Share of the block scales at the largest that the scheme aims for.",
  changed: "Of weights: share of the codes that are others than at the last record.",
};
const WIDTH = 300, HEIGHT = 96, LEFT = 44, BOTTOM = 14, TOP = 6;
let shown = null; // the module whose details are open

function tint(operand) {
  return { "--tint": `var(--series-${OPERANDS.indexOf(operand)})` };
}

function written(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size === 0) return "0";
  return size >= 1e5 || size < 1e-3 ? value.toExponential(2) : String(Number(value.toPrecision(4)));
}

/* module -> its operands on the chosen rank, those that are asked for */
function chosen() {
  const rank = Number(byId("rank").value), wanted = byId("operand").value;
  const modules = new Map();
  for (const row of DATA.operands) {
    const name = `${row.gemm}.${row.operand}`;
    if (row.rank !== rank || (wanted !== "all" && name !== wanted)) continue;
    if (!modules.has(row.module)) modules.set(row.module, []);
    modules.get(row.module).push({ name, row });
  }
  return modules;
}

function curve(row, statistic) {
  const values = row.curves[statistic];
  return Array.isArray(values) ? values : DATA.steps.map(() => values);
}

function range(rows, statistic) {
  let low = Infinity, high = -Infinity;
  for (const { row } of rows) {
    for (const value of curve(row, statistic)) {
      if (value === null) continue;
      low = Math.min(low, value);
      high = Math.max(high, value);
    }
  }
  if (low > high) return null;
  if (statistic !== "cosine" && low > 0 && low < high / 2) low = 0;
  const room = (high - low) * 0.05 || Math.abs(high) * 0.05 || 1;
  return [low === 0 ? 0 : low - room, high + room];
}

function scales([low, high]) {
  const steps = DATA.steps, first = steps[0], last = steps[steps.length - 1];
  const x = (step) => last === first ? (LEFT + WIDTH) / 2 : LEFT + ((step - first) / (last - first)) * (WIDTH - LEFT - 4);
  const y = (value) => TOP + (1 - (value - low) / (high - low)) * (HEIGHT - TOP - BOTTOM);
  return { x, y };
}

/* The runs of known numbers of a curve, as polylines; a lone number as a point. */
function lines(rows, statistic, { x, y }) {
  const found = [];
  for (const { name, row } of rows) {
    let run = [];
    const end = () => {
      if (run.length === 1) found.push(svg("circle", { cx: run[0][0], cy: run[0][1], r: 2, style: tint(name) }));
      if (run.length > 1) found.push(svg("polyline", { points: run.map((p) => p.map((n) => n.toFixed(1)).join(",")).join(" "), style: tint(name) }));
      run = [];
    };
    curve(row, statistic).forEach((value, i) => (value === null ? end() : run.push([x(DATA.steps[i]), y(value)])));
    end();
  }
  return found;
}

function chart(rows, statistic, bounds) {
  const picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `${statistic} by step` });
  if (bounds === null) {
    picture.append(svg("text", { x: LEFT, y: HEIGHT / 2 }, "no numbers"));
    return picture;
  }
  const { x, y } = scales(bounds), floor = HEIGHT - BOTTOM;
  picture.append(svg("line", { x1: LEFT, x2: WIDTH, y1: floor, y2: floor, class: "axis" }));
  for (const bad of DATA.nonfinite) {
    const inside = bad.step >= DATA.steps[0] && bad.step <= DATA.steps[DATA.steps.length - 1];
    if (inside && bad.module === rows[0].row.module) picture.append(svg("line", { x1: x(bad.step), x2: x(bad.step), y1: TOP, y2: floor, class: "bad" }));
  }
  picture.append(...lines(rows, statistic, { x, y }));
  picture.append(svg("text", { x: LEFT - 4, y: TOP + 6, "text-anchor": "end" }, written(bounds[1])));
  picture.append(svg("text", { x: LEFT - 4, y: floor, "text-anchor": "end" }, written(bounds[0])));
  picture.append(svg("text", { x: LEFT, y: HEIGHT - 2 }, String(DATA.steps[0])));
  picture.append(svg("text", { x: WIDTH, y: HEIGHT - 2, "text-anchor": "end" }, String(DATA.steps[DATA.steps.length - 1])));
  return picture;
}

/* The numbers under the pointer, or of the last step. */
function readable(picture, rows, statistic, bounds) {
  const readout = h("div", { class: "readout" });
  const show = (i) => {
    readout.replaceChildren(`step ${DATA.steps[i]}`);
    for (const { name, row } of rows) {
      const value = h("b", { style: tint(name) }, written(curve(row, statistic)[i]));
      readout.append(h("span", { title: name }, value));
    }
  };
  show(DATA.steps.length - 1);
  if (bounds === null) return [picture, readout];
  const { x } = scales(bounds), at = svg("line", { y1: TOP, y2: HEIGHT - BOTTOM, class: "at", visibility: "hidden" });
  picture.append(at);
  picture.addEventListener("pointermove", (event) => {
    const box = picture.getBoundingClientRect(), place = ((event.clientX - box.left) / box.width) * WIDTH;
    let nearest = 0;
    DATA.steps.forEach((step, i) => { if (Math.abs(x(step) - place) < Math.abs(x(DATA.steps[nearest]) - place)) nearest = i; });
    at.setAttribute("x1", x(DATA.steps[nearest]));
    at.setAttribute("x2", x(DATA.steps[nearest]));
    at.setAttribute("visibility", "visible");
    show(nearest);
  });
  return [picture, readout];
}

function showDetail(module, rows) {
  const detail = byId("detail");
  detail.hidden = module === null;
  if (module === null) return;
  const close = h("button", { type: "button" }, "Close");
  close.addEventListener("click", () => { shown = null; draw(); });
  const grid = h("div", { class: "grid" });
  for (const statistic of DATA.statistics) {
    const bounds = range(rows, statistic);
    const figure = h("div", {}, h("h3", { title: ABOUT[statistic] }, statistic));
    figure.append(...readable(chart(rows, statistic, bounds), rows, statistic, bounds));
    grid.append(figure);
  }
  const formats = h("p", { class: "muted" }, rows.map(({ name, row }) => `${name}: ${row.format}`).join(" · "));
  detail.replaceChildren(h("header", {}, h("h2", {}, module), close), formats, grid);
}

function draw() {
  const statistic = byId("statistic").value, text = byId("search").value.toLowerCase();
  const modules = [...chosen()].filter(([name]) => name.toLowerCase().includes(text));
  const shared = byId("shared").checked ? range(modules.flatMap(([, rows]) => rows), statistic) : null;
  byId("about").textContent = ABOUT[statistic] || "";
  const cards = modules.map(([name, rows]) => {
    const card = h("button", { type: "button", class: "card", "aria-expanded": String(name === shown) }, h("h2", {}, name));
    card.append(chart(rows, statistic, shared || range(rows, statistic)));
    card.addEventListener("click", () => {
      shown = shown === name ? null : name;
      draw();
      if (shown !== null) byId("detail").scrollIntoView({ block: "nearest" });
    });
    return card;
  });
  byId("overview").replaceChildren(...cards);
  byId("nothing").hidden = cards.length > 0 || DATA.operands.length === 0;
  const found = modules.find(([name]) => name === shown);
  showDetail(found ? shown : null, found ? found[1] : []);
}

function choices(id, values) {
  byId(id).append(...values.map((value) => h("option", { value }, String(value))));
  byId(id).addEventListener("change", draw);
}

function start() {
  const there = new Set(DATA.operands.map((row) => `${row.gemm}.${row.operand}`));
  const named = OPERANDS.filter((name) => there.has(name));
  choices("statistic", DATA.statistics);
  choices("operand", ["all", ...named]);
  choices("rank", DATA.ranks);
  byId("statistic").value = "relative_error";
  byId("rank-label").hidden = DATA.ranks.length < 2;
  byId("search").addEventListener("input", draw);
  byId("shared").addEventListener("change", draw);
  byId("legend").append(...named.map((name) => h("li", { style: tint(name) }, h("i"), name)));
  byId("nonfinite").append(...DATA.nonfinite.map((bad) => h("p", { class: "notice" },
    `NaN or Inf first in ${bad.operand} of ${bad.gemm} of ${bad.module}, at step ${bad.step}, on rank ${bad.rank}.`)));
  byId("controls").addEventListener("submit", (event) => event.preventDefault());
  startTheme();
  startSearchKeys(byId("search"));
  draw();
  document.documentElement.dataset.ready = "true";
}

start();
