"use strict";
// Shared by all parts of the page: numbers as people write them, SVG elements, the tooltip.

const data = JSON.parse(document.getElementById("data").textContent);
const tip = document.getElementById("tip");
const redraws = [];

function formatBytes(size) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (Math.abs(size) >= 1024 && unit < units.length - 1) { size /= 1024; unit += 1; }
  return `${unit ? size.toFixed(2) : size.toFixed(0)} ${units[unit]}`;
}

function formatSeconds(seconds) {
  if (seconds === 0) return "0";
  if (seconds < 1e-3) return `${(seconds * 1e6).toFixed(1)} us`;
  if (seconds < 1) return `${(seconds * 1e3).toFixed(1)} ms`;
  return `${seconds.toFixed(2)} s`;
}

function element(name, attributes = {}, ...children) {
  const svg = ["svg", "g", "path", "line", "text", "rect", "circle"].includes(name);
  const made = svg
    ? document.createElementNS("http://www.w3.org/2000/svg", name)
    : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function textWidth(words) { return 6.9 * words.length; }  // near enough for 12 pixels

// Round steps between ticks: 1, 2 or 5 times a power of ten of a unit.
function ticks(most, count, unit = 1) {
  const rough = most / unit / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = unit * power * [1, 2, 5, 10].find((m) => m * power >= rough);
  return Array.from({ length: Math.floor(most / step + 1e-9) + 1 }, (_, i) => i * step);
}

function byteUnit(most) {
  const power = Math.min(Math.floor(Math.log2(Math.max(most, 1)) / 10), 4);
  const unit = 1024 ** power;
  return { unit, name: ["B", "KiB", "MiB", "GiB", "TiB"][power] };
}

function showTip(x, y, ...children) {
  tip.replaceChildren(...children);
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left = x + 16 + box.width > innerWidth ? x - 16 - box.width : x + 16;
  const top = y + 16 + box.height > innerHeight ? innerHeight - box.height - 8 : y + 16;
  tip.style.left = `${Math.max(Math.min(left, innerWidth - box.width - 8), 8)}px`;
  tip.style.top = `${Math.max(top, 8)}px`;
}

function hideTip() { tip.hidden = true; }

function rows(pairs) {
  const table = element("table");
  for (const [name, value] of pairs) {
    table.append(element("tr", {}, element("td", {}, name), element("td", {}, value)));
  }
  return table;
}

function chip(colour) {
  return element("i", { class: "chip", style: `background:var(--${colour})` });
}

function setTheme(theme) { document.documentElement.dataset.theme = theme; }

function start() {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  setTheme(dark.matches ? "dark" : "light");
  dark.addEventListener("change", () => setTheme(dark.matches ? "dark" : "light"));
  document.getElementById("theme").addEventListener("click", () => {
    setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
  });
  startMemory(data.memory);
  if (data.curve) startCurve(data.curve);
  startTable(document.getElementById("segment-table"), data.segments);
  startTable(document.getElementById("decision-table"), data.decisions);
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth === width) return;  // a phone's address bar came or went
    width = innerWidth;
    hideTip();
    redraws.forEach((redraw) => redraw());
  });
  addEventListener("scroll", hideTip, { passive: true });
}
