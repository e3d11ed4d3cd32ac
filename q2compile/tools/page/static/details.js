// SPDX-License-Identifier: Apache-2.0
// The details that a line of the table opens: the drawings of a matmul's GEMMs, and the facts about it.

function details(data, row, links) {
  const facts = [
    row.why ? ["Why not", row.why] : null,
    [
      "Written as",
      h(
        "span",
        {},
        h("code", {}, row.spelling),
        row.dtype ? ` in ${row.dtype} on ${row.device}` : "",
      ),
    ],
    row.source.length ? ["In the source", sourceText(row.source)] : null,
    row.pattern ? ["Policy", h("code", {}, row.pattern)] : null,
    row.saved_elements ? ["Saved for backward", savedWords(row)] : null,
    row.weight ? ["Codes of the weight", row.weight] : null,
    row.taken && Object.keys(row.predicted).length
      ? ["Predicted", predictionList(data, row)]
      : null,
    row.measured.device
      ? ["Measured", h("ul", { class: "plain" }, timesText(row.measured.device, row.measured))]
      : null,
    row.flops
      ? [
          "Work",
          `${quantity(row.flops)} FLOPs, ${typeof row.bytes === "number" ? bytesText(row.bytes) : row.bytes} moved`,
        ]
      : null,
    ["Shown in", h("span", {}, whereLinks(data, row, links))],
  ].filter(Boolean);
  const drawings = row.taken ? gemmDrawings(row.recipe, (gemm) => kernelList(row, gemm)) : null;
  return h(
    "div",
    { class: "details" },
    drawings,
    h(
      "dl",
      { class: "facts" },
      facts.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]),
    ),
  );
}

// Which kernel serves each op of a GEMM, and how often it is called for this matmul alone.
function kernelList(row, gemm) {
  const kernels = row.kernels[gemm];
  if (!kernels) return null;
  const calls = (row.calls || {})[gemm] || {};
  return h(
    "ul",
    { class: "kernels" },
    kernels.split(", ").map((text) => {
      const [op, kernel] = text.split(": ");
      const times = calls[op] ? h("b", {}, `${calls[op]}× `) : null;
      return h(
        "li",
        {},
        times,
        h("code", {}, op),
        kernel ? h("span", { class: "muted" }, ` by ${kernel}`) : null,
      );
    }),
  );
}

function savedWords(row) {
  const bits = ((8 * row.saved_bytes) / row.saved_elements).toFixed(2);
  return `${bytesText(row.saved_bytes)}, ${bits} bits per element; BF16 takes ${bytesText(2 * row.saved_elements)}`;
}

function predictionList(data, row) {
  const devices = data.devices.filter(({ column }) => row.predicted[column]);
  const each = devices.map(({ column, name }) => timesText(name, row.predicted[column]));
  return h("ul", { class: "plain" }, each);
}

function timesText(name, times) {
  const [own, bf16] = ["microseconds", "bf16_microseconds"].map((key) =>
    rangeText(totalOf([times], key), microsecondsText),
  );
  return h("li", {}, h("b", {}, name), ` ${timeWords(overBf16([times]))}: ${own}, BF16 ${bf16}`);
}

function sourceText([file, line, code]) {
  return h(
    "span",
    {},
    h("span", { class: "mono", title: file }, `${shortFile(file)}:${line}`),
    h("br"),
    h("code", { class: "muted" }, code),
  );
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

function whereLinks(data, row, links) {
  const link = (href, text, go) =>
    h(
      "a",
      {
        href,
        onClick: (event) => {
          event.preventDefault();
          go();
        },
      },
      text,
    );
  const model = link("#where", "the model", () => links.module(row.path.join(".")));
  if (!data.graphs.some(({ number }) => number === row.graph)) return [model];
  return [model, ", ", link("#graphs", `graph ${row.graph}`, () => links.node(row))];
}
