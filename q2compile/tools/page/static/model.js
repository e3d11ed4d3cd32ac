// SPDX-License-Identifier: Apache-2.0
// The report's rows as the page uses them, and the tree of modules with equal layers folded.

const GEMMS = { fprop: ["x", "w", "y"], dgrad: ["dy", "w", "dx"], wgrad: ["dy", "x", "dw"] };
const SERIES = 9; // colors of recipes
// The parts of the table and their titles. A layer is counted in the first, or the second.
const PARTS = {
  model: "",
  products: "Products of activations, such as attention's, without a weight",
  shapes: "The same matmuls, compiled for other shapes",
  inference: "The same matmuls, compiled for inference",
};

// data: see q2compile/tools/page/document.py. Adds to it: each row's recipe, and `path`,
// where it stands in the tree; and tree, its lines.
function loadModel(data) {
  data.recipes.forEach((recipe, place) => {
    Object.assign(recipe, { place, tint: `var(--series-${place % SERIES})` });
  });
  data.rows.forEach((row) => {
    const recipe = row.recipe === null ? null : data.recipes[row.recipe];
    Object.assign(row, {
      recipe,
      state: stateOf(row),
      shapeText: row.shape.join("×"),
      reason: row.why.split(/; |: no compiled graph/)[0],
      path: pathOf(row),
      part: partOf(row),
    });
  });
  data.tree = foldRows(data.rows);
  return data;
}

function stateOf(row) {
  if (row.taken) return "taken";
  if (!row.has_parameter) return "no weight";
  return row.graph === null ? "not seen" : "left";
}

function partOf({ counts, has_parameter, training }) {
  if (counts) return has_parameter ? "model" : "products";
  return training ? "shapes" : "inference";
}

// A matmul without a weight is called after its node, <matmul_3>: it stands in its module.
function pathOf(row) {
  if (row.has_parameter) return row.module.split(".");
  const node = row.module.replace(/_\d+>$/, ">");
  return row.scope ? [...row.scope.split("."), node] : [node];
}

// Rows with equal keys are shown as one.
function rowKey(row) {
  const name = row.path.at(-1).replace(/^\d+$/, "#");
  const { part, shapeText, state, recipe, why, spelling, dtype } = row;
  return [part, shapeText, state, recipe?.place, why, spelling, dtype, name].join("|");
}

// The lines of the tree of the rows' modules; names each row's group.
function foldRows(rows) {
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
  return childItems([root], "");
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

function follows(one, other) {
  const next = /^\d+$/.test(one.name) && Number(other.name) === Number(one.name) + 1;
  return next && signature(one) === signature(other);
}

// The lines under nodes that are shown as one.
function childItems(nodes, prefix) {
  const runs = [];
  for (const child of nodes[0].children.values()) {
    const last = runs.at(-1)?.at(-1);
    if (last && follows(last, child)) runs.at(-1).push(child);
    else runs.push([child]);
  }
  return runs.map((run) => {
    const names = run.map(({ name }) => name);
    const equal = nodes.flatMap((node) => names.map((name) => node.children.get(name)));
    const label = names.length > 1 ? `${names[0]}–${names.at(-1)}` : names[0];
    return itemOf(label, prefix + label, names.length, equal);
  });
}

// A line: its path has "0–31" for a run of equal layers, of which there are copies. An only child is
// shown in its parent's line: model.layers.0–31.
function itemOf(label, path, copies, nodes) {
  const own = nodes.flatMap(({ rows }) => rows);
  for (const row of own) Object.assign(row, { groupPath: path, group: `${path}|${rowKey(row)}` });
  const inner = childItems(nodes, `${path}.`);
  if (copies === 1 && !own.length && inner.length === 1)
    return { ...inner[0], label: `${label}.${inner[0].label}` };
  return { label, path, copies, inner, rows: [...own, ...inner.flatMap(({ rows }) => rows)] };
}

// The first row of each layer: one that was compiled several times counts once.
function layersOf(rows) {
  const counted = rows.filter((row) => row.counts);
  return [...Map.groupBy(counted, (row) => row.layer).values()].map(([first]) => first);
}

// Sums over the layers of rows: those of each recipe, bytes saved for the backward.
function totals(rows) {
  const layers = layersOf(rows).filter((row) => row.has_parameter);
  const saving = rows.filter((row) => row.has_parameter && row.counts && row.saved_elements);
  return {
    weights: layers.length,
    taken: layers.filter((row) => row.taken).length,
    saved: sumOf(saving.map((row) => row.saved_bytes)),
    elements: sumOf(saving.map((row) => row.saved_elements)),
    of: Map.groupBy(layers, (row) => row.recipe || row.state),
  };
}

// A module's path in the model, of a graph's comment: "L['self'].model.layers.0" -> model.layers.0,
// "G['net'].__dict__['_modules']['up']" -> up.
function modulePath(comment) {
  return comment
    .replace(/^[LG]\[[^\]]*\](\.__closure__\[\d+\]\.cell_contents)?/, "")
    .replace(/\.__dict__\['_modules'\]\['([^']*)'\]/g, ".$1")
    .replace(/^\./, "");
}

function chip({ recipe, state }) {
  if (!recipe) return h("span.chip.hollow", state === "left" ? "BF16" : state);
  return h("span.chip", { style: { "--tint": recipe.tint } }, recipe.name);
}

// A bar of shares, one piece for each recipe, what is left last.
function recipeMeter({ of }) {
  const pieces = [...of].sort(([a], [b]) => (typeof a === "string") - (typeof b === "string"));
  const words = pieces.map(([key, rows]) => `${rows.length} ${key.name || key}`).join(", ");
  const piece = ([key, rows]) =>
    h("i", { style: { "flex-grow": rows.length, "--tint": key.tint || "var(--plain)" } });
  return h("span.meter", { role: "img", "aria-label": words, title: words }, pieces.map(piece));
}
