// SPDX-License-Identifier: Apache-2.0
// Each graph: two stages side by side, the passes between them, and the code that was generated.

const PAIRS = [
  {
    id: "rewrite",
    label: "Rewrite",
    before: "0_dynamo.txt",
    after: "1_rewritten.txt",
    passes: [],
    names: ["as Dynamo captured it", "with the matmuls taken"],
  },
  {
    id: "forward",
    label: "Forward",
    before: "2_forward.txt",
    after: "4_after_passes_forward.txt",
    passes: ["joint", "forward"],
    names: ["forward, from AOTAutograd", "after q2compile's passes"],
  },
  {
    id: "backward",
    label: "Backward",
    before: "3_backward.txt",
    after: "4_after_passes_backward.txt",
    passes: ["backward"],
    names: ["backward, from AOTAutograd", "after q2compile's passes"],
  },
];
const CODE_LABELS = {
  "5_output_code_forward.py": "Forward code",
  "5_output_code_backward.py": "Backward code",
};
const CHUNK = 80; // rows, or lines of code, that the browser lays out at once

class Graphs {
  // links: {module(path), matmul(place)}
  constructor(data, links) {
    this.data = data;
    this.links = links;
    this.graph = data.graphs[0];
    this.parsed = new Map();
    this.root = byId("graph-view");
    if (!this.graph) {
      this.root.append(
        h(
          "p",
          { class: "about" },
          'No graphs here: q2compile report DIR shows those of a dump, options={"dump": "DIR"}.',
        ),
      );
      return;
    }
    this.tabs = h("div", { role: "tablist", "aria-label": "Stage", class: "tabs" });
    this.tabs.addEventListener("keydown", (event) => this.onTabKey(event));
    this.body = h("div", { class: "panel graph-body", role: "tabpanel", tabindex: -1 });
    this.root.append(h("div", { class: "graph-bar" }, this.graphSelect(), this.tabs), this.body);
    this.showTabs();
    this.wait();
  }

  // The first stage is rendered when it comes near the screen.
  wait() {
    this.watcher = new IntersectionObserver(
      (entries) => {
        if (entries.some((entry) => entry.isIntersecting)) this.show(this.stages()[0].id);
      },
      { rootMargin: "400px" },
    );
    this.watcher.observe(this.body);
  }

  // Fulfilled when a stage is on the page.
  async rendered() {
    if (this.graph && !this.body.firstChild) await this.show(this.stages()[0].id);
  }

  graphSelect() {
    if (this.data.graphs.length < 2) return null;
    return h(
      "label",
      {},
      h("span", {}, "Graph "),
      h(
        "select",
        { onChange: (event) => this.setGraph(Number(event.target.value)) },
        this.data.graphs.map((graph, i) => h("option", { value: i }, this.graphName(graph))),
      ),
    );
  }

  graphName(graph) {
    const rows = this.data.rows.filter((row) => row.graph === graph.number);
    return `${graph.number}: ${countText(rows.length, "matmul")}${rows.length ? `, from ${rows[0].path.join(".")}` : ""}`;
  }

  async setGraph(place) {
    this.graph = this.data.graphs[place];
    const select = this.root.querySelector("select");
    if (select) select.value = String(place);
    this.showTabs();
    await this.show(this.stages()[0].id);
  }

  // Pairs of stages and files that this graph has.
  stages() {
    const { texts } = this.graph;
    const pairs = PAIRS.filter(({ before, after }) => before in texts || after in texts);
    const known = new Set(PAIRS.flatMap(({ before, after }) => [before, after]));
    const code = Object.keys(CODE_LABELS);
    const files = [...code, ...Object.keys(texts).filter((name) => !code.includes(name))].filter(
      (name) => name in texts && !known.has(name) && name !== "nodes.json",
    );
    return [
      ...pairs,
      ...files.map((name) => ({ id: name, label: CODE_LABELS[name] || name, file: name })),
    ];
  }

  showTabs() {
    this.tabs.replaceChildren(
      ...this.stages().map(({ id, label }) =>
        h(
          "button",
          {
            role: "tab",
            type: "button",
            id: `tab-${id}`,
            "aria-selected": "false",
            tabindex: -1,
            onClick: () => this.show(id),
          },
          label,
        ),
      ),
    );
    this.tabs.firstChild.tabIndex = 0;
  }

  onTabKey(event) {
    const tabs = [...this.tabs.children];
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const next = tabs[tabs.indexOf(document.activeElement) + step];
    if (!next) return;
    event.preventDefault();
    next.focus();
    next.click();
  }

  // Renders a stage; what is returned is fulfilled when it is done, with whether it is on the page.
  async show(id) {
    this.watcher.disconnect();
    const stage = this.stages().find((one) => one.id === id) || this.stages()[0];
    for (const tab of this.tabs.children) {
      const here = tab.id === `tab-${stage.id}`;
      tab.setAttribute("aria-selected", String(here));
      tab.tabIndex = here ? 0 : -1;
    }
    this.stage = stage;
    let view;
    if (stage.file) view = new CodeView(await this.text(stage.file));
    else {
      const [before, after, origins] = await Promise.all([
        this.nodes(stage.before),
        this.nodes(stage.after),
        this.origins(),
      ]);
      view = new DiffView(this, stage, before || after, after || before, origins);
    }
    if (this.stage !== stage) return false; // another was asked for meanwhile
    this.view = view;
    this.body.setAttribute("aria-labelledby", `tab-${stage.id}`);
    this.body.replaceChildren(view.element);
    return true;
  }

  text(file) {
    const place = this.graph.texts[file];
    return place === undefined ? Promise.resolve(null) : this.data.text(place);
  }

  async nodes(file) {
    const place = this.graph.texts[file];
    if (place === undefined) return null;
    if (!this.parsed.has(place)) this.parsed.set(place, parseGraph(await this.data.text(place)));
    return this.parsed.get(place);
  }

  async origins() {
    const text = await this.text("nodes.json");
    return text ? JSON.parse(text) : { frames: [], stacks: [], stages: {} };
  }

  // Shows the matmul's node in the rewritten graph.
  async revealRow(row) {
    const place = this.data.graphs.findIndex(({ number }) => number === row.graph);
    if (place < 0) return;
    if (this.graph !== this.data.graphs[place]) await this.setGraph(place);
    if (!(await this.show("rewrite"))) return;
    const name = row.has_parameter ? null : row.module.slice(1, -1);
    this.view.reveal?.((node) =>
      name ? node.name === name : node.module === row.module && /linear|matmul|mm/.test(node.call),
    );
  }

  // Shows where a node is in the code that was generated: by its own name, or by Dynamo's.
  async revealCode(file, name, origin) {
    if (!(await this.show(file))) return;
    const line = codeLine(this.view.lines, name, origin);
    if (line < 0)
      this.body.prepend(
        h(
          "p",
          { class: "notice" },
          `The comments of this code do not name ${name}: it was fused, or is a view.`,
        ),
      );
    else this.view.reveal(line);
    this.body.scrollIntoView({ block: "start" });
  }
}

// The line of generated code that a node became, -1 if its comments do not name it. Triton's have
// the graph's own names (%gemm_1), the others those of Dynamo's nodes.
function codeLine(lines, name, origin) {
  const own = new RegExp(`%${name}(?!\\w)`);
  const at = lines.findIndex((line) => line.trimStart().startsWith("#") && own.test(line));
  if (at >= 0 || !origin) return at;
  const source = new RegExp(`Source Nodes: \\[(?:[^\\]]*\\W)?${origin}(?!\\w)`);
  return lines.findIndex((line) => source.test(line));
}

class CodeView {
  constructor(text) {
    this.lines = text.split("\n");
    this.element = h("div", { class: "code" });
    for (let from = 0; from < this.lines.length; from += CHUNK)
      this.element.append(this.chunk(from, -1));
  }

  chunk(from, marked) {
    const lines = this.lines.slice(from, from + CHUNK);
    return h(
      "div",
      { class: "chunk", style: { "--lines": lines.length } },
      lines.map((line, i) =>
        h(
          "div",
          {
            class: from + i === marked ? "code-line here" : "code-line",
            "data-line": from + i + 1,
          },
          line || " ",
        ),
      ),
    );
  }

  reveal(line) {
    const from = line - (line % CHUNK);
    const chunk = this.chunk(from, line);
    this.element.children[from / CHUNK].replaceWith(chunk);
    const here = chunk.children[line - from];
    this.element.scrollTop = 0;
    chunk.style.contentVisibility = "visible";
    this.element.scrollTop = here.offsetTop - this.element.clientHeight / 3;
  }
}
