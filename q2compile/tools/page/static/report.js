// SPDX-License-Identifier: Apache-2.0
// The report page: its parts, and the links between them.

async function startReport() {
  const data = loadModel(JSON.parse(await unpack(byId("data").textContent)));
  const links = {
    module: (path) => tree.reveal(path),
    node: (row) => graphs.revealRow(row),
  };
  const narrow = (text, match) => matmuls.narrow(text, match);
  keepSections(data);
  const tree = new Tree(data, ({ path, rows }) => {
    const own = new Set(rows);
    narrow(path, (row) => own.has(row));
  });
  byId("tree").append(tree.root);
  const operands = data.telemetry ? new Operands(data) : null;
  const matmuls = new Matmuls(data, links, (match) => {
    tree.narrow(match);
    operands?.narrow(match);
  });
  const graphs = new Graphs(data, links);
  showSummary(data, narrow);
  showMemory(data);
  const search = byId("search");
  search.addEventListener("input", () => matmuls.show(searched(search.value)));
  search.addEventListener("keydown", (event) => {
    if (event.key === "Enter") byId("matmuls").scrollIntoView();
  });
}

// A run without telemetry has no operands to show, one without a dump nothing else.
function keepSections(data) {
  const ofDump = ["where", "matmuls", "graphs", "memory"];
  const empty = data.telemetry ? (data.rows.length ? [] : ofDump) : ["operands"];
  for (const id of empty) {
    byId(id).hidden = true;
    document.querySelector(`.bar nav a[href="#${id}"]`).remove();
  }
}

// A browser of before 2023 cannot unpack the data.
startReport()
  .catch((error) => {
    console.error(error);
    const text = `This page cannot be shown (${error}). Beside it, report.txt has the same as text.`;
    document.querySelector("main").prepend(h("p.notice", text));
  })
  .finally(() => (document.documentElement.dataset.ready = "true"));
