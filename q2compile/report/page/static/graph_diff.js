// SPDX-License-Identifier: Apache-2.0
// Two stages of a graph side by side: what changed, what the passes did, and what a node is.

class DiffView {
  constructor(graphs, stage, before, after, origins) {
    Object.assign(this, { graphs, stage, before, after, origins });
    this.rows = diffGraphs(before, after);
    this.rows.forEach((row, i) => {
      row.place = i;
    });
    this.list = h("div", { class: "diff" });
    this.element = h("div", {}, this.head(), this.list);
    const changed = this.rows.filter(({ kind }) => CHANGES.has(kind)).length;
    if (changed) this.list.append(...this.parts(layerParts(this.rows)));
    else
      this.list.append(
        this.foldElement(
          {
            from: 0,
            to: this.rows.length,
            fold: `Nothing changed here: show the ${countText(this.rows.length, "node")}`,
          },
          true,
        ),
      );
  }

  head() {
    const of = (kinds) => this.rows.filter(({ kind }) => kinds.includes(kind)).length;
    const counts = [
      ["changed", of(["changed", "replaced"])],
      ["moved", of(["moved"]) / 2],
      ["removed", of(["removed"])],
      ["added", of(["added"])],
    ];
    const changes = opChanges(this.before, this.after);
    const passes = this.graphs.graph.passes.filter(({ graph }) =>
      this.stage.passes.includes(graph),
    );
    return h(
      "div",
      { class: "graph-head" },
      h(
        "p",
        { class: "counts" },
        h(
          "span",
          {},
          `${countText(this.before.length, "node")} before, ${this.after.length.toLocaleString("en")} after`,
        ),
        counts.map(([kind, n]) =>
          n ? h("span", { class: `mark ${kind}` }, `${n} ${kind}`) : null,
        ),
        h(
          "button",
          { type: "button", class: "quiet", onClick: (event) => this.showAll(event.target) },
          "Show every node",
        ),
      ),
      h(
        "div",
        { class: "tables" },
        changes.length ? opTable(changes) : null,
        passes.length ? passTable(passes) : null,
      ),
      h(
        "div",
        { class: "sides", "aria-hidden": "true" },
        this.stage.names.map((name) => h("span", {}, name)),
      ),
    );
  }

  showAll(button) {
    button.remove();
    this.list.replaceChildren(...this.rowElements(0, this.rows.length));
  }

  parts(parts) {
    const all = [];
    for (const part of parts.flatMap((p) =>
      p.fold ? [p] : changeParts(this.rows, p.from, p.to),
    )) {
      const last = all[all.length - 1];
      if (last && last.unchanged && part.unchanged) last.to = part.to;
      else all.push(part);
    }
    return all.flatMap((part) => {
      if (part.fold) return [this.foldElement(part, false)];
      const fold = countText(part.to - part.from, "unchanged node");
      if (part.unchanged) return [this.foldElement({ ...part, fold }, true)];
      return this.rowElements(part.from, part.to);
    });
  }

  // A line in the place of rows; it opens to all of them, or to those with changes.
  foldElement({ from, to, fold }, all) {
    const element = h(
      "button",
      { class: "fold", type: "button", "data-from": from, "data-to": to },
      fold,
    );
    element.open = () =>
      element.replaceWith(
        ...(all ? this.rowElements(from, to) : this.parts([{ from, to, fold: null }])),
      );
    element.addEventListener("click", element.open);
    return element;
  }

  rowElements(from, to) {
    const chunks = [];
    let module = null;
    for (let start = from; start < to; start += CHUNK) {
      const elements = [];
      for (const row of this.rows.slice(start, Math.min(to, start + CHUNK))) {
        const here = (row.right || row.left).module;
        if (here !== module && (here || module)) elements.push(this.moduleElement(here));
        module = here;
        elements.push(this.rowElement(row));
      }
      chunks.push(h("div", { class: "chunk", style: { "--lines": elements.length } }, elements));
    }
    return chunks;
  }

  moduleElement(module) {
    if (!module) return h("div", { class: "in-module muted" }, "no module");
    return h(
      "div",
      { class: "in-module" },
      h(
        "button",
        { class: "link", type: "button", onClick: () => this.graphs.links.module(module) },
        module,
      ),
    );
  }

  rowElement(row) {
    const cell = (node, side) =>
      h("div", { class: `cell ${side}` }, node ? this.nodeText(node, row) : null);
    return h(
      "div",
      { class: `pair ${row.kind}`, "data-place": row.place },
      cell(row.left, "left"),
      cell(row.right, "right"),
    );
  }

  nodeText(node, row) {
    const name = h(
      "button",
      {
        class: "node",
        type: "button",
        "aria-expanded": "false",
        title: node.name,
        onClick: (event) => this.toggleInfo(event.currentTarget, node, row),
      },
      shortNames(node.name),
    );
    const q2 = /^q2\./.test(node.call) ? " q2" : "";
    return [
      name,
      node.type ? h("span", { class: "type" }, `: ${node.type}`) : null,
      node.call
        ? h(
            "span",
            { class: `call${q2}` },
            ` ${node.name === "return" ? "" : "= "}${this.shortCall(node.call)}`,
          )
        : null,
    ];
  }

  // A recipe's three texts are written once on this page: by its name here.
  shortCall(call) {
    let text = call;
    for (const { name, fprop, dgrad, wgrad } of this.graphs.data.recipes)
      text = text.replace(`'${fprop}', '${dgrad}', '${wgrad}'`, `‹${name}›`);
    return shortNames(text);
  }

  toggleInfo(button, node, row) {
    const pair = button.closest(".pair");
    const open = pair.nextElementSibling;
    const same =
      open &&
      open.matches(".info") &&
      open.dataset.key === node.key &&
      button.getAttribute("aria-expanded") === "true";
    this.list.querySelectorAll(".info").forEach((element) => element.remove());
    this.list
      .querySelectorAll(".node[aria-expanded=true]")
      .forEach((element) => element.setAttribute("aria-expanded", "false"));
    if (same) return;
    button.setAttribute("aria-expanded", "true");
    pair.after(this.info(node, row.left === node && row.right !== node ? "before" : "after"));
  }

  info(node, side) {
    const stage = this.stage[side].replace(/\.txt$/, "");
    const [stack, origin] = (this.origins.stages[stage] || {})[node.name] || [-1, ""];
    const frames =
      stack < 0 ? [] : this.origins.stacks[stack].map((place) => this.origins.frames[place]);
    const nodes = side === "before" ? this.before : this.after;
    const users = nodes.filter(
      (other) => other.graph === node.graph && mentions(other.call, node.name),
    );
    const inputs = nodes.filter(
      (other) => other.graph === node.graph && other !== node && mentions(node.call, other.name),
    );
    const facts = [
      node.module ? ["Module", this.moduleLink(node)] : null,
      this.matmulLink(node, origin),
      frames.length ? ["Source", sourceStack(frames)] : null,
      inputs.length ? ["Takes", this.nodeLinks(inputs)] : null,
      users.length ? ["Used by", this.nodeLinks(users)] : null,
      this.codeLinks(node, origin),
    ].filter(Boolean);
    return h(
      "div",
      { class: "info", "data-key": node.key },
      h(
        "dl",
        { class: "facts" },
        facts.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]),
      ),
    );
  }

  moduleLink(node) {
    return h(
      "button",
      { class: "link mono", type: "button", onClick: () => this.graphs.links.module(node.module) },
      node.module,
    );
  }

  matmulLink(node, origin) {
    const rows = this.graphs.data.rows.filter(
      (row) =>
        row.graph === this.graphs.graph.number &&
        (row.has_parameter
          ? row.module === node.module
          : [node.name, origin].includes(row.module.slice(1, -1))),
    );
    if (!rows.length) return null;
    return [
      "Matmul",
      h(
        "button",
        {
          class: "link mono",
          type: "button",
          onClick: () => this.graphs.links.matmul(rows[0].place),
        },
        `${rows[0].module} ${rows[0].shapeText}`,
      ),
    ];
  }

  nodeLinks(nodes) {
    const shown = nodes.slice(0, 12);
    return h(
      "span",
      {},
      shown.flatMap((node, i) => [
        i ? ", " : null,
        h(
          "button",
          {
            class: "link mono",
            type: "button",
            onClick: () => this.reveal((other) => other === node),
          },
          shortNames(node.name),
        ),
      ]),
      nodes.length > 12 ? ` and ${nodes.length - 12} more` : null,
    );
  }

  codeLinks(node, origin) {
    const kind =
      this.stage.id === "backward"
        ? ["backward"]
        : this.stage.id === "forward"
          ? ["forward"]
          : ["forward", "backward"];
    const files = kind
      .map((name) => `5_output_code_${name}.py`)
      .filter((name) => name in this.graphs.graph.texts);
    if (!files.length || !node.call) return null;
    const own = this.stage.id === "rewrite" ? node.name : origin;
    return [
      "Generated code",
      h(
        "span",
        {},
        files.flatMap((file, i) => [
          i ? ", " : null,
          h(
            "button",
            {
              class: "link mono",
              type: "button",
              onClick: () => this.graphs.revealCode(file, node.name, own),
            },
            file,
          ),
        ]),
      ),
    ];
  }

  // Opens what hides the first node for which match(node) holds, and goes there.
  reveal(match) {
    const row = this.rows.find(
      ({ left, right }) => (right && match(right)) || (left && match(left)),
    );
    if (!row) return;
    for (;;) {
      const pair = this.list.querySelector(`.pair[data-place="${row.place}"]`);
      if (pair) {
        pair.closest(".chunk").style.contentVisibility = "visible";
        pair.scrollIntoView({ block: "center" });
        const buttons = [...pair.querySelectorAll(".node")];
        const side = row.right && match(row.right) ? buttons.length - 1 : 0;
        if (buttons[side].getAttribute("aria-expanded") !== "true") buttons[side].click();
        buttons[side].focus({ preventScroll: true });
        return;
      }
      const fold = [...this.list.querySelectorAll(".fold")].find(
        (element) =>
          Number(element.dataset.from) <= row.place && row.place < Number(element.dataset.to),
      );
      if (!fold) return;
      fold.open();
    }
  }
}

// Dynamo's names of inputs as the model has them: l_self_modules_mlp_modules_up_parameters_weight_
// is mlp.up.weight, g_net_dict_modules_mlp_... of a global model with a __getattr__ mlp....
function shortNames(text) {
  return text.replace(/\b[lg]_\w*?_(?:modules|parameters|buffers)_(\w+)_(?!\w)/gi, (_, path) =>
    path.replace(/(?:_dict)?_(?:modules|parameters|buffers)_/g, "."),
  );
}

function mentions(call, name) {
  const at = call.indexOf(name);
  return at >= 0 && Boolean(name) && new RegExp(`(?<!\\w)${name}(?!\\w)`).test(call);
}

// The innermost line of source; the way to it folded.
function sourceStack(frames) {
  const [file, line, , code] = frames[frames.length - 1];
  if (frames.length === 1) return sourceText([file, line, code]);
  return h(
    "span",
    {},
    sourceText([file, line, code]),
    h(
      "details",
      {},
      h("summary", {}, `called from ${countText(frames.length - 1, "line")}`),
      h(
        "ol",
        { class: "plain" },
        frames
          .slice(0, -1)
          .map(([f, n, name, text]) =>
            h("li", {}, sourceText([f, n, text]), h("span", { class: "muted" }, `  in ${name}`)),
          ),
      ),
    ),
  );
}

function opTable(changes) {
  return h(
    "div",
    { class: "scroll-x" },
    h(
      "table",
      { class: "ops" },
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          ["Op", "Before", "After", "Change"].map((name, i) =>
            h("th", { class: i ? "number" : null }, name),
          ),
        ),
      ),
      h(
        "tbody",
        {},
        changes.map(([op, a, b]) =>
          h(
            "tr",
            {},
            h("td", { class: "mono" }, op),
            h("td", { class: "number" }, a),
            h("td", { class: "number" }, b),
            h(
              "td",
              { class: `number mark ${b > a ? "added" : "removed"}` },
              `${b > a ? "+" : "−"}${Math.abs(b - a)}`,
            ),
          ),
        ),
      ),
    ),
  );
}

function passTable(passes) {
  return h(
    "div",
    { class: "scroll-x" },
    h(
      "table",
      { class: "passes" },
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          ["Pass", "Matches", "Time", "Change of ops"].map((name, i) =>
            h("th", { class: i === 1 || i === 2 ? "number" : null }, name),
          ),
        ),
      ),
      h(
        "tbody",
        {},
        passes.map((record) =>
          h(
            "tr",
            { class: record.matches ? null : "idle" },
            h(
              "td",
              { class: "mono" },
              record.graph === "joint" ? `${record.name} (joint graph)` : record.name,
            ),
            h("td", { class: "number" }, record.matches),
            h("td", { class: "number" }, secondsText(record.seconds)),
            h("td", { class: "mono" }, passText(record)),
          ),
        ),
      ),
    ),
  );
}

// A pass's own note, or its changes of the counts of ops.
function passText(record) {
  const notes = [record.note, ...(record.details ?? [])].filter(Boolean);
  return notes.join("; ") || opsText(record.ops);
}

function opsText(ops) {
  const plain = (op) => op.replace(/^<built-in function (.*)>$/, "$1").replace(/\.default$/, "");
  return Object.entries(ops)
    .map(([op, n]) => `${plain(op)} ${n > 0 ? "+" : "−"}${Math.abs(n)}`)
    .join(", ");
}
