// SPDX-License-Identifier: Apache-2.0
// Each graph: two stages side by side, the passes between them, and the code that was generated.

const STAGES = [
  {
    label: "Rewrite",
    files: ["0_dynamo.txt", "1_rewritten.txt"],
    passes: [],
    sides: ["as Dynamo captured it", "with the matmuls taken"],
  },
  {
    label: "Forward",
    files: ["2_forward.txt", "4_after_passes_forward.txt"],
    passes: ["joint", "forward"],
    sides: ["forward, from AOTAutograd", "after q2compile's passes"],
  },
  {
    label: "Backward",
    files: ["3_backward.txt", "4_after_passes_backward.txt"],
    passes: ["backward"],
    sides: ["backward, from AOTAutograd", "after q2compile's passes"],
  },
];
const CODE_LABELS = {
  "5_output_code_forward.py": "Forward code",
  "5_output_code_backward.py": "Backward code",
};

class Graphs {
  // links: {module(path)}
  constructor(data, links) {
    Object.assign(this, { data, links, root: byId("graph-view") });
    if (!data.graphs.length) {
      const how = 'q2compile report DIR shows those of a dump, options={"dump": "DIR"}.';
      this.root.append(h("p.about", `No graphs here: ${how}`));
      return;
    }
    this.tabs = h("div.tabs", { role: "group", "aria-label": "Stage" });
    this.body = h("div.panel.graph-body");
    this.root.append(h("div.graph-bar", this.graphSelect(), this.tabs), this.body);
    this.setGraph(data.graphs[0]);
  }

  graphSelect() {
    const { graphs, rows } = this.data;
    if (graphs.length < 2) return null;
    const name = ({ number }) => {
      const own = rows.filter((row) => row.graph === number);
      const from = own.length ? `, from ${own[0].path.join(".")}` : "";
      return `${number}: ${countText(own.length, "matmul")}${from}`;
    };
    const onChange = ({ target }) => this.setGraph(graphs[target.value]);
    const options = graphs.map((graph, i) => h("option", { value: i }, name(graph)));
    return h("label", "Graph ", h("select", { onChange }, options));
  }

  setGraph(graph) {
    this.graph = graph;
    const select = this.root.querySelector("select");
    if (select) select.value = this.data.graphs.indexOf(graph);
    const pairs = STAGES.filter(({ files }) => files.some((file) => file in graph.texts));
    const known = pairs.flatMap(({ files }) => files);
    const others = Object.keys(graph.texts).filter((name) => !known.includes(name));
    const code = others.map((name) => ({ label: CODE_LABELS[name] || name, files: [name] }));
    this.stages = [...pairs, ...code];
    const button = (stage) => h("button", { onClick: () => this.show(stage) }, stage.label);
    this.tabs.replaceChildren(...this.stages.map(button));
    this.show(this.stages[0]);
  }

  show(stage) {
    this.stage = stage;
    for (const button of this.tabs.children)
      button.setAttribute("aria-pressed", String(button.textContent === stage.label));
    const { texts } = this.graph;
    const [first, second] = stage.files.map((file) => texts[file]);
    if (stage.sides) this.showPair(first || second, second || first);
    else this.body.replaceChildren(h("pre.code", first));
  }

  showPair(before, after) {
    this.rows = diffGraphs(parseGraph(before), parseGraph(after));
    const passes = this.graph.passes.filter(({ graph }) => this.stage.passes.includes(graph));
    const sides = this.stage.sides.map((of) => h("span", of));
    this.body.replaceChildren(
      h("p.counts", countsOf(this.rows)),
      passes.length ? passTable(passes) : "",
      h("div.sides", { "aria-hidden": "true" }, sides),
      h("div.diff", this.parts()),
    );
  }

  // The rows under the names of their modules; runs of unchanged ones are folded.
  parts() {
    const parts = [];
    for (let from = 0, end; from < this.rows.length; from = end) {
      const same = this.rows[from].kind === "same";
      end = this.rows.findIndex(({ kind }, i) => i > from && (kind === "same") !== same);
      if (end < 0) end = this.rows.length;
      const own = this.rows.slice(from, end);
      const elements = own.flatMap((row, i) => this.rowElements(row, from + i));
      const summary = h("summary", countText(own.length, "unchanged node"));
      const folds = same && own.length >= SHORTEST_FOLD;
      parts.push(folds ? h("details.fold", summary, elements) : elements);
    }
    return parts;
  }

  rowElements(row, place) {
    const moduleOf = ({ left, right }) => (right || left).module;
    const module = moduleOf(row);
    const last = place ? moduleOf(this.rows[place - 1]) : "";
    const cell = (side) => h(`div.cell.${side}`, row[side] && this.nodeElements(row[side]));
    row.element = h(`div.pair.${row.kind}`, { tabindex: -1 }, ["left", "right"].map(cell));
    if (module === last) return [row.element];
    const onClick = () => this.links.module(module);
    const heading = module ? h("button.link", { onClick }, module) : "no module";
    return [h("div.in-module", heading), row.element];
  }

  // A node's name, and its call.
  nodeElements({ name, text }) {
    let rest = text.slice(name.length);
    for (const { name: recipe, fprop, dgrad, wgrad } of this.data.recipes)
      rest = rest.replace(`'${fprop}', '${dgrad}', '${wgrad}'`, `‹${recipe}›`); // written once here
    return [h("b", shortNames(name)), shortNames(rest)];
  }

  // Shows the matmul's node in the rewritten graph.
  revealRow(row) {
    const graph = this.data.graphs.find(({ number }) => number === row.graph);
    if (!graph) return;
    this.setGraph(graph);
    const name = row.has_parameter ? null : row.module.slice(1, -1);
    const matches = (node) =>
      name ? node.name === name : node.module === row.module && /linear|matmul|mm/.test(node.text);
    const found = this.rows?.find(({ left, right }) =>
      [right, left].some((node) => node && matches(node)),
    );
    if (!found) return;
    const fold = found.element.closest("details");
    if (fold) fold.open = true;
    found.element.scrollIntoView({ block: "center" });
    found.element.focus({ preventScroll: true });
  }
}

const SHORTEST_FOLD = 4;

// How many nodes there are of each kind.
function countsOf(rows) {
  const of = (...kinds) => rows.filter(({ kind }) => kinds.includes(kind)).length;
  const [before, after] = ["left", "right"].map((side) => rows.filter((row) => row[side]).length);
  const counts = {
    changed: of("changed", "replaced"),
    moved: of("moved") / 2,
    removed: of("removed"),
    added: of("added"),
  };
  const marks = Object.entries(counts).filter(([, n]) => n);
  return [
    h("span", `${countText(before, "node")} before, ${after.toLocaleString("en")} after`),
    marks.map(([kind, n]) => h(`span.mark.${kind}`, `${n} ${kind}`)),
  ];
}

// Dynamo's names of inputs as the model has them: l_self_modules_mlp_modules_up_parameters_weight_
// is mlp.up.weight, g_net_dict_modules_mlp_... of a global model with a __getattr__ mlp....
function shortNames(text) {
  return text.replace(/\b[lg]_\w*?_(?:modules|parameters|buffers)_(\w+)_(?!\w)/gi, (_, path) =>
    path.replace(/(?:_dict)?_(?:modules|parameters|buffers)_/g, "."),
  );
}

function passTable(passes) {
  const columns = { Pass: "mono", Matches: "number", Time: "number", Change: "mono" };
  const rows = passes.map(({ name, graph, matches, time, note, details, ops }) => [
    graph === "joint" ? `${name} (joint graph)` : name,
    matches,
    time,
    [note, ...(details ?? [])].filter(Boolean).join("; ") || opsText(ops),
  ]);
  const made = table("passes", columns, rows);
  passes.forEach(({ matches }, i) => made.tBodies[0].rows[i].classList.toggle("idle", !matches));
  return h("div.scroll-x.tables", made);
}

function opsText(ops) {
  const plain = (op) => op.replace(/^<built-in function (.*)>$/, "$1").replace(/\.default$/, "");
  return Object.entries(ops)
    .map(([op, n]) => `${plain(op)} ${n > 0 ? "+" : "−"}${Math.abs(n)}`)
    .join(", ");
}
