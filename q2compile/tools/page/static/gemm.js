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
const FORMULAS = { fprop: "y = x wᵀ", dgrad: "dx = dy w", wgrad: "dw = dyᵀ x" };

// A step of "rht128>nvfp4_ms_eden_pow2" -> the box of it: {text, kind, title}.
function stepBox(title) {
  if (SOURCES[title]) return { text: SOURCES[title], kind: "codes", title };
  const turn = /^(r?h)t?(\d+)(_fixed)?$/.exec(title);
  if (!turn) return { text: schemeText(title), kind: "scheme", title };
  const name = turn[1] === "rh" ? "RHT" : "Hadamard";
  return { text: `${name} ${turn[2]}${turn[3] ? ", fixed" : ""}`, kind: "turn", title };
}

// "nvfp4_46_pow2" -> "NVFP4 4/6"
function schemeText(scheme) {
  const [format, ...rest] = scheme.split("_").filter((part) => part !== "pow2");
  const words = rest.join(" ");
  return [format.toUpperCase(), ROUNDING[words] || words].filter(Boolean).join(" ");
}

// text: a GEMM's two operands, "a @ b", or "bf16".
function gemmDrawing(gemm, text, tint) {
  const [left, right, result] = GEMMS[gemm];
  const operands = text === "bf16" ? ["", ""] : text.split(" @ ");
  const lanes = operands.map((steps, i) => ({
    name: [left, right][i],
    boxes: steps ? steps.split(">").map(stepBox) : [],
  }));
  const words = ({ name, boxes }) => `${name}: ${boxes.map((box) => box.text).join(", then ")}`;
  const from = text === "bf16" ? "BF16" : lanes.map(words).join("; ");
  const box = ({ text, kind, title }) => ["→", h(`span.box.${kind}`, { title }, text)];
  const lane = ({ name, boxes }) => h("span.lane", h("code", name), boxes.map(box));
  const label = `${gemm}: ${result} from ${from}`;
  return h(
    "div.gemm",
    { role: "img", "aria-label": label, style: { "--tint": tint } },
    h("span.lanes", lanes.map(lane)),
    h("span.product", "×"),
    text === "bf16" ? h("small.muted", "BF16") : null,
    "→",
    h("code", result),
  );
}

// The three GEMMs of a recipe, under each what `below(gemm)` returns.
function gemmDrawings(recipe, below = () => null) {
  const figure = (gemm) =>
    h(
      "figure",
      h("figcaption", h("b", gemm), " ", h("span.muted", FORMULAS[gemm])),
      gemmDrawing(gemm, recipe[gemm], recipe.tint),
      below(gemm),
    );
  return h("div.gemms", Object.keys(GEMMS).map(figure));
}
