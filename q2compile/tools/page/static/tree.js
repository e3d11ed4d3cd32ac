// SPDX-License-Identifier: Apache-2.0
// The model as a tree of modules: a line each, equal layers in one line, which opens.

const FIRST_LINES = 24;

class Tree {
  // pick(item): called with the line that was chosen, to show its matmuls.
  constructor(data, pick) {
    this.data = data;
    this.pick = pick;
    this.opened = new Set();
    this.apart = new Set();
    this.match = null;
    this.focus = null;
    this.root = h("div", { role: "tree", "aria-labelledby": "where-title", class: "tree" });
    this.root.addEventListener("keydown", (event) => this.onKey(event));
    this.openFirst();
    this.render();
  }

  // Opens level by level, as long as everything fits on a screen.
  openFirst() {
    let level = this.tops(),
      lines = level.length;
    while (level.length) {
      const inner = level.flatMap((item) => this.innerOf(item));
      lines += inner.length;
      if (lines > FIRST_LINES && this.opened.size) return;
      for (const item of level) this.opened.add(item.path);
      level = inner;
    }
  }

  tops() {
    return childItems([this.data.tree], "");
  }

  // Shows only lines with a row for which match(row) holds; null shows all.
  narrow(match) {
    this.match = match;
    this.render();
  }

  innerOf(item) {
    if (item.copies > 1 && this.apart.has(item.path)) return apart(item);
    return childItems(item.nodes, `${item.path}.`);
  }

  linesOf(item, level) {
    if (this.match && !item.rows.some(this.match)) return [];
    const inner = this.innerOf(item);
    const open = inner.length > 0 && (this.opened.has(item.path) || this.match !== null);
    const line = { item, level, open, opens: inner.length > 0 };
    return [line, ...(open ? inner.flatMap((child) => this.linesOf(child, level + 1)) : [])];
  }

  render() {
    this.lines = this.tops().flatMap((item) => this.linesOf(item, 1));
    if (!this.lines.some(({ item }) => item.path === this.focus))
      this.focus = this.lines.length ? this.lines[0].item.path : null;
    this.root.replaceChildren(...this.lines.map((line) => this.lineElement(line)));
    if (!this.lines.length) this.root.append(h("p", { class: "empty" }, "No module matches."));
  }

  lineElement({ item, level, open, opens }) {
    const sum = totals(item.rows);
    return h(
      "div",
      {
        role: "treeitem",
        "aria-level": level,
        "aria-expanded": opens ? String(open) : null,
        "aria-label": lineWords(item, sum),
        tabindex: item.path === this.focus ? 0 : -1,
        class: "line",
        "data-path": item.path,
        style: { "--level": level - 1 },
        onClick: () => (opens ? this.toggle(item, !open) : this.choose(item)),
      },
      h(
        "span",
        { class: "name" },
        h("span", { class: "twisty", "aria-hidden": "true" }, opens ? (open ? "▾" : "▸") : ""),
        h("code", {}, item.label),
        item.copies > 1 ? this.copiesButton(item) : null,
      ),
      sum.weights ? recipeMeter(sum) : h("span", { class: "muted small" }, "no weight"),
      h("span", { class: "number muted" }, sum.weights ? `${sum.taken}/${sum.weights}` : ""),
      h("span", { class: "number muted" }, sum.saved ? bytesText(sum.saved) : ""),
      h(
        "button",
        {
          class: "link go",
          type: "button",
          tabindex: -1,
          "aria-label": `Show the matmuls of ${item.path}`,
          onClick: (event) => {
            event.stopPropagation();
            this.choose(item);
          },
        },
        "show",
      ),
    );
  }

  copiesButton(item) {
    const isApart = this.apart.has(item.path);
    return h(
      "button",
      {
        class: "copies",
        type: "button",
        tabindex: -1,
        "aria-pressed": String(isApart),
        title: isApart ? "Show these layers as one" : "Show these equal layers one by one",
        onClick: (event) => {
          event.stopPropagation();
          this.setApart(item, !isApart);
        },
      },
      `×${item.copies}`,
    );
  }

  setApart(item, wanted) {
    if (wanted) this.apart.add(item.path).size && this.opened.add(item.path);
    else this.apart.delete(item.path);
    this.focusLine(item.path);
  }

  toggle(item, open) {
    if (open) this.opened.add(item.path);
    else this.opened.delete(item.path);
    this.focusLine(item.path);
  }

  choose(item) {
    this.focusLine(item.path);
    this.pick(item);
  }

  focusLine(path) {
    this.focus = path;
    this.render();
    const line = [...this.root.children].find((element) => element.dataset.path === path);
    if (line) line.focus({ preventScroll: true });
    return line;
  }

  // Opens the way to a module's line, and goes there; to the line of the equal layers it is one of.
  reveal(path) {
    this.match = null;
    let items = this.tops(),
      found = null;
    for (;;) {
      const next =
        items.find((item) => holds(item, path)) ||
        (found ? null : items.find((item) => item.path.startsWith(`${path}.`)));
      if (!next) break;
      if (found) this.opened.add(found.path);
      found = next;
      items = this.innerOf(next);
    }
    const line = found && this.focusLine(found.path);
    if (line) line.scrollIntoView({ block: "center" });
  }

  onKey(event) {
    const elements = [...this.root.querySelectorAll("[role=treeitem]")];
    const here = elements.indexOf(document.activeElement);
    if (here < 0) return;
    if (!moveFocus(event, elements)) {
      if (!this.act(event.key, this.lines[here], elements, here)) return;
      event.preventDefault();
    }
    if (document.activeElement.dataset.path === undefined) return;
    this.focus = document.activeElement.dataset.path;
    for (const element of this.root.children)
      element.tabIndex = element === document.activeElement ? 0 : -1;
  }

  act(key, { item, open, opens, level }, elements, here) {
    if (key === "ArrowRight" && opens && !open) this.toggle(item, true);
    else if (key === "ArrowRight" && open) elements[here + 1].focus();
    else if (key === "ArrowLeft" && open && !this.match) this.toggle(item, false);
    else if (key === "ArrowLeft") elements[this.outer(here, level)].focus();
    else if (key === "*" && item.copies > 1) this.setApart(item, !this.apart.has(item.path));
    else if (key === "Enter" || key === " ") this.choose(item);
    else return false;
    return true;
  }

  outer(here, level) {
    for (let i = here - 1; i >= 0; i -= 1) if (this.lines[i].level < level) return i;
    return here;
  }
}

// Whether a line stands for the module at ``path``, for what holds it, or for layers it is one of.
function holds(item, path) {
  const inside = (row) => `${row.path.join(".")}.`.startsWith(`${path}.`);
  const depth = item.path.split(".").length;
  return item.rows.some(inside) && depth <= path.split(".").length;
}

function lineWords(item, sum) {
  const copies = item.copies > 1 ? `, ${item.copies} equal layers` : "";
  const taken = sum.weights ? `, ${sum.taken} of ${sum.weights} matmuls taken` : ", no weight";
  return `${item.path}${copies}${taken}`;
}
