// SPDX-License-Identifier: Apache-2.0
// Bytes that the forward saves for the backward, by module, compared with BF16.

const MEMORY_ROWS = 40;

async function showMemory(data) {
  const view = byId("memory-view");
  const sum = totals(data.rows);
  if (sum.elements) {
    view.append(
      h(
        "p",
        { class: "about" },
        `The quantized matmuls save operands of ${bytesText(sum.saved)}, and in BF16 ${bytesText(2 * sum.elements)}. ` +
          "An operand that several matmuls share (x of q, k and v) counts once, for the first.",
      ),
      moduleTable(operandRows(data)),
    );
  } else view.append(h("p", { class: "about" }, nothingSaved(data)));
  const graphs = data.graphs.filter(({ saved }) => saved !== null);
  for (const graph of graphs) {
    const saved = JSON.parse(await data.text(graph.saved));
    view.append(allKept(graph, saved, graphs.length > 1));
  }
}

// [{name, here, bf16}], equal layers together: by the lines of the tree that hold matmuls.
function operandRows(data) {
  const groups = new Map();
  for (const row of data.rows) {
    if (!row.saved_elements || !row.counts) continue;
    const group = groups.get(row.groupPath) || { name: row.groupPath, copies: 0, here: 0, bf16: 0 };
    group.copies += 1;
    group.here += row.saved_bytes;
    group.bf16 += 2 * row.saved_elements;
    groups.set(row.groupPath, group);
  }
  return [...groups.values()].sort((one, other) => other.bf16 - one.bf16);
}

function moduleTable(rows) {
  const largest = Math.max(...rows.map(({ bf16 }) => bf16), 1);
  return h(
    "div",
    { class: "panel memory" },
    h(
      "table",
      {},
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          h("th", {}, "Module"),
          h("th", { class: "wide" }, "Saved here, and in BF16"),
          h("th", { class: "number" }, "Here"),
          h("th", { class: "number" }, "BF16"),
          h("th", { class: "number" }, "Part"),
        ),
      ),
      h(
        "tbody",
        {},
        rows.slice(0, MEMORY_ROWS).map((row) => memoryRow(row, largest)),
      ),
    ),
    rows.length > MEMORY_ROWS
      ? h("p", { class: "empty" }, `and ${rows.length - MEMORY_ROWS} smaller`)
      : null,
  );
}

function memoryRow({ name, copies, here, bf16 }, largest) {
  const width = (n) => ({ width: `${(100 * n) / largest}%` });
  return h(
    "tr",
    {},
    h(
      "td",
      {},
      h("code", {}, name),
      copies > 1 ? h("span", { class: "muted" }, ` ×${copies}`) : null,
    ),
    h(
      "td",
      { class: "wide" },
      h(
        "span",
        { class: "over" },
        h("i", { style: width(bf16) }),
        h("i", { class: "here", style: width(here) }),
      ),
    ),
    h("td", { class: "number", "data-label": "here" }, bytesText(here)),
    h("td", { class: "number", "data-label": "BF16" }, bytesText(bf16)),
    h("td", { class: "number", "data-label": "part" }, `${Math.round((100 * here) / bf16)}%`),
  );
}

// Everything that the backward takes from the forward, as [module, node, type, bytes, kind].
function allKept(graph, saved, several) {
  const kinds = { quantized: 0, other: 0, input: 0 };
  for (const [, , , bytes, kind] of saved) kinds[kind] += bytes || 0;
  const symbolic = saved.filter(([, , , bytes]) => bytes === null).length;
  const title = `All that the backward${several ? ` of graph ${graph.number}` : ""} takes from the forward`;
  const largest = Math.max(kinds.quantized, kinds.other, 1);
  return h(
    "div",
    { class: "saved" },
    h("h3", {}, title),
    bar("quantized operands", kinds.quantized, largest, bytesText, "var(--series-0)"),
    bar("other tensors", kinds.other, largest, bytesText),
    h(
      "p",
      { class: "muted" },
      `Parameters and inputs (${bytesText(kinds.input)}) exist anyway.` +
        (symbolic
          ? ` ${countText(symbolic, "tensor")} of symbolic size ${symbolic > 1 ? "are" : "is"} not counted.`
          : ""),
    ),
    h("details", {}, h("summary", {}, "the other tensors, by module"), otherTable(saved)),
  );
}

// Tensors that are no operands of ours, equal layers together.
function otherTable(saved) {
  const groups = new Map();
  for (const [module, name, type, bytes, kind] of saved) {
    if (kind !== "other") continue;
    const where = (modulePath(module) || "no module").replace(/\.\d+(?=\.|$)/g, ".*");
    const key = `${where} ${type}`;
    const group = groups.get(key) || { where, type, name, count: 0, bytes: 0 };
    group.count += 1;
    group.bytes += bytes || 0;
    groups.set(key, group);
  }
  const rows = [...groups.values()].sort((one, other) => other.bytes - one.bytes);
  return h(
    "div",
    { class: "scroll-x" },
    h(
      "table",
      { class: "other" },
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          h("th", {}, "Module"),
          h("th", {}, "Tensor"),
          h("th", { class: "number" }, "How many"),
          h("th", { class: "number" }, "Bytes"),
        ),
      ),
      h(
        "tbody",
        {},
        rows.map(({ where, type, name, count, bytes }) =>
          h(
            "tr",
            {},
            h("td", { class: "mono" }, where),
            h("td", { class: "mono" }, `${name}: ${type}`),
            h("td", { class: "number" }, count),
            h("td", { class: "number" }, bytesText(bytes)),
          ),
        ),
      ),
    ),
  );
}
