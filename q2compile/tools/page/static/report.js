// SPDX-License-Identifier: Apache-2.0
// The report page: its parts, and the links between them.

function startReport() {
  const data = loadModel(readData());
  let tree = null,
    matmuls = null,
    graphs = null;
  const links = {
    module: (path) => tree.reveal(path),
    node: (row) => graphs.revealRow(row),
  };
  const filterBy = (filters) => {
    matmuls.narrow(filters);
    byId("matmuls").scrollIntoView();
  };
  keepSections(data);
  tree = new Tree(data, (item) =>
    filterBy({ module: { path: item.path, rows: new Set(item.rows) } }),
  );
  byId("tree").replaceWith(tree.root);
  const operands = data.telemetry ? new Operands(data) : null;
  matmuls = new Matmuls(data, links, (match) => {
    tree.narrow(match);
    operands?.narrow(match);
  });
  graphs = new Graphs(data, links);
  showSummary(data, filterBy);
  const memory = showMemory(data);
  const search = byId("search");
  search.addEventListener("input", () => matmuls.search(search.value));
  search.addEventListener("keydown", (event) => {
    if (event.key === "Enter") byId("matmuls").scrollIntoView();
  });
  startSearchKeys(search);
  startTheme();
  startSectionLinks(() => Promise.all([graphs.rendered(), memory]));
  startSectionMarks();
  document.documentElement.dataset.ready = "true";
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

startReport();
