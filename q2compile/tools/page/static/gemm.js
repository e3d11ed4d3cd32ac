// SPDX-License-Identifier: Apache-2.0
// A GEMM as a drawing: the two operands, each on its path from the tensor to the codes, and the product.

const ROUNDING = {
  46: "4/6",
  sr: "stochastic",
  "ms eden": "MS-EDEN",
  rtn: "nearest",
  rtn34: "¾ nearest",
  sr34: "¾ stochastic",
  quest: "QuEST",
  "16x16": "16×16 blocks",
  rceil: "nearest, scales up",
  "rceil sr": "stochastic, scales up",
  "rceil 32x32": "32×32 blocks, scales up",
  "sr clip": "stochastic, clips",
};
const SOURCES = {
  requantize: "codes of fprop",
  reuse: "codes of fprop, transposed",
  forward: "in the forward",
};
const BOX = { height: 24, gap: 12, letter: 6.4, pad: 7 };

// "rht128>nvfp4_ms_eden_pow2" -> the boxes of one operand: [{text, kind, title}].
function operandSteps(text) {
  return text.split(">").map((step) => {
    if (SOURCES[step]) return { text: SOURCES[step], kind: "codes", title: step };
    const turn = /^(r?h)t?(\d+)(_fixed)?$/.exec(step);
    if (turn) {
      const name = turn[1] === "rh" ? "RHT" : "Hadamard";
      return { text: `${name} ${turn[2]}${turn[3] ? ", fixed" : ""}`, kind: "turn", title: step };
    }
    return { text: schemeText(step), kind: "scheme", title: step };
  });
}

// "nvfp4_46_pow2" -> "NVFP4 4/6"
function schemeText(scheme) {
  const [format, ...rest] = scheme.split("_").filter((part) => part !== "pow2");
  const words = rest.join(" ");
  return [format.toUpperCase(), ROUNDING[words] || words].filter(Boolean).join(" ");
}

// gemm: "fprop", "dgrad" or "wgrad"; text: its two operands, "a @ b", or "bf16".
function gemmDrawing(gemm, text, tint) {
  const [left, right, result] = GEMMS[gemm];
  const plain = text === "bf16";
  const paths = plain ? [[], []] : text.split(" @ ").map(operandSteps);
  const lanes = [lane(left, paths[0], 18), lane(right, paths[1], 58)];
  const end = Math.max(...lanes.map(({ end }) => end), plain ? 110 : 0);
  const x = end + 28;
  const words = plain
    ? "BF16"
    : paths
        .map((path, i) => `${[left, right][i]}: ${path.map((step) => step.text).join(", then ")}`)
        .join("; ");
  const width = x + 52;
  return svg(
    "svg",
    {
      class: "gemm",
      viewBox: `0 0 ${width} 76`,
      width,
      height: 76,
      role: "img",
      "aria-label": `${gemm}: ${result} from ${words}`,
      style: { "--tint": plain ? "var(--plain)" : tint },
    },
    lanes.map(({ elements, y, end: from }) => [
      ...elements,
      arrow(`M${from} ${y} H${end + 8} L${x - 9} ${38 + Math.sign(y - 38) * 7}`),
    ]),
    svg("circle", { cx: x, cy: 38, r: 11, class: "product" }),
    svg("text", { x, y: 42, class: "middle" }, "×"),
    svg("text", { x, y: 64, class: "middle small" }, plain ? "BF16" : "FP4"),
    arrow(`M${x + 11} 38 H${x + 24}`),
    svg("text", { x: x + 28, y: 42, class: "operand" }, result),
  );
}

function lane(name, steps, y) {
  const elements = [svg("text", { x: 2, y: y + 4, class: "operand" }, name)];
  let x = 24;
  for (const { text, kind, title } of steps) {
    const width = text.length * BOX.letter + 2 * BOX.pad;
    elements.push(arrow(`M${x} ${y} H${x + BOX.gap - 3}`));
    x += BOX.gap;
    elements.push(
      svg(
        "g",
        { class: `box ${kind}` },
        svg("title", {}, title),
        svg("rect", { x, y: y - BOX.height / 2, width, height: BOX.height, rx: 4 }),
        svg("text", { x: x + width / 2, y: y + 4, class: "middle" }, text),
      ),
    );
    x += width;
  }
  return { elements, y, end: x };
}

function arrow(d) {
  return svg("path", { d, class: "arrow" });
}

// The three GEMMs of a recipe, under each what `below(gemm)` returns.
function gemmDrawings(recipe, below = () => null) {
  return h(
    "div",
    { class: "gemms" },
    Object.keys(GEMMS).map((gemm) =>
      h(
        "figure",
        {},
        h("figcaption", {}, h("b", {}, gemm), " ", h("span", { class: "muted" }, formula(gemm))),
        gemmDrawing(gemm, recipe[gemm], recipe.tint),
        below(gemm),
      ),
    ),
  );
}

function formula(gemm) {
  return { fprop: "y = x wᵀ", dgrad: "dx = dy w", wgrad: "dw = dyᵀ x" }[gemm];
}
