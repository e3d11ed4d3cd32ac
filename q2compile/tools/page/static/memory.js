// SPDX-License-Identifier: Apache-2.0
// Bytes that the forward saves for the backward beside the operands of the quantized matmuls, which
// the table has.

function showMemory(data) {
  const view = byId("memory-view");
  const { saved, elements } = totals(data.rows);
  const text =
    `The quantized matmuls save operands of ${bytesText(saved)}, and in BF16 ` +
    `${bytesText(2 * elements)}; each matmul's are in the table above. An operand that several ` +
    "matmuls share (x of q, k and v) counts once, for the first.";
  view.append(h("p.about", elements ? text : nothingSaved(data)));
  for (const { number, saved } of data.graphs.filter((graph) => graph.saved !== null)) {
    const of = data.graphs.length > 1 ? ` of graph ${number}` : "";
    view.append(allKept(of, saved));
  }
}

// Everything that the backward takes from the forward, as [module, node, type, bytes, kind].
function allKept(of, saved) {
  const total = (wanted) =>
    sumOf(saved.map(([, , , bytes, kind]) => (kind === wanted && bytes) || 0));
  const [quantized, other] = [total("quantized"), total("other")];
  const largest = Math.max(quantized, other, 1);
  const symbolic = saved.filter(([, , , bytes]) => bytes === null).length;
  const are = symbolic > 1 ? "are" : "is";
  return h(
    "div.saved",
    h("h3", `All that the backward${of} takes from the forward`),
    bar("quantized operands", quantized, largest, bytesText, "var(--series-0)"),
    bar("other tensors", other, largest, bytesText),
    h(
      "p.muted",
      `Parameters and inputs (${bytesText(total("input"))}) exist anyway.`,
      symbolic ? ` ${countText(symbolic, "tensor")} of symbolic size ${are} not counted.` : null,
    ),
    h("details", h("summary", "the other tensors, by module"), otherTable(saved)),
  );
}

// Tensors that are no operands of ours, equal layers together.
function otherTable(saved) {
  const where = (module) => (modulePath(module) || "no module").replace(/\.\d+(?=\.|$)/g, ".*");
  const others = saved.filter(([, , , , kind]) => kind === "other");
  const rows = [...Map.groupBy(others, ([module, , type]) => `${where(module)} ${type}`).values()]
    .map((group) => {
      const [[module, name, type]] = group;
      const bytes = sumOf(group.map(([, , , one]) => one || 0));
      return [where(module), `${name}: ${type}`, group.length, bytes];
    })
    .sort((one, other) => other[3] - one[3])
    .map(([...cells]) => [...cells.slice(0, 3), bytesText(cells[3])]);
  const columns = { Module: "mono", Tensor: "mono", "How many": "number", Bytes: "number" };
  return h("div.scroll-x", table("other", columns, rows));
}
