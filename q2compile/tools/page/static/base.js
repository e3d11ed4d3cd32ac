// SPDX-License-Identifier: Apache-2.0
// Elements, tables, numbers, and the page's data.

const byId = (id) => document.getElementById(id);

// An element: h("td.number", {title: "..."}, children). Attributes, which may be left out: on<Event>,
// style (an object of properties), others as they are; null and false are left out. Children are
// elements, or texts, which are never read as HTML.
function h(selector, ...children) {
  const [name, ...classes] = selector.split(".");
  return fill(document.createElement(name), classes, children);
}

function svg(selector, ...children) {
  const [name, ...classes] = selector.split(".");
  return fill(document.createElementNS("http://www.w3.org/2000/svg", name), classes, children);
}

function fill(element, classes, children) {
  const attributes = children[0]?.constructor === Object ? children.shift() : {};
  element.classList.add(...classes.filter(Boolean));
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2).toLowerCase(), value);
    else if (key === "style")
      for (const [k, v] of Object.entries(value)) element.style.setProperty(k, v);
    else element.setAttribute(key, value === true ? "" : value);
  }
  element.append(
    ...children.flat(Infinity).filter((child) => child !== null && child !== undefined),
  );
  return element;
}

// columns: name -> class of its cells; rows: lists of what is in the cells.
function table(kind, columns, rows) {
  const [names, kinds] = [Object.keys(columns), Object.values(columns)];
  const head = names.map((name, i) => h(kinds[i] === "number" ? "th.number" : "th", name));
  const cell = (content, i) => h(`td.${kinds[i]}`, content);
  const body = rows.map((row) => h("tr", row.map(cell)));
  return h(`table.${kind}`, h("thead", h("tr", head)), h("tbody", body));
}

// A list of names and what they stand for.
function definitions(kind, pairs) {
  return h(
    `dl.${kind}`,
    pairs.map(([name, value]) => [h("dt", name), h("dd", value)]),
  );
}

const sumOf = (values) => values.reduce((total, value) => total + value, 0);

// The button beside equal layers, which lists them one by one at the end of its tbody.
function copiesButton(count, makeLines) {
  const onClick = ({ currentTarget: button }) => {
    const open = button.getAttribute("aria-pressed") === "false";
    button.setAttribute("aria-pressed", String(open));
    button.title = titles[Number(open)];
    const body = button.closest("tbody");
    if (open) body.append(...makeLines());
    else body.querySelectorAll(".one, .one + .detail").forEach((line) => line.remove());
  };
  const titles = ["Show these equal layers one by one", "Show them as one line"];
  return h("button.copies", { "aria-pressed": "false", title: titles[0], onClick }, `×${count}`);
}

// 3.4 MiB
function bytesText(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; n >= 1024 && unit < units.length - 1; unit += 1) n /= 1024;
  return `${unit === 0 || n >= 100 ? Math.round(n) : n.toFixed(1)} ${units[unit]}`;
}

function countText(n, one) {
  return `${n.toLocaleString("en")} ${one}${n === 1 ? "" : "s"}`;
}

// 55%, 4.8%
function percentText(share) {
  return `${(100 * share).toFixed(share < 0.1 ? 1 : 0)}%`;
}

// The text that Python's `packed` packed.
async function unpack(text) {
  const raw = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const stream = new Blob([raw]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).text();
}
