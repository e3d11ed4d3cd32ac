// SPDX-License-Identifier: Apache-2.0
// Graphs as their dumps have them, and what differs between two stages of one.

// Text of a dump -> nodes {name, text, module, graph, key}, in order. graph: "" or the name of a
// graph that the first one calls; key tells nodes of all of them apart.
function parseGraph(text) {
  const nodes = [];
  let module = "",
    graph = "",
    ended = false;
  for (const line of (text || "").split("\n").filter(Boolean)) {
    if (line.startsWith("# ") && ended) [graph, module] = [line.slice(2), ""];
    else if (line.startsWith("# ")) module = line === "# no module" ? "" : line.slice(2);
    else {
      const [name] = /^\w*/.exec(line);
      const inside = line.includes(" = ") ? modulePath(module) : "";
      nodes.push({ name, text: line, module: inside, graph, key: `${graph}/${name}` });
    }
    ended = line.startsWith("return ");
  }
  return nodes;
}

// Rows of two graphs side by side: {left, right, kind}; kind "same", but for names of operands,
// "changed" (one name, another call), "replaced", "removed", "added", or "moved": of one side alone,
// since the node stands elsewhere on the other.
function diffGraphs(before, after) {
  const place = new Map(after.map((node, j) => [node.key, j]));
  const common = before.map(({ key }, i) => [i, place.get(key)]).filter(([, j]) => j !== undefined);
  const both = new Set(common.map(([i]) => before[i].key));
  const rows = [];
  let i = 0,
    j = 0;
  for (const [stop, end] of [...longestRising(common), [before.length, after.length]]) {
    while (i < stop || j < end) {
      const gone = i < stop && both.has(before[i].key);
      const come = !gone && j < end && both.has(after[j].key);
      const left = i < stop && !come ? before[i++] : null;
      const right = j < end && !gone ? after[j++] : null;
      const kind = gone || come ? "moved" : left && right ? "replaced" : left ? "removed" : "added";
      rows.push({ left, right, kind });
    }
    if (stop < before.length) rows.push({ left: before[i++], right: after[j++], kind: "" });
  }
  const replaced = rows.filter(({ kind }) => kind === "replaced");
  const names = new Map(replaced.map(({ left, right }) => [left.name, right.name]));
  const renamed = (text) => text.replace(/\w+/g, (word) => names.get(word) || word);
  for (const row of rows)
    row.kind ||= renamed(row.left.text) === row.right.text ? "same" : "changed";
  return rows;
}

// The longest subsequence of pairs, sorted by their first number, that rises in the second, too.
function longestRising(pairs) {
  const tails = [],
    before = [];
  pairs.forEach(([, value], at) => {
    let low = tails.findLastIndex((tail) => pairs[tail][1] < value) + 1;
    before[at] = low ? tails[low - 1] : -1;
    tails[low] = at;
  });
  const found = [];
  for (let at = tails.at(-1) ?? -1; at >= 0; at = before[at]) found.unshift(pairs[at]);
  return found;
}
