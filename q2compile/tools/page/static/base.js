// SPDX-License-Identifier: Apache-2.0
// Elements, numbers, colors of the theme, and the page's data: what every page of q2compile uses.

const SVG = "http://www.w3.org/2000/svg";

// An element. attributes: class, text, on<Event>, style (an object of properties), others as they
// are; null and false are left out. Children: elements, or texts, which are never read as HTML.
function h(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

function svg(name, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, name), attributes, children);
}

function fill(element, attributes, children) {
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

const byId = (id) => document.getElementById(id);

// 3.4 MiB
function bytesText(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (n >= 1024 && unit < units.length - 1) {
    n /= 1024;
    unit += 1;
  }
  return `${unit === 0 || n >= 100 ? Math.round(n) : n.toFixed(1)} ${units[unit]}`;
}

function countText(n, one, many) {
  return `${n.toLocaleString("en")} ${n === 1 ? one : many || `${one}s`}`;
}

// 55%, 4.8%
function percentText(share) {
  return `${(100 * share).toFixed(share < 0.1 ? 1 : 0)}%`;
}

// A time as a multiple of BF16's, in words.
function timeWords(ratio) {
  const ends = [ratio.low, ratio.high].map((end) => (end < 0.995 ? -1 : end < 1.005 ? 0 : 1));
  if (!ends[0] && !ends[1]) return "as long as BF16";
  const how = { "-2": " (faster)", 2: " (slower)" }[ends[0] + ends[1]] || "";
  return `${rangeText(ratio, ratioText(ratio))} times BF16's time${how}`;
}

function ratioText({ low }) {
  return (end) => end.toFixed(low >= 2 ? 1 : 2);
}

// Both ends of what is known, the smaller one first; one where they are written alike.
function rangeText({ low, high }, text) {
  const ends = [low, high].sort((a, b) => a - b).map(text);
  return [...new Set(ends)].join("-");
}

// The sum of times at both ends of what is known; what was measured has none.
function totalOf(times, key) {
  const sum = (end) => times.reduce((total, one) => total + (one[key + end] ?? one[key]), 0);
  return { low: sum("_low"), high: sum("_high") };
}

// Times over BF16's.
function overBf16(times) {
  const [own, bf16] = ["microseconds", "bf16_microseconds"].map((key) => totalOf(times, key));
  return { low: own.low / bf16.low, high: own.high / bf16.high };
}

function middleOf({ low, high }) {
  return (low + high) / 2;
}

function secondsText(seconds) {
  if (seconds >= 1) return `${seconds.toFixed(2)} s`;
  return seconds >= 1e-3 ? `${(1e3 * seconds).toFixed(1)} ms` : `${(1e6 * seconds).toFixed(0)} µs`;
}

function readData() {
  return JSON.parse(byId("data").textContent);
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
  const system = matchMedia("(prefers-color-scheme: dark)");
  const button = byId("theme");
  const show = () => {
    const dark =
      (remembered("q2compile-theme") ||
        document.documentElement.dataset.chosen ||
        (system.matches ? "dark" : "light")) === "dark";
    document.documentElement.dataset.theme = dark ? "dark" : "light";
    button.setAttribute("aria-pressed", dark);
  };
  button.addEventListener("click", () => {
    const next = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    document.documentElement.dataset.chosen = next;
    remembered("q2compile-theme", next);
    show();
  });
  system.addEventListener("change", show);
  show();
}

// "/" goes to the search, Escape leaves and empties it.
function startSearchKeys(input) {
  document.addEventListener("keydown", (event) => {
    const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
    if (event.key === "/" && !typing && !event.ctrlKey && !event.metaKey && !event.altKey) {
      event.preventDefault();
      input.focus();
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
  const links = [...document.querySelectorAll(".bar nav a")];
  const sections = links.map((link) => document.querySelector(link.getAttribute("href")));
  const mark = () => {
    const y = innerHeight / 3;
    let here = 0;
    sections.forEach((section, i) => {
      if (section.getBoundingClientRect().top < y) here = i;
    });
    links.forEach((link, i) => {
      link.classList.toggle("here", i === here);
      if (i === here) link.setAttribute("aria-current", "true");
      else link.removeAttribute("aria-current");
    });
  };
  addEventListener("scroll", mark, { passive: true });
  mark();
}

// A link to a section first has all before it rendered: a page that grows while it scrolls stops
// elsewhere. ready() is fulfilled when it will grow no more.
function startSectionLinks(ready) {
  const go = async (hash) => {
    await ready();
    document.querySelector(hash).scrollIntoView();
  };
  for (const link of document.querySelectorAll(".bar nav a")) {
    link.addEventListener("click", (event) => {
      event.preventDefault();
      history.pushState(null, "", link.getAttribute("href"));
      go(link.getAttribute("href"));
    });
  }
  if (/^#\w+$/.test(location.hash) && byId(location.hash.slice(1))) go(location.hash);
}

// The key of ``event`` moves the focus among ``items``: up, down, to the first, to the last.
function moveFocus(event, items) {
  const at = items.indexOf(document.activeElement);
  const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: items.length - 1 }[event.key];
  if (to === undefined || !items[to]) return false;
  event.preventDefault();
  items[to].focus();
  return true;
}
