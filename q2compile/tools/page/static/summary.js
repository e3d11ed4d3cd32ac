// SPDX-License-Identifier: Apache-2.0
// The summary: the figures under the headline, each with a bar, and the recipes.

function showSummary(data, narrow) {
  const sum = totals(data.rows);
  const tiles = [
    takenTile(sum, data),
    leftTile(data, narrow),
    savedTile(data, sum),
    ...timeTiles(data),
  ];
  byId("findings").append(...data.findings.map(findingElement));
  byId("tiles").append(...(data.rows.length ? tiles.filter(Boolean) : []));
  const notes = data.notes.map((note) => h("li", note));
  if (notes.length) byId("notes").append(h("ul.notes", notes));
  const cards = data.recipes.map((recipe) => recipeCard(recipe, data, narrow));
  byId("recipes").append(...cards, legend(data));
}

// A sentence, and the policy that follows from it and those before, as it stands in options.
function findingElement({ text, policy, about }) {
  if (!policy) return h("li", text);
  const written = h("p.policy", h("code", policy), copyButton(policy));
  return h("li", text, h("p.about", about), written);
}

// Copies a text; where the browser forbids it, selects it.
function copyButton(text) {
  const onClick = async ({ currentTarget: button }) => {
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(button.previousSibling);
      button.textContent = "Selected";
    }
  };
  return h("button", { onClick }, "Copy");
}

function tile(title, value, ...more) {
  return h("div.tile", h("h3", title), h("p.value", value), more);
}

function takenTile(sum, data) {
  const flops = (rows) => sumOf(rows.map(rowFlops));
  const weights = data.rows.filter((row) => row.has_parameter && row.counts);
  const share = flops(weights.filter((row) => row.taken)) / flops(weights);
  const percent = (100 * share).toFixed(share > 0.99 && share < 1 ? 1 : 0);
  const work = `${percent}% of the work (FLOPs) of matmuls with a weight`;
  const muted = Number.isNaN(share) ? null : h("p.muted", work);
  return tile("Taken", `${sum.taken} of ${sum.weights}`, recipeMeter(sum), muted);
}

// 2 T N K for each GEMM, where all sizes are numbers.
function rowFlops({ shape }) {
  const known = shape.length >= 3 && shape.every((n) => typeof n === "number");
  return known ? shape.slice(-3).reduce((product, n) => product * n, 2) : 0;
}

function leftTile(data, narrow) {
  const layers = layersOf(data.rows);
  const left = layers.filter((row) => row.has_parameter && !row.taken);
  const groups = [
    ...Map.groupBy([...left, ...layers.filter((row) => !row.has_parameter)], (row) => row.reason),
  ];
  if (!groups.length) return tile("Left", "none");
  const item = ([reason, rows]) => {
    const onClick = () => narrow(reason || "no reason", (row) => row.reason === reason);
    return h("li", h("button.link", { onClick }, `${rows.length} × ${reason || "no reason"}`));
  };
  return tile(
    "Left in BF16",
    left.length ? countText(left.length, "matmul") : "none",
    h("ul.reasons", groups.slice(0, 5).map(item)),
    groups.length > 5
      ? h(
          "details",
          h("summary", `${groups.length - 5} more`),
          h("ul.reasons", groups.slice(5).map(item)),
        )
      : null,
  );
}

// Why no operand is saved in 4 bits.
function nothingSaved(data) {
  const taken = data.rows.filter((row) => row.taken);
  if (!taken.length) return "No matmul was taken, so no operand is saved in 4 bits.";
  return taken.some((row) => row.saved_bytes !== null)
    ? "The quantized matmuls save no operand in 4 bits."
    : "No graph with a backward was compiled.";
}

function savedTile(data, { saved, elements }) {
  const title = "Saved for the backward";
  if (!elements) return tile(title, "–", h("p.muted", nothingSaved(data)));
  const less = bytesText(2 * elements - saved);
  return tile(
    title,
    `${((8 * saved) / elements).toFixed(2)} bits per element`,
    bar("here", saved, 2 * elements, bytesText, "var(--series-0)"),
    bar("BF16", 2 * elements, 2 * elements, bytesText),
    h("p.muted", `operands of the quantized matmuls; ${less} less`),
  );
}

function bar(name, value, largest, text, tint = "var(--plain)") {
  const style = { width: `${(100 * value) / largest}%`, "--tint": tint };
  const track = h("span.track", h("i", { style }));
  return h("div.bar-row", h("span", name), track, h("span.number", text(value)));
}

// Predicted, for each GPU, and measured, where it was.
function timeTiles({ times, assumptions }) {
  const part =
    "for the quantized GEMMs and their quantizers, not for a whole step" +
    (times.measured ? "" : "; q2compile report --measure times them on this machine");
  const stands = h("details", h("summary", "assumptions"), h("p.muted", assumptions));
  const alone = h("p.muted", "each matmul by itself, forward and backward");
  return [
    timeTile("Predicted time", times.predicted, h("p.muted", part), stands),
    timeTile("Measured time", times.measured, alone),
  ];
}

function timeTile(title, times, ...notes) {
  if (!times) return null;
  const bars = times.devices.map(({ name, ratio, words, own, bf16 }) => {
    const largest = Math.max(own.value, bf16.value);
    const tint = ratio > 1 ? "var(--series-3)" : "var(--series-0)";
    return [
      h("p.device", h("b", name), ` ${words}`),
      bar("here", own.value, largest, () => own.text, tint),
      bar("BF16", bf16.value, largest, () => bf16.text),
    ];
  });
  return tile(title, `${times.text} times BF16's`, bars, notes);
}

function recipeCard(recipe, data, narrow) {
  const rows = layersOf(data.rows).filter((row) => row.recipe === recipe);
  const onClick = () => narrow(recipe.name, (row) => row.recipe === recipe);
  const count = h("button.link", { onClick }, countText(rows.length, "matmul"));
  const written = Object.keys(GEMMS).map((gemm) => [gemm, h("code", recipe[gemm])]);
  return h(
    "article.panel.recipe",
    h("header", h("h3", chip({ recipe })), count),
    gemmDrawings(recipe),
    h("details", h("summary", "as written in graphs"), definitions("written", written)),
  );
}

const WORDS = [
  [/nvfp4/, "NVFP4", "4-bit numbers, a scale for each block of 16, one for the tensor"],
  [/mxfp4/, "MXFP4", "4-bit numbers, a power of two for each block of 32"],
  [/_pow2/, "_pow2", "the tensor's scale is a power of two"],
  [/_46/, "4/6", "each block scaled to 4 or to 6, whichever errs less"],
  [
    /ms_eden/,
    "MS-EDEN",
    "unbiased: rounded to nearest, the scales corrected and rounded stochastically",
  ],
  [/rht\d/, "RHT", "random Hadamard transform along the contraction"],
  [/requantize/, "codes of fprop", "computed from the 4-bit codes that the forward saved"],
];

// The meaning of the boxes in the drawings of these recipes.
function legend({ recipes }) {
  const text = recipes.flatMap(({ fprop, dgrad, wgrad }) => [fprop, dgrad, wgrad]).join();
  const words = WORDS.filter(([pattern]) => pattern.test(text));
  return words.length
    ? definitions(
        "legend",
        words.map(([, ...pair]) => pair),
      )
    : "";
}
