// SPDX-License-Identifier: Apache-2.0
// A statistic of an operand over the steps, with the number under the pointer.

const CURVE = { width: 300, left: 44, top: 6, floor: 82, height: 96 };

// The picture, and the line with the number. values: a number for each step, null where there is
// none. reference: a line beside the curve, or null. bad: [{step}], where a NaN or
// Inf came.
function curve(statistic, steps, values, style, reference, bad) {
  const { width, left, top, floor, height } = CURVE;
  const known = [...values, reference].filter((value) => value !== null);
  const [least, most] = [Math.min(...known), Math.max(...known)];
  const room = (most - least) * 0.05 || Math.abs(most) * 0.05 || 1;
  const low = least === 0 || (least > 0 && least < most / 2) ? 0 : least - room;
  const high = most + room;
  const [first, last] = [steps[0], steps.at(-1)];
  const x = (step) =>
    last === first ? (left + width) / 2 : left + ((step - first) / (last - first)) * 252;
  const y = (value) => top + ((high - value) / (high - low)) * (floor - top);
  const level = (kind, at) => svg(`line.${kind}`, { x1: left, x2: width, y1: at, y2: at });
  const upright = (kind, at) => svg(`line.${kind}`, { x1: at, x2: at, y1: top, y2: floor });
  const text = (at, from, words, anchor) =>
    svg("text", { x: at, y: from, "text-anchor": anchor }, words);
  const point = (value, i) => {
    if (value === null) return "";
    const at = `${x(steps[i]).toFixed(1)} ${y(value).toFixed(1)}`;
    return (values[i - 1] ?? null) === null ? `M${at}h0` : `L${at}`; // h0: a dot, if it is alone
  };
  const pointer = upright("at", -1);
  const picture = svg(
    "svg.curve",
    { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${statistic} by step`, style },
    level("axis", floor),
    bad
      .filter(({ step }) => step >= first && step <= last)
      .map(({ step }) => upright("bad", x(step))),
    reference === null ? null : level("reference", y(reference)),
    svg("path", { d: values.map(point).join("") }),
    text(left - 4, top + 6, written(high), "end"),
    text(left - 4, floor, written(low), "end"),
    text(left, height - 2, String(first), "start"),
    text(width, height - 2, String(last), "end"),
    pointer,
  );
  const beside = reference === null ? "" : ` · Gaussian data ${written(reference)}`;
  const readout = h("div.readout");
  const show = (i) =>
    readout.replaceChildren(`step ${steps[i]} `, h("b", { style }, written(values[i])), beside);
  show(Math.max(0, ...values.map((value, i) => (value === null ? -1 : i))));
  picture.addEventListener("pointermove", (event) => {
    const box = picture.getBoundingClientRect();
    const place = ((event.clientX - box.left) / box.width) * width;
    const far = (i) => Math.abs(x(steps[i]) - place);
    const i = steps.reduce((best, _, at) => (far(at) < far(best) ? at : best), 0);
    for (const end of ["x1", "x2"]) pointer.setAttribute(end, x(steps[i]));
    show(i);
  });
  return [picture, readout];
}
