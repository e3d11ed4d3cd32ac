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
      this.root.append(h("p", { class: "about" }, `No graphs here: ${how}`));
      return;
    }
    this.tabs = h("div", { class: "tabs", role: "group", "aria-label": "Stage" });
    this.body = h("div", { class: "panel graph-body" });
    this.root.append(h("div", { class: "graph-bar" }, this.graphSelect(), this.tabs), this.body);
    this.setGraph(data.graphs[0]);
    // The first stage is rendered when it comes near the screen.
    const near = (entries) => entries.some((entry) => entry.isIntersecting) && this.rendered();
    this.watcher = new IntersectionObserver(near, { rootMargin: "400px" });
    this.watcher.observe(this.body);
  }

  // Fulfilled when the graph's first stage is on the page.
  rendered() {
    if (this.graph) this.first ||= this.show(this.stages()[0]);
    return this.first;
  }

  graphSelect() {
    const { graphs, rows } = this.data;
    if (graphs.length < 2) return null;
    const name = ({ number }) => {
      const own = rows.filter((row) => row.graph === number);
      const from = own.length ? `, from ${own[0].path.join(".")}` : "";
      return `${number}: ${countText(own.length, "matmul")}${from}`;
    };
    const pick = ({ target }) => {
      this.setGraph(graphs[target.value]);
      this.rendered();
    };
    const options = graphs.map((graph, i) => h("option", { value: i }, name(graph)));
    return h("label", {}, "Graph ", h("select", { onChange: pick }, options));
  }

  setGraph(graph) {
    Object.assign(this, { graph, first: null });
    const select = this.root.querySelector("select");
    if (select) select.value = this.data.graphs.indexOf(graph);
    const button = (stage) =>
      h("button", { type: "button", onClick: () => this.show(stage) }, stage.label);
    this.tabs.replaceChildren(...this.stages().map(button));
  }

  // Pairs of stages that this graph has, and its other files.
  stages() {
    const pairs = STAGES.filter(({ files }) => files.some((file) => file in this.graph.texts));
    const known = [...pairs.flatMap(({ files }) => files), "nodes.json"];
    const others = Object.keys(this.graph.texts).filter((name) => !known.includes(name));
    return [
      ...pairs,
      ...others.map((name) => ({ label: CODE_LABELS[name] || name, files: [name] })),
    ];
  }

  text(file) {
    const place = this.graph.texts[file];
    return place === undefined ? null : this.data.text(place);
  }

  // Renders a stage; what is returned is fulfilled when it is done, with whether it is on the page.
  async show(stage) {
    this.watcher.disconnect();
    this.stage = stage;
    for (const button of this.tabs.children)
      button.setAttribute("aria-pressed", String(button.textContent === stage.label));
    const files = [...stage.files, "nodes.json"];
    const [first, second, origins] = await Promise.all(files.map((file) => this.text(file)));
    if (this.stage !== stage) return false; // another was asked for meanwhile
    if (stage.sides) this.showPair(first || second, second || first, origins);
    else this.body.replaceChildren(h("pre", { class: "code" }, first));
    this.body.dataset.stage = stage.label;
    return true;
  }

  showPair(before, after, origins) {
    this.rows = diffGraphs(parseGraph(before), parseGraph(after));
    this.origins = origins ? JSON.parse(origins) : { frames: [], stacks: [], stages: {} };
    const passes = this.graph.passes.filter(({ graph }) => this.stage.passes.includes(graph));
    this.body.replaceChildren(
      h("p", { class: "counts" }, countsOf(this.rows)),
      passes.length ? passTable(passes) : "",
      h(
        "div",
        { class: "sides", "aria-hidden": "true" },
        this.stage.sides.map((of) => h("span", {}, of)),
      ),
      h("div", { class: "diff" }, this.parts()),
    );
  }

  // The rows under the names of their modules; runs of unchanged ones are folded.
  parts() {
    const parts = [];
    for (let from = 0, end; from < this.rows.length; from = end) {
      const same = this.rows[from].kind === "same";
      end = from + 1;
      while (end < this.rows.length && (this.rows[end].kind === "same") === same) end += 1;
      const elements = this.rows
        .slice(from, end)
        .flatMap((row, i) => this.rowElements(row, from + i));
      if (!same || end - from < SHORTEST_FOLD) parts.push(elements);
      else {
        const words = countText(end - from, "unchanged node");
        parts.push(h("details", { class: "fold" }, h("summary", {}, words), elements));
      }
    }
    return parts;
  }

  rowElements(row, place) {
    const { module } = row.right || row.left;
    const last = place && (this.rows[place - 1].right || this.rows[place - 1].left).module;
    const open = { class: "link", type: "button", onClick: () => this.links.module(module) };
    row.element = h(
      "div",
      { class: `pair ${row.kind}` },
      ["left", "right"].map((side) =>
        h("div", { class: `cell ${side}` }, row[side] && this.nodeElements(row, side)),
      ),
    );
    const heading = module ? h("button", open, module) : "no module";
    const here = module === (last || "") ? null : h("div", { class: "in-module" }, heading);
    return [here, row.element];
  }

  // A node's name, which shows the source that it came from, and its call.
  nodeElements(row, side) {
    const { name, text } = row[side];
    const toggle = () => {
      const open = row.element.nextElementSibling;
      if (open?.matches(".info")) open.remove();
      else row.element.after(h("div", { class: "info" }, this.sourceOf(row, side)));
    };
    let rest = text.slice(name.length);
    for (const { name: recipe, fprop, dgrad, wgrad } of this.data.recipes)
      rest = rest.replace(`'${fprop}', '${dgrad}', '${wgrad}'`, `‹${recipe}›`); // written once here
    return [
      h("button", { class: "node", type: "button", onClick: toggle }, shortNames(name)),
      shortNames(rest),
    ];
  }

  sourceOf(row, side) {
    const file = this.stage.files[side === "left" ? 0 : 1].replace(/\.txt$/, "");
    const [stack] = this.origins.stages[file]?.[row[side].name] || [];
    const frames = (this.origins.stacks[stack] || []).map((place) => this.origins.frames[place]);
    const line = ([path, number, , code]) => h("li", {}, sourceText([path, number, code]));
    return frames.length
      ? h("ol", { class: "plain" }, frames.map(line))
      : "No line of source is known.";
  }

  // Shows the matmul's node in the rewritten graph.
  async revealRow(row) {
    const graph = this.data.graphs.find(({ number }) => number === row.graph);
    if (!graph) return;
    if (this.graph !== graph) this.setGraph(graph);
    if (!(await this.show(this.stages()[0]))) return;
    const name = row.has_parameter ? null : row.module.slice(1, -1);
    const matches = (node) =>
      name ? node.name === name : node.module === row.module && /linear|matmul|mm/.test(node.text);
    const found = this.rows?.find(({ left, right }) =>
      [right, left].some((node) => node && matches(node)),
    );
    if (!found) return;
    const fold = found.element.closest("details");
    if (fold) fold.open = true;
    const button = [...found.element.querySelectorAll(".node")].at(-1);
    found.element.scrollIntoView({ block: "center" });
    button.click();
    button.focus({ preventScroll: true });
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
  return [
    h("span", {}, `${countText(before, "node")} before, ${after.toLocaleString("en")} after`),
    Object.entries(counts).map(([kind, n]) =>
      n ? h("span", { class: `mark ${kind}` }, `${n} ${kind}`) : null,
    ),
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
  const head = ["Pass", "Matches", "Time", "Change"].map((name, i) =>
    h("th", { class: i === 1 || i === 2 ? "number" : null }, name),
  );
  const row = ({ name, graph, matches, seconds, note, details, ops }) =>
    h(
      "tr",
      { class: matches ? null : "idle" },
      h("td", { class: "mono" }, graph === "joint" ? `${name} (joint graph)` : name),
      h("td", { class: "number" }, matches),
      h("td", { class: "number" }, secondsText(seconds)),
      h(
        "td",
        { class: "mono" },
        [note, ...(details ?? [])].filter(Boolean).join("; ") || opsText(ops),
      ),
    );
  const parts = [h("thead", {}, h("tr", {}, head)), h("tbody", {}, passes.map(row))];
  return h("div", { class: "scroll-x tables" }, h("table", { class: "passes" }, parts));
}

function opsText(ops) {
  const plain = (op) => op.replace(/^<built-in function (.*)>$/, "$1").replace(/\.default$/, "");
  return Object.entries(ops)
    .map(([op, n]) => `${plain(op)} ${n > 0 ? "+" : "−"}${Math.abs(n)}`)
    .join(", ");
}
