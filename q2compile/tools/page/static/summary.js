// SPDX-License-Identifier: Apache-2.0
// The summary: the figures under the headline, each with a bar, and the recipes.

function showSummary(data, filterBy) {
  byId("findings").append(...data.findings.map(findingElement));
  const sum = totals(data.rows);
  const tiles = [
    takenTile(sum, data),
    leftTile(data, filterBy),
    savedTile(data, sum),
    ...timeTiles(data),
  ];
  byId("tiles").append(...(data.rows.length ? tiles.filter(Boolean) : []));
  if (data.notes.length) {
    byId("notes").append(
      h(
        "ul",
        { class: "notes" },
        data.notes.map((note) => h("li", {}, note)),
      ),
    );
  }
  byId("recipes").append(
    ...data.recipes.map((recipe) => recipeCard(recipe, data, filterBy)),
    legend(data),
  );
}

// A sentence, and the policy that follows from it and those before, as it stands in options.
function findingElement({ text, policy, about }) {
  if (!policy) return h("li", {}, text);
  const written = h("code", {}, policy);
  return h(
    "li",
    {},
    text,
    h("p", { class: "about" }, about),
    h("p", { class: "policy" }, written, copyButton(policy)),
  );
}

// Copies a text; where the browser forbids it, selects it.
function copyButton(text) {
  const copy = async ({ currentTarget: button }) => {
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(button.previousSibling);
      button.textContent = "Selected";
    }
  };
  return h("button", { type: "button", onClick: copy }, "Copy");
}

function tile(title, value, ...more) {
  return h(
    "div",
    { class: "tile" },
    h("h3", {}, title),
    h("p", { class: "value" }, value),
    ...more,
  );
}

function takenTile(sum, data) {
  const flops = (rows) => rows.reduce((total, row) => total + rowFlops(row), 0);
  const weights = data.rows.filter((row) => row.has_parameter && row.counts);
  const all = flops(weights);
  const share = all ? flops(weights.filter((row) => row.taken)) / all : null;
  return tile(
    "Taken",
    `${sum.taken} of ${sum.weights}`,
    recipeMeter(sum),
    share === null
      ? null
      : h(
          "p",
          { class: "muted" },
          `${(100 * share).toFixed(share > 0.99 && share < 1 ? 1 : 0)}% of the work (FLOPs) of matmuls with a weight`,
        ),
  );
}

// 2 T N K for each GEMM, where all sizes are numbers.
function rowFlops(row) {
  const sizes =
    row.shape.length >= 3 && row.shape.every((n) => typeof n === "number")
      ? row.shape.slice(-3)
      : [0];
  return sizes.reduce((product, n) => product * n, 2);
}

function leftTile(data, filterBy) {
  const layers = layersOf(data.rows);
  const left = layers.filter((row) => row.has_parameter && !row.taken);
  const others = layers.filter((row) => !row.has_parameter);
  if (!left.length && !others.length) return tile("Left", "none");
  const groups = new Map();
  for (const row of [...left, ...others])
    groups.set(row.reason, [...(groups.get(row.reason) || []), row]);
  return tile(
    "Left in BF16",
    left.length ? countText(left.length, "matmul") : "none",
    h(
      "ul",
      { class: "reasons" },
      [...groups]
        .slice(0, 5)
        .map(([reason, rows]) =>
          h(
            "li",
            {},
            h(
              "button",
              { class: "link", type: "button", onClick: () => filterBy({ reason }) },
              `${rows.length} × ${reason || "no reason"}`,
            ),
          ),
        ),
    ),
    groups.size > 5 ? h("p", { class: "muted" }, `and ${groups.size - 5} more reasons`) : null,
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

function savedTile(data, sum) {
  if (!sum.elements)
    return tile("Saved for the backward", "–", h("p", { class: "muted" }, nothingSaved(data)));
  return tile(
    "Saved for the backward",
    `${((8 * sum.saved) / sum.elements).toFixed(2)} bits per element`,
    bar("here", sum.saved, 2 * sum.elements, bytesText, "var(--series-0)"),
    bar("BF16", 2 * sum.elements, 2 * sum.elements, bytesText),
    h(
      "p",
      { class: "muted" },
      `operands of the quantized matmuls; ${bytesText(2 * sum.elements - sum.saved)} less`,
    ),
  );
}

function bar(name, value, largest, text, tint) {
  return h(
    "div",
    { class: "bar-row" },
    h("span", {}, name),
    h(
      "span",
      { class: "track" },
      h("i", { style: { width: `${(100 * value) / largest}%`, "--tint": tint || "var(--plain)" } }),
    ),
    h("span", { class: "number" }, text(value)),
  );
}

// Predicted, for each GPU, and measured, where it was.
function timeTiles(data) {
  const predicted = data.devices.map(({ column, name }) => ({
    name,
    times: data.rows
      .filter((row) => row.taken && row.counts)
      .map((row) => row.predicted[column]),
  }));
  const measured = new Map();
  for (const { measured: times, counts } of data.rows) {
    if (!times.device || !counts) continue;
    if (!measured.has(times.device)) measured.set(times.device, []);
    measured.get(times.device).push(times);
  }
  const stands = h(
    "details",
    {},
    h("summary", {}, "assumptions"),
    h("p", { class: "muted" }, data.assumptions),
  );
  const part = h(
    "p",
    { class: "muted" },
    "for the quantized GEMMs and their quantizers, not for a whole step",
  );
  const alone = h("p", { class: "muted" }, "each matmul by itself, forward and backward");
  return [
    timeTile("Predicted time", predicted, part, stands),
    timeTile(
      "Measured time",
      [...measured].map(([name, times]) => ({ name, times })),
      alone,
    ),
  ];
}

// devices: [{name, times}]; null if none has times.
function timeTile(title, devices, ...notes) {
  const sums = devices
    .map(({ name, times }) => {
      const known = times.filter(Boolean);
      const [own, bf16] = ["microseconds", "bf16_microseconds"].map((key) => totalOf(known, key));
      return { name, own, bf16, ratio: overBf16(known) };
    })
    .filter(({ bf16 }) => bf16.low);
  if (!sums.length) return null;
  const bars = sums.flatMap(({ name, own, bf16, ratio }) => {
    const largest = Math.max(middleOf(own), middleOf(bf16));
    const tint = middleOf(ratio) > 1 ? "var(--series-3)" : "var(--series-0)";
    const text = (times) => () => rangeText(times, microsecondsText);
    return [
      h("p", { class: "device" }, h("b", {}, name), ` ${timeWords(ratio)}`),
      bar("here", middleOf(own), largest, text(own), tint),
      bar("BF16", middleOf(bf16), largest, text(bf16)),
    ];
  });
  return tile(title, timesHeadline(sums), ...bars, ...notes);
}

function timesHeadline(times) {
  const ends = times.flatMap(({ ratio }) => [ratio.low, ratio.high]);
  const all = { low: Math.min(...ends), high: Math.max(...ends) };
  return `${rangeText(all, ratioText(all))} times BF16's`;
}

function microsecondsText(microseconds) {
  return secondsText(microseconds / 1e6);
}

function recipeCard(recipe, data, filterBy) {
  const rows = layersOf(data.rows).filter((row) => row.recipe === recipe);
  return h(
    "article",
    { class: "panel recipe" },
    h(
      "header",
      {},
      h("h3", {}, recipeChip(recipe)),
      h(
        "button",
        {
          class: "link",
          type: "button",
          onClick: () => filterBy({ recipe: String(recipe.place) }),
        },
        countText(rows.length, "matmul"),
      ),
    ),
    gemmDrawings(recipe),
    h(
      "details",
      {},
      h("summary", {}, "as written in graphs"),
      h(
        "dl",
        { class: "written" },
        Object.keys(GEMMS).flatMap((gemm) => [
          h("dt", {}, gemm),
          h("dd", { class: "mono" }, recipe[gemm]),
        ]),
      ),
    ),
  );
}

// The meaning of the boxes in the drawings of these recipes.
function legend(data) {
  const text = data.recipes
    .map((recipe) =>
      Object.keys(GEMMS)
        .map((gemm) => recipe[gemm])
        .join(),
    )
    .join();
  const words = [
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
  ].filter(([pattern]) => pattern.test(text));
  if (!words.length) return "";
  return h(
    "dl",
    { class: "legend" },
    words.flatMap(([, name, meaning]) => [h("dt", {}, name), h("dd", {}, meaning)]),
  );
}
