// SPDX-License-Identifier: Apache-2.0
// The details that a line of the table opens: the drawings of a matmul's GEMMs, and the facts about it.

function details(data, row, links) {
  const { measured, saved_bytes: saved, saved_elements: elements } = row;
  const bits = `${((8 * saved) / elements).toFixed(2)} bits per element`;
  const at = row.dtype ? ` in ${row.dtype} on ${row.device}` : "";
  const moved = typeof row.bytes === "number" ? bytesText(row.bytes) : row.bytes;
  const times = data.devices
    .filter(({ column }) => row.taken && row.predicted[column])
    .map(({ column, name }) => timesText(name, row.predicted[column]));
  const facts = [
    ["Why not", row.why],
    ["Written as", [h("code", row.spelling), at]],
    ["In the source", row.source.length && sourceText(row.source)],
    ["Policy", row.pattern && h("code", row.pattern)],
    [
      "Saved for backward",
      elements && `${bytesText(saved)}, ${bits}; BF16 takes ${bytesText(2 * elements)}`,
    ],
    ["Codes of the weight", row.weight],
    ["Predicted", times.length && h("ul.plain", times)],
    ["Measured", measured.device && h("ul.plain", timesText(measured.device, measured))],
    ["Work", row.flops && `${quantity(row.flops)} FLOPs, ${moved} moved`],
    ["Shown in", whereLinks(data, row, links)],
  ].filter(([, value]) => value);
  return h(
    "div.details",
    row.taken ? gemmDrawings(row.recipe, (gemm) => kernelList(row, gemm)) : null,
    definitions("facts", facts),
  );
}

// Which kernel serves each op of a GEMM, and how often it is called for this matmul alone.
function kernelList(row, gemm) {
  if (!row.kernels[gemm]) return null;
  const item = (text) => {
    const [op, kernel] = text.split(": ");
    const times = row.calls?.[gemm]?.[op];
    const by = kernel ? h("span.muted", ` by ${kernel}`) : null;
    return h("li", times ? h("b", `${times}× `) : null, h("code", op), by);
  };
  return h("ul.kernels", row.kernels[gemm].split(", ").map(item));
}

function timesText(name, { words, own, bf16 }) {
  return h("li", h("b", name), ` ${words}: ${own.text}, BF16 ${bf16.text}`);
}

function sourceText([file, line, code]) {
  const place = h("span.mono", { title: file }, `${shortFile(file)}:${line}`);
  return h("span", place, h("br"), h("code.muted", code));
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
  const link = (text, onClick) => h("button.link", { onClick }, text);
  const model = link("the model", () => links.module(row.path.join(".")));
  const compiled = data.graphs.some(({ number }) => number === row.graph);
  return [model, compiled ? [", ", link(`graph ${row.graph}`, () => links.node(row))] : null];
}
