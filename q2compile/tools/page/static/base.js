// SPDX-License-Identifier: Apache-2.0
// Elements, tables, numbers, colors of the theme, and the page's data.

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
  const cell = (content, i) => h(`td.${kinds[i]}`, { "data-label": names[i] }, content);
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

// Take a value out of a set, or put it in.
const toggleIn = (set, value) => set.delete(value) || set.add(value);

// The button beside equal layers, which lists them one by one.
function copiesButton(count, pressed, onToggle) {
  const onClick = (event) => {
    event.preventDefault(); // it may be in a summary
    event.stopPropagation();
    onToggle();
  };
  const title = pressed ? "Show these layers as one" : "Show these equal layers one by one";
  return h("button.copies", { "aria-pressed": String(pressed), title, onClick }, `×${count}`);
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

// Storage may be forbidden for a file that is opened from disk.
function remembered(key, value) {
  try {
    if (value !== undefined) localStorage.setItem(key, value);
    return localStorage.getItem(key);
  } catch {
    return null;
  }
}

// The button "theme" switches between light and dark; without a choice the system's is followed.
function startTheme() {
  const { style } = document.documentElement;
  const system = () => (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  style.colorScheme = remembered("q2compile-theme") || "";
  byId("theme").addEventListener("click", () => {
    style.colorScheme = (style.colorScheme || system()) === "dark" ? "light" : "dark";
    remembered("q2compile-theme", style.colorScheme);
  });
}

// "/" goes to the search, Escape leaves and empties it.
function startSearchKeys(input) {
  document.addEventListener("keydown", (event) => {
    const typing = event.target.matches("input, select, textarea");
    if (event.key === "/" && !typing && !event.ctrlKey && !event.metaKey && !event.altKey) {
      event.preventDefault();
      input.select();
    } else if (event.key === "Escape" && event.target === input) {
      input.value = "";
      input.dispatchEvent(new Event("input"));
      input.blur();
    }
  });
}

// Marks the link of the section that is on screen.
function startSectionMarks() {
  const mark = ({ target, isIntersecting }) => {
    const link = document.querySelector(`.bar nav a[href="#${target.id}"]`);
    link?.toggleAttribute("aria-current", isIntersecting);
  };
  const watcher = new IntersectionObserver((entries) => entries.forEach(mark), {
    rootMargin: "-33% 0px -66%",
  });
  document.querySelectorAll("section").forEach((section) => watcher.observe(section));
}
