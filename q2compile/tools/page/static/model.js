// SPDX-License-Identifier: Apache-2.0
// The report's rows as the page uses them, and the tree of modules with equal layers folded.

const GEMMS = { fprop: ["x", "w", "y"], dgrad: ["dy", "w", "dx"], wgrad: ["dy", "x", "dw"] };
const KNOWN_RECIPES = [
  "quartet2",
  "nvfp4",
  "quartet",
  "mxfp4",
  "tetrajet2",
  "mxfp4_2d",
  "quartet2_search",
  "fp8",
  "quartet2_fp8",
];
const SERIES = 9;
// Rows of a layer: of the graph that it is counted by, and of others.
const PARTS = ["the model", "other shapes", "inference"];

// data: see q2compile/tools/page/document.py. Adds to it: each row's place, recipe, kernels, and
// `path`, where it stands in the tree; tree, the root of it; and `texts`, unpacked on demand.
function loadModel(data) {
  const tints = recipeTints(data.recipes);
  data.recipes.forEach((recipe, i) => {
    recipe.place = i;
    recipe.tint = tints[i];
  });
  data.rows.forEach((row, i) => {
    row.place = i;
    row.recipe = row.recipe === null ? null : data.recipes[row.recipe];
    Object.assign(
      row,
      row.kernels === null ? { kernels: {}, calls: {} } : data.kernels[row.kernels],
    );
    row.state = stateOf(row);
    row.shapeText = row.shape.join("×");
    row.reason = row.why.split(/; |: no compiled graph/)[0];
    row.path = pathOf(row);
    row.part = row.counts ? PARTS[0] : row.training ? PARTS[1] : PARTS[2];
    row.ratios = Object.fromEntries(
      Object.entries(row.predicted).map(([device, times]) => [
        device,
        overBf16([times]),
      ]),
    );
  });
  data.tree = foldRows(data.rows);
  const unpacked = new Map();
  data.text = (place) => {
    if (!unpacked.has(place)) unpacked.set(place, unpack(data.texts[place]));
    return unpacked.get(place);
  };
  return data;
}

function recipeTints(recipes) {
  let next = KNOWN_RECIPES.length;
  const of = new Map(KNOWN_RECIPES.map((name, i) => [name, i]));
  return recipes.map(({ name, fprop, dgrad, wgrad }) => {
    const key = of.has(name) ? name : [name, fprop, dgrad, wgrad].join();
    if (!of.has(key)) of.set(key, next++);
    return `var(--series-${of.get(key) % SERIES})`;
  });
}

function stateOf(row) {
  if (row.taken) return "taken";
  if (!row.has_parameter) return "no weight";
  return row.graph === null ? "not seen" : "left";
}

// A matmul without a weight is called after its node, <matmul_3>: it stands in its module.
function pathOf(row) {
  if (row.has_parameter) return row.module.split(".");
  const node = row.module.replace(/_\d+>$/, ">");
  return row.scope ? [...row.scope.split("."), node] : [node];
}

// Rows with equal keys are shown as one.
function rowKey(row) {
  return [
    row.part,
    row.shapeText,
    row.state,
    row.recipe && row.recipe.place,
    row.why,
    row.spelling,
    row.dtype,
    row.path[row.path.length - 1].replace(/^\d+$/, "#"),
  ].join("|");
}

// The tree of the rows' modules; names each row's group.
function foldRows(rows) {
  const tree = buildTree(rows);
  for (const item of childItems([tree], "")) nameGroups(item);
  return tree;
}

function buildTree(rows) {
  const root = { name: "", children: new Map(), rows: [] };
  for (const row of rows) {
    let node = root;
    for (const name of row.path) {
      if (!node.children.has(name))
        node.children.set(name, { name, children: new Map(), rows: [] });
      node = node.children.get(name);
    }
    node.rows.push(row);
  }
  return root;
}

const signatures = new Map();

// Equal numbers for nodes under which everything is equal but the numbers of layers.
function signature(node) {
  if (node.signature === undefined) {
    const inner = [...node.children.values()].map((child) => [child.name, signature(child)]);
    const text = JSON.stringify([node.rows.map(rowKey), inner]);
    if (!signatures.has(text)) signatures.set(text, signatures.size);
    node.signature = signatures.get(text);
  }
  return node.signature;
}

// The lines under nodes that are shown as one. A line: label, path (with "0–31" for a run of
// equal layers), nodes, copies (how many a run has), rows.
function childItems(nodes, prefix) {
  const runs = [];
  for (const child of nodes[0].children.values()) {
    const run = runs[runs.length - 1];
    const last = run && run[run.length - 1];
    if (last && follows(last, child)) run.push(child);
    else runs.push([child]);
  }
  return runs.map((run) => {
    const names = run.map((child) => child.name);
    const parallel = nodes.flatMap((node) => names.map((name) => node.children.get(name)));
    const label = names.length > 1 ? `${names[0]}–${names[names.length - 1]}` : names[0];
    return joined({ label, path: prefix + label, nodes: parallel, copies: names.length, names });
  });
}

function follows(one, other) {
  return (
    /^\d+$/.test(one.name) &&
    Number(other.name) === Number(one.name) + 1 &&
    signature(one) === signature(other)
  );
}

// An only child is shown in its parent's line: model.layers.0–31.
function joined(item) {
  const first = item.nodes[0];
  if (item.copies === 1 && !first.rows.length && first.children.size) {
    const inner = childItems(item.nodes, `${item.path}.`);
    if (inner.length === 1) return { ...inner[0], label: `${item.label}.${inner[0].label}` };
  }
  return { ...item, rows: item.nodes.flatMap(rowsUnder) };
}

// The layers of a run, each on a line of its own.
function apart(item) {
  const prefix = item.path.slice(0, item.path.length - lastPart(item).length);
  return item.names.map((name, i) => {
    const nodes = item.nodes.filter((_, at) => at % item.copies === i);
    return {
      label: name,
      path: prefix + name,
      nodes,
      copies: 1,
      names: [name],
      rows: nodes.flatMap(rowsUnder),
    };
  });
}

function lastPart(item) {
  return item.names.length > 1
    ? `${item.names[0]}–${item.names[item.names.length - 1]}`
    : item.names[0];
}

function rowsUnder(node) {
  return [...node.rows, ...[...node.children.values()].flatMap(rowsUnder)];
}

// Each row's group: the rows that are one line of the table.
function nameGroups(item) {
  item.nodes.forEach((node) =>
    node.rows.forEach((row) => {
      row.groupPath = item.path;
      row.group = `${item.path}|${rowKey(row)}`;
    }),
  );
  childItems(item.nodes, `${item.path}.`).forEach(nameGroups);
}

// Sums over the layers of rows: how many of each recipe, bytes saved for the backward. A layer that
// was compiled several times counts once.
function totals(rows) {
  const sum = { weights: 0, taken: 0, saved: 0, elements: 0, of: new Map() };
  const layers = new Set();
  for (const row of rows) {
    if (!row.has_parameter || !row.counts) continue;
    if (row.saved_elements) {
      sum.saved += row.saved_bytes;
      sum.elements += row.saved_elements;
    }
    if (layers.has(row.layer)) continue;
    layers.add(row.layer);
    sum.weights += 1;
    sum.taken += row.taken;
    const key = row.recipe || row.state;
    sum.of.set(key, (sum.of.get(key) || 0) + 1);
  }
  return sum;
}

// The first row of each layer.
function layersOf(rows) {
  const layers = new Map();
  for (const row of rows) if (row.counts && !layers.has(row.layer)) layers.set(row.layer, row);
  return [...layers.values()];
}

// A module's path in the model, of a graph's comment: "L['self'].model.layers.0" -> model.layers.0,
// "G['net'].__dict__['_modules']['up']" -> up.
function modulePath(comment) {
  return comment
    .replace(/^[LG]\[[^\]]*\](\.__closure__\[\d+\]\.cell_contents)?/, "")
    .replace(/\.__dict__\['_modules'\]\['([^']*)'\]/g, ".$1")
    .replace(/^\./, "");
}

function chip(row) {
  if (row.recipe) return recipeChip(row.recipe);
  return h(
    "span",
    { class: "chip hollow" },
    { left: "BF16", "not seen": "not seen", "no weight": "no weight" }[row.state],
  );
}

function recipeChip(recipe) {
  return h("span", { class: "chip", style: { "--tint": recipe.tint } }, recipe.name);
}

// A bar of shares, one piece for each recipe, what is left last.
function recipeMeter(sum) {
  const pieces = [...sum.of].sort(([a], [b]) => (typeof a === "string") - (typeof b === "string"));
  const words = pieces.map(([key, n]) => `${n} ${key.name || key}`).join(", ");
  return h(
    "span",
    { class: "meter", role: "img", "aria-label": words, title: words },
    pieces.map(([key, n]) =>
      h("i", { style: { "flex-grow": n, "--tint": key.tint || "var(--plain)" } }),
    ),
  );
}
