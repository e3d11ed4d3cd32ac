// SPDX-License-Identifier: Apache-2.0
// Graphs as their dumps have them, and what differs between two stages of one.

const NODE = /^(\w+)(?:: (\([^=]*?\)|[\w.]+\[[^\]]*\]))?(?: = (.*))?$/;

// Text of a dump -> nodes {name, type, call, module, graph, key}, in order. graph: "" or the name
// of a graph that the first one calls; key tells nodes of all of them apart.
function parseGraph(text) {
  const nodes = [];
  let module = "",
    graph = "",
    ended = false;
  for (const line of text.split("\n")) {
    if (line.startsWith("# ")) {
      if (ended) {
        graph = line.slice(2);
        module = "";
        ended = false;
      } else module = line === "# no module" ? "" : line.slice(2);
      continue;
    }
    if (!line) continue;
    const found = NODE.exec(line);
    if (line.startsWith("return ")) {
      ended = true;
      nodes.push(graphNode("return", "", line.slice(7), "", graph));
    } else if (found) {
      nodes.push(
        graphNode(found[1], found[2] || "", found[3] || "", found[3] ? module : "", graph),
      );
    } else {
      nodes.push(graphNode("", "", line, module, graph));
    }
  }
  return nodes;
}

function graphNode(name, type, call, module, graph) {
  return { name, type, call, module: modulePath(module), graph, key: `${graph}/${name}` };
}

// "q2.gemm(...)" -> "q2.gemm", "x.view(...)" -> ".view" where x is a node; an input has none.
function opOf(node, names) {
  const at = node.call.indexOf("(");
  if (node.name === "return" || at <= 0) return "";
  const [first, ...rest] = node.call.slice(0, at).split(".");
  return names.has(first) && rest.length ? `.${rest.join(".")}` : node.call.slice(0, at);
}

// Rows of two graphs side by side: {left, right, kind}; kind "same", "changed" (one name, another
// call), "renamed" (the same but for the names of operands), "replaced", "removed", "added", or
// "moved": of one side alone, since the node stands elsewhere on the other.
function diffGraphs(before, after) {
  const place = new Map(after.map((node, i) => [node.key, i]));
  const common = before
    .map((node, i) => [i, place.get(node.key)])
    .filter(([, j]) => j !== undefined);
  const fixed = longestRising(common);
  const stays = new Set(fixed.map(([left]) => before[left].key));
  const moved = new Set(common.map(([left]) => before[left].key).filter((key) => !stays.has(key)));
  const rows = [];
  let i = 0,
    j = 0;
  for (const [left, right] of [...fixed, [before.length, after.length]]) {
    while (i < left || j < right) {
      const gone = i < left && moved.has(before[i].key);
      const come = !gone && j < right && moved.has(after[j].key);
      rows.push({
        left: i < left && !come ? before[i++] : null,
        right: j < right && !gone ? after[j++] : null,
        kind: gone || come ? "moved" : "",
      });
    }
    if (left < before.length) rows.push({ left: before[left], right: after[right], kind: "" });
    i = left + 1;
    j = right + 1;
  }
  const renames = new Map();
  for (const { left, right } of rows)
    if (left && right && left.name !== right.name) renames.set(left.name, right.name);
  for (const row of rows) row.kind ||= kindOf(row, renames);
  return rows;
}

function kindOf({ left, right }, renames) {
  if (!left) return "added";
  if (!right) return "removed";
  if (left.name !== right.name) return "replaced";
  if (left.call === right.call && left.type === right.type) return "same";
  const renamed = left.call.replace(/\w+/g, (word) => renames.get(word) || word);
  return renamed === right.call && left.type === right.type ? "renamed" : "changed";
}

// The longest subsequence of pairs, sorted by their first number, that rises in the second, too.
function longestRising(pairs) {
  const tails = [],
    before = new Array(pairs.length);
  pairs.forEach(([, value], at) => {
    let low = 0,
      high = tails.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (pairs[tails[middle]][1] < value) low = middle + 1;
      else high = middle;
    }
    before[at] = low ? tails[low - 1] : -1;
    tails[low] = at;
  });
  const found = [];
  for (let at = tails.length ? tails[tails.length - 1] : -1; at >= 0; at = before[at])
    found.push(pairs[at]);
  return found.reverse();
}

const CHANGES = new Set(["changed", "replaced", "moved", "removed", "added"]);

// [[op, before, after], ...] of the ops whose number differs, the largest change first.
function opChanges(before, after) {
  const counts = new Map();
  const names = new Set([...before, ...after].map(({ name }) => name));
  [before, after].forEach((nodes, side) =>
    nodes.forEach((node) => {
      const op = opOf(node, names);
      if (!op) return;
      if (!counts.has(op)) counts.set(op, [0, 0]);
      counts.get(op)[side] += 1;
    }),
  );
  return [...counts]
    .map(([op, [a, b]]) => [op, a, b])
    .filter(([, a, b]) => a !== b)
    .sort(
      (one, other) =>
        Math.abs(other[2] - other[1]) - Math.abs(one[2] - one[1]) || (one[0] < other[0] ? -1 : 1),
    );
}

const CONTEXT = 1; // unchanged rows shown around a change
const SHORTEST_FOLD = 4;

// Parts of rows[from..to): {from, to, unchanged}, where unchanged rows far from a change need not
// be shown.
function changeParts(rows, from, to) {
  const shown = new Uint8Array(to - from);
  for (let i = from; i < to; i += 1) {
    if (!CHANGES.has(rows[i].kind)) continue;
    shown.fill(1, Math.max(0, i - from - CONTEXT), i - from + CONTEXT + 1);
  }
  const parts = [];
  for (let i = from; i < to;) {
    let end = i;
    while (end < to && shown[end - from] === shown[i - from]) end += 1;
    const unchanged = !shown[i - from] && end - i >= SHORTEST_FOLD;
    const last = parts[parts.length - 1];
    if (last && !last.unchanged && !unchanged) last.to = end;
    else parts.push({ from: i, to: end, unchanged });
    i = end;
  }
  return parts;
}

// Layers whose rows differ in nothing but numbers, after the first: {from, to, fold}.
function layerParts(rows) {
  const blocks = [];
  rows.forEach((row, i) => {
    const layer = layerOf(row);
    const last = blocks[blocks.length - 1];
    if (!last || (layer !== null && layer !== last.layer))
      blocks.push({ layer, from: i, to: i + 1 });
    else last.to = i + 1;
  });
  for (const block of blocks) block.text = block.layer ? blockText(rows, block) : block;
  const parts = [];
  for (const block of blocks) {
    const last = parts[parts.length - 1];
    if (last && last.text === block.text) {
      last.to = block.to;
      last.layers.push(block.layer);
    } else {
      const again = parts.length && parts[parts.length - 1].first === block.text;
      parts.push(
        again ? { ...block, layers: [block.layer] } : { ...block, first: block.text, text: null },
      );
    }
  }
  return parts.map(({ from, to, layers }) => ({
    from,
    to,
    fold: layers
      ? `${layers[0]}${layers.length > 1 ? ` to ${layers[layers.length - 1]}` : ""}: the same as above`
      : null,
  }));
}

// "model.layers.3" of a node of model.layers.3.mlp, "" of one of a module outside of such; null of
// one of no module, which goes with what is before it.
function layerOf({ left, right }) {
  const { module } = right || left;
  const found = /^(.*?\.\d+|\d+)(?:\.|$)/.exec(module);
  return found ? found[1] : module ? "" : null;
}

function blockText(rows, { from, to }) {
  return rows
    .slice(from, to)
    .map(({ left, right, kind }) =>
      [kind, left && left.call, right && right.call].join("|").replace(/\d+/g, "#"),
    )
    .join("\n");
}
