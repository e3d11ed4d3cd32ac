// SPDX-License-Identifier: Apache-2.0
// A statistic of an operand over the steps, with the number under the pointer.

const CURVE = { width: 300, height: 96, left: 44, bottom: 14, top: 6 };

class Curve {
  // values: a number for each step, null where there is none; or one for all. reference: a line
  // beside the curve, or null. bad: [{step}], where a NaN or Inf came.
  constructor(steps, values, name, reference, bad) {
    this.values = Array.isArray(values) ? values : steps.map(() => values);
    Object.assign(this, { steps, name, reference, bad });
    const known = [...this.values, reference].filter((value) => value !== null);
    const low = Math.min(...known),
      high = Math.max(...known);
    const room = (high - low) * 0.05 || Math.abs(high) * 0.05 || 1;
    this.low = low > 0 && low < high / 2 ? 0 : low - (low === 0 ? 0 : room);
    this.high = high + room;
  }

  x(step) {
    const { width, left } = CURVE;
    const [first, last] = [this.steps[0], this.steps[this.steps.length - 1]];
    if (last === first) return (left + width) / 2;
    return left + ((step - first) / (last - first)) * (width - left - 4);
  }

  y(value) {
    const { height, top, bottom } = CURVE;
    return top + (1 - (value - this.low) / (this.high - this.low)) * (height - top - bottom);
  }

  // The picture, and the line with the number.
  elements(statistic) {
    const { width, height, left, bottom, top } = CURVE;
    const floor = height - bottom;
    const picture = svg("svg", {
      class: "curve",
      viewBox: `0 0 ${width} ${height}`,
      role: "img",
      "aria-label": `${statistic} by step`,
      style: tint(this.name),
    });
    const at = svg("line", { y1: top, y2: floor, class: "at", visibility: "hidden" });
    picture.append(
      svg("line", { x1: left, x2: width, y1: floor, y2: floor, class: "axis" }),
      ...this.marks(floor),
      ...this.runs(),
      this.text(left - 4, top + 6, written(this.high), "end"),
      this.text(left - 4, floor, written(this.low), "end"),
      this.text(left, height - 2, String(this.steps[0]), "start"),
      this.text(width, height - 2, String(this.steps[this.steps.length - 1]), "end"),
      at,
    );
    const readout = h("div", { class: "readout" });
    const known = this.values.map((value, i) => (value === null ? -1 : i));
    this.show(readout, Math.max(0, ...known));
    picture.addEventListener("pointermove", (event) => {
      const box = picture.getBoundingClientRect();
      const i = this.nearest(((event.clientX - box.left) / box.width) * width);
      at.setAttribute("x1", this.x(this.steps[i]));
      at.setAttribute("x2", this.x(this.steps[i]));
      at.setAttribute("visibility", "visible");
      this.show(readout, i);
    });
    return [picture, readout];
  }

  text(x, y, words, anchor) {
    return svg("text", { x, y, "text-anchor": anchor }, words);
  }

  // Gaussian data's error, and where a NaN or Inf came.
  marks(floor) {
    const { width, left, top } = CURVE;
    const marks = this.bad
      .filter(({ step }) => step >= this.steps[0] && step <= this.steps[this.steps.length - 1])
      .map(({ step }) =>
        svg("line", { x1: this.x(step), x2: this.x(step), y1: top, y2: floor, class: "bad" }),
      );
    if (this.reference === null) return marks;
    const y = this.y(this.reference);
    return [...marks, svg("line", { x1: left, x2: width, y1: y, y2: y, class: "reference" })];
  }

  // The runs of known numbers as polylines; a lone number as a point.
  runs() {
    const runs = [[]];
    this.values.forEach((value, i) => {
      if (value === null) runs.push([]);
      else runs[runs.length - 1].push([this.x(this.steps[i]), this.y(value)]);
    });
    return runs
      .filter((run) => run.length)
      .map((run) =>
        run.length === 1
          ? svg("circle", { cx: run[0][0], cy: run[0][1], r: 2 })
          : svg("polyline", { points: run.map((p) => p.map((n) => n.toFixed(1))).join(" ") }),
      );
  }

  nearest(place) {
    const distance = (i) => Math.abs(this.x(this.steps[i]) - place);
    return this.steps.reduce((best, _, i) => (distance(i) < distance(best) ? i : best), 0);
  }

  show(readout, i) {
    const reference = this.reference === null ? "" : ` · Gaussian data ${written(this.reference)}`;
    readout.replaceChildren(
      `step ${this.steps[i]} `,
      h("b", { style: tint(this.name) }, written(this.values[i])),
      reference,
    );
  }
}
