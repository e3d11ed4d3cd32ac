// SPDX-License-Identifier: Apache-2.0
// The model as a tree of modules: a line each, equal layers in one line.

const FIRST_LINES = 24;

class Tree {
  // pick(item): called with the line that was chosen, to show its matmuls.
  constructor(data, pick) {
    this.pick = pick;
    this.lines = [];
    this.none = h("p.empty", "No module matches.");
    const tops = data.tree.map((item) => this.element(item, 0));
    this.root = h("div.tree", tops, this.none);
    this.narrow(null);
  }

  element(item, level) {
    const line = { item, level };
    this.lines.push(line);
    const attributes = { "data-path": item.path, style: { "--level": level } };
    const inner = item.inner.map((one) => this.element(one, level + 1));
    line.element = inner.length
      ? h("details", h("summary.line", attributes, this.cells(item)), inner)
      : h("div.line", { ...attributes, tabindex: -1 }, this.cells(item));
    return line.element;
  }

  cells(item) {
    const sum = totals(item.rows);
    const onClick = (event) => {
      event.preventDefault(); // it is in a summary
      this.pick(item);
    };
    const copies = item.copies > 1 ? h("span.copies", `×${item.copies}`) : null;
    return [
      h("span.name", h("code", item.label), copies),
      sum.weights ? recipeMeter(sum) : h("span.muted.small", "no weight"),
      h("span.number.muted", sum.weights ? `${sum.taken}/${sum.weights}` : ""),
      h("span.number.muted", sum.saved ? bytesText(sum.saved) : ""),
      h("button.link.go", { "aria-label": `Show the matmuls of ${item.path}`, onClick }, "show"),
    ];
  }

  // Shows only lines with a row for which match(row) holds. null shows all: open if everything fits
  // on a screen.
  narrow(match) {
    const fits = this.lines.length <= FIRST_LINES;
    for (const { item, level, element } of this.lines) {
      element.hidden = match !== null && !item.rows.some(match);
      element.open = match !== null || fits || level === 0;
    }
    this.none.hidden = this.lines.some(({ element }) => !element.hidden);
  }

  // Opens the way to a module's line, and goes there; to the line of the equal layers it is one of.
  reveal(path) {
    const found =
      this.lines.findLast(({ item }) => holds(item, path)) ||
      this.lines.find(({ item }) => item.path.startsWith(`${path}.`));
    if (!found) return;
    const way = this.lines.filter(({ element }) => element.contains(found.element));
    for (const { element } of way) Object.assign(element, { hidden: false, open: true });
    this.none.hidden = true;
    const line = found.element.querySelector("summary") || found.element;
    line.focus({ preventScroll: true });
    line.scrollIntoView({ block: "center" });
  }
}

// Whether a line stands for the module at ``path``, for what holds it, or for layers it is one of.
function holds(item, path) {
  const inside = (row) => `${row.path.join(".")}.`.startsWith(`${path}.`);
  const depth = item.path.split(".").length;
  return item.rows.some(inside) && depth <= path.split(".").length;
}
