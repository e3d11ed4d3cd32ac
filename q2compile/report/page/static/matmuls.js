// Every matmul: filters, a table in which equal layers are one line, and the details of each.

const STATES = ["taken", "left", "not seen", "no weight"];

// links: {module(path), node(row)}: what a click on a module or on "graph" does.
function makeMatmuls(data, links, onNarrow) {
  const state = { text: "", module: null, recipe: "", state: "", reason: "", open: new Set(), apart: new Set() };
  const controls = filterControls(data, state, update);
  byId("filters").append(controls.element);
  const table = h("table", { class: "matmuls" });
  byId("table").append(table);

  function matches(row) {
    return textMatches(row, state.text) && (!state.module || state.module.rows.has(row))
      && (state.recipe === "" || String(row.recipe && row.recipe.place) === state.recipe)
      && (state.state === "" || row.state === state.state) && (state.reason === "" || row.reason === state.reason);
  }

  function update() {
    controls.show();
    const rows = data.rows.filter(matches);
    const groups = new Map();
    for (const row of rows) groups.set(row.group, [...(groups.get(row.group) || []), row]);
    byId("shown").textContent = `${rows.length} of ${countText(data.rows.length, "matmul")}`
      + (groups.size < rows.length ? `, in ${countText(groups.size, "line")}` : "");
    table.replaceChildren(tableHead(data), h("tbody", {}, [...groups].flatMap(([key, group]) => groupLines(key, group))));
    if (!rows.length) table.append(h("caption", {}, "No matmul matches these filters."));
    onNarrow(state.text ? (row) => textMatches(row, state.text) : null);
  }

  function groupLines(key, rows) {
    const lines = [line(key, rows, rows.length > 1 ? rows[0].groupPath : rows[0].path.join("."))];
    if (state.open.has(key)) lines.push(h("tr", { class: "detail" }, h("td", { colspan: 4 + data.devices.length }, details(data, rows, links))));
    if (rows.length > 1 && state.apart.has(key)) {
      for (const row of rows) lines.push(...groupLines(`${key}#${row.place}`, [row]).map((tr) => { tr.classList.add("one"); return tr; }));
    }
    return lines;
  }

  function line(key, rows, name) {
    const [first] = rows;
    const saved = rows.reduce((sum, row) => sum + (row.saved_bytes || 0), 0);
    const open = state.open.has(key);
    return h("tr", { class: `row ${first.state.replace(" ", "-")}${open ? " open" : ""}`, "data-places": rows.map((row) => row.place).join(" "),
      onClick: (event) => { if (!event.target.closest("button, a")) toggle(state.open, key); } },
    h("td", { class: "module" },
      h("button", { class: "link opener", type: "button", "aria-expanded": String(open), "data-key": key,
        onClick: () => toggle(state.open, key) }, h("span", { class: "twisty", "aria-hidden": "true" }, open ? "▾" : "▸"), h("code", {}, name)),
      rows.length > 1 ? h("button", { class: "copies", type: "button", "aria-pressed": String(state.apart.has(key)), title: "List them one by one",
        onClick: () => toggle(state.apart, key) }, `×${rows.length}`) : null),
    h("td", { class: "mono", "data-label": "shape" }, first.shapeText),
    h("td", { "data-label": "recipe" }, chip(first)),
    h("td", { class: "number", "data-label": "kept" }, first.saved_elements ? bytesText(saved) : ""),
    first.taken || first.ratios[data.devices[0].column] && !first.why
      ? data.devices.map(({ column, name: device }) => ratioCell(first.ratios[column], device))
      : h("td", { class: "reason", colspan: data.devices.length }, first.reason));
  }

  function toggle(set, key) {
    if (set.has(key)) set.delete(key); else set.add(key);
    update();
    const button = [...table.querySelectorAll(".opener")].find((element) => element.dataset.key === key);
    if (button) button.focus({ preventScroll: true });
  }

  const view = {
    narrow(filters) { Object.assign(state, { module: null, recipe: "", state: "", reason: "" }, filters); update(); },
    setText(text) { state.text = text.trim().toLowerCase(); update(); },
    // Opens one matmul, whatever the filters are, and brings it into sight.
    reveal(place) {
      const row = data.rows[place];
      if (!row) return;
      if (!matches(row)) { byId("search").value = ""; state.text = ""; view.narrow({}); }
      state.open.add(data.rows.filter(matches).some((other) => other !== row && other.group === row.group)
        ? reserveApart(row) : row.group);
      update();
      const shown = [...table.querySelectorAll("tr.row")].filter((tr) => tr.dataset.places.split(" ").includes(String(place))).pop();
      shown.scrollIntoView({ block: "start" });
      shown.querySelector(".opener").focus({ preventScroll: true });
    },
  };

  function reserveApart(row) {
    state.apart.add(row.group);
    return `${row.group}#${row.place}`;
  }

  update();
  return view;
}

// What of a search's words must be in a matmul's names: all of them.
function textMatches(row, text) {
  if (!text) return true;
  row.searched ||= [row.path.join("."), row.groupPath, row.module, row.shapeText, row.spelling, row.why, row.recipe ? row.recipe.name : "bf16"].join(" ").toLowerCase();
  return text.split(/\s+/).every((word) => row.searched.includes(word));
}

function filterControls(data, state, update) {
  const select = (key, label, options) => h("label", {}, h("span", {}, label),
    h("select", { "data-filter": key, onChange: (event) => { state[key] = event.target.value; update(); } },
      h("option", { value: "" }, "all"), options.map(([value, text]) => h("option", { value }, text))));
  const reasons = [...new Set(data.rows.map((row) => row.reason).filter(Boolean))];
  const states = STATES.filter((name) => data.rows.some((row) => row.state === name));
  const module = h("button", { type: "button", class: "module-filter", onClick: () => { state.module = null; update(); } });
  const clear = h("button", { type: "button", class: "quiet", onClick: () => {
    byId("search").value = "";
    Object.assign(state, { text: "", module: null, recipe: "", state: "", reason: "" });
    update();
  } }, "Clear");
  const element = h("div", { class: "filter-row" },
    select("state", "Which", states.map((name) => [name, name])),
    data.recipes.length ? select("recipe", "Recipe", data.recipes.map((recipe) => [String(recipe.place), recipe.name])) : null,
    reasons.length ? select("reason", "Reason", reasons.map((reason) => [reason, reason])) : null, module, clear);
  const show = () => {
    for (const box of element.querySelectorAll("select")) box.value = state[box.dataset.filter];
    module.hidden = !state.module;
    module.textContent = state.module ? `in ${state.module.path} ✕` : "";
    module.setAttribute("aria-label", state.module ? `Only ${state.module.path}; show all modules` : "");
    clear.hidden = ![state.text, state.module, state.recipe, state.state, state.reason].some(Boolean);
  };
  return { element, show };
}

function tableHead(data) {
  return h("thead", {}, h("tr", {}, h("th", {}, "Module"), h("th", { title: "T×N×K of y[T, N] = x[T, K] wᵀ; the output's shape where there is no weight" }, "Shape T×N×K"),
    h("th", {}, "Recipe"), h("th", { class: "number" }, "Kept for backward"),
    data.devices.map(({ name }) => h("th", { class: "number", title: `Predicted time on ${name}, as a part of BF16's` }, `Time on ${name}, BF16 = 1`))));
}

function ratioCell(ratio, device) {
  if (ratio === undefined) return h("td", { class: "number ratio", "data-label": device });
  return h("td", { class: `number ratio${ratio > 1.005 ? " slower" : ""}`, "data-label": device, title: timeWords(ratio) }, ratio.toFixed(2));
}

function details(data, rows, links) {
  const [row] = rows;
  const facts = [
    row.why ? ["Why not", row.why] : null,
    ["Written as", h("span", {}, h("code", {}, row.spelling), row.dtype ? ` in ${row.dtype} on ${row.device}` : "")],
    row.source.length ? ["In the source", sourceText(row.source)] : null,
    row.pattern ? ["Policy", h("code", {}, row.pattern)] : null,
    row.saved_elements ? ["Kept for backward", savedWords(row)] : null,
    row.taken && Object.keys(row.predicted).length ? ["Predicted", predictionList(data, row)] : null,
    row.flops ? ["Work", `${quantity(row.flops)} FLOPs, ${typeof row.bytes === "number" ? bytesText(row.bytes) : row.bytes} moved`] : null,
    ["Shown in", h("span", {}, whereLinks(data, rows, links))],
  ].filter(Boolean);
  const drawings = row.taken ? gemmDrawings(row.recipe, (gemm) => kernelList(row, gemm)) : null;
  return h("div", { class: "details" }, drawings,
    h("dl", { class: "facts" }, facts.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])));
}

// Which kernel serves each op of a GEMM, and how often it is called for this matmul alone.
function kernelList(row, gemm) {
  const kernels = row.kernels[gemm];
  if (!kernels) return null;
  const calls = (row.calls || {})[gemm] || {};
  return h("ul", { class: "kernels" }, kernels.split(", ").map((text) => {
    const [op, kernel] = text.split(": ");
    const times = calls[op] ? h("b", {}, `${calls[op]}× `) : null;
    return h("li", {}, times, h("code", {}, op), kernel ? h("span", { class: "muted" }, ` by ${kernel}`) : null);
  }));
}

function savedWords(row) {
  const bits = (8 * row.saved_bytes / row.saved_elements).toFixed(2);
  return `${bytesText(row.saved_bytes)}, ${bits} bits a number; BF16 takes ${bytesText(2 * row.saved_elements)}`;
}

function predictionList(data, row) {
  return h("ul", { class: "plain" }, data.devices.filter(({ column }) => row.predicted[column]).map(({ column, name }) => {
    const { microseconds, bf16_microseconds: bf16 } = row.predicted[column];
    return h("li", {}, h("b", {}, name), ` ${timeWords(microseconds / bf16)}: ${microsecondsText(microseconds)}, BF16 ${microsecondsText(bf16)}`);
  }));
}

function sourceText([file, line, code]) {
  return h("span", {}, h("span", { class: "mono", title: file }, `${shortFile(file)}:${line}`), h("br"), h("code", { class: "muted" }, code));
}

// The part of a path that says something: after site-packages, or its last three names.
function shortFile(file) {
  const parts = file.split(/[\\/]/);
  const at = parts.lastIndexOf("site-packages");
  return parts.slice(at >= 0 ? at + 1 : -3).join("/");
}

function quantity(n) {
  if (typeof n !== "number") return n;
  const power = Math.max(0, Math.min(5, Math.floor(Math.log10(Math.max(n, 1)) / 3)));
  return `${(n / 1000 ** power).toPrecision(3)}${["", " k", " M", " G", " T", " P"][power]}`;
}

function whereLinks(data, rows, links) {
  const module = (row) => h("a", { href: "#where", onClick: (event) => { event.preventDefault(); links.module(row.path.join(".")); } }, "the model");
  const graph = (row) => h("a", { href: "#graphs", onClick: (event) => { event.preventDefault(); links.node(row); } }, `graph ${row.graph}`);
  const inPage = (row) => data.graphs.some(({ number }) => number === row.graph);
  return [module(rows[0]), inPage(rows[0]) ? ", " : null, inPage(rows[0]) ? graph(rows[0]) : null];
}
