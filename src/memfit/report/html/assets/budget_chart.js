// Budget against time: one line for each strategy, and where this plan lies.

const FAR = 2;  // times the step with everything kept
const shapes = ["circle", "square", "up", "diamond", "down", "cross", "bar"];

function startCurve(curve) {
  const legend = document.getElementById("curve-legend");
  // What is far slower would press all others flat: it is left out until it is asked for.
  const least = curve.series.map((s) => Math.min(...s.points.map((p) => p.ratio)));
  const fast = least.some((ratio) => ratio < FAR);
  const hidden = new Set(least.flatMap((ratio, i) => (fast && ratio >= FAR ? [i] : [])));
  curve.series.forEach((series, i) => {
    const svg = element("svg", { width: 14, height: 14 }, mark(i, 7, 7, 4.5));
    if (!series.points.length) {
      legend.append(element("span", {}, svg, `${series.name}: reaches none of the budgets`));
      return;
    }
    const far = hidden.has(i) ? `: ${least[i].toFixed(1)}x and more` : "";
    const button = element("button", { type: "button", "aria-pressed": String(!hidden.has(i)) }, svg, series.name + far);
    button.addEventListener("click", () => {
      hidden.has(i) ? hidden.delete(i) : hidden.add(i);
      button.setAttribute("aria-pressed", String(!hidden.has(i)));
      drawCurve(curve, hidden);
    });
    legend.append(button);
  });
  const star = element("svg", { width: 14, height: 14 },
    element("circle", { cx: 7, cy: 7, r: 5, style: "fill:none;stroke:var(--budget);stroke-width:2" }));
  legend.append(element("span", {}, star, curve.chosen.name));
  if (curve.measured) {
    const cross = element("svg", { width: 14, height: 14 }, plus(7, 7));
    legend.append(element("span", {}, cross, "measured"));
  }
  redraws.push(() => drawCurve(curve, hidden));
  drawCurve(curve, hidden);
}

function plus(x, y) {
  const d = `M${x - 6},${y}H${x + 6}M${x},${y - 6}V${y + 6}`;
  return element("path", { d, class: "measured", style: "stroke:var(--ink);stroke-width:2.4;fill:none" });
}

function mark(i, x, y, r) {
  const style = `fill:var(--s${i % 7});stroke:var(--s${i % 7});stroke-width:1.5`;
  const d = {
    square: `M${x - r},${y - r}h${2 * r}v${2 * r}h${-2 * r}Z`,
    up: `M${x},${y - r}L${x + r},${y + r}H${x - r}Z`,
    down: `M${x},${y + r}L${x + r},${y - r}H${x - r}Z`,
    diamond: `M${x},${y - r}L${x + r},${y}L${x},${y + r}L${x - r},${y}Z`,
    cross: `M${x - r},${y - r}L${x + r},${y + r}M${x - r},${y + r}L${x + r},${y - r}`,
    bar: `M${x - r},${y}H${x + r}`,
  }[shapes[i % shapes.length]];
  return d
    ? element("path", { d, style, "data-series": i })
    : element("circle", { cx: x, cy: y, r, style, "data-series": i });
}

function drawCurve(curve, hidden) {
  const box = document.getElementById("budget-curve");
  const width = Math.max(box.clientWidth, 280), narrow = width < 560;
  const f = { width, height: narrow ? 280 : 340, left: narrow ? 46 : 62, right: 16, top: 22, bottom: 40 };
  const shown = curve.series.map((s, i) => ({ ...s, points: hidden.has(i) ? [] : s.points }));
  const all = [...shown.flatMap((s) => s.points), curve.chosen, curve.measured].filter(Boolean);
  const budgets = [curve.budget, ...all.map((p) => p.budget)];
  const lowX = Math.min(...budgets), highX = Math.max(...budgets);
  const lowY = Math.min(1, ...all.map((p) => p.ratio)), highY = Math.max(...all.map((p) => p.ratio));
  const padX = (highX - lowX || highX) * 0.03, padY = (highY - lowY || 0.1) * 0.06;
  const sx = (b) => f.left + ((b - lowX + padX) / (highX - lowX + 2 * padX)) * (f.width - f.left - f.right);
  const sy = (r) => f.top + (1 - (r - lowY + padY) / (highY - lowY + 2 * padY)) * (f.height - f.top - f.bottom);
  const svg = element("svg", {
    viewBox: `0 0 ${f.width} ${f.height}`, height: f.height, role: "img",
    "aria-label": "predicted time against budget, by strategy",
  });
  const span = highY - lowY + 2 * padY;
  const stepY = ticks(span, 5)[1] || span;
  for (let r = Math.ceil((lowY - padY) / stepY) * stepY; r <= highY + padY; r += stepY) {
    svg.append(
      element("line", { class: "grid", x1: f.left, x2: f.width - f.right, y1: sy(r), y2: sy(r) }),
      element("text", { x: f.left - 7, y: sy(r) + 4, "text-anchor": "end" }, `${+r.toFixed(3)}x`),
    );
  }
  const { unit, name } = byteUnit(highX);
  const stepX = ticks(highX - lowX + 2 * padX, narrow ? 4 : 8, unit)[1] || highX;
  for (let b = Math.ceil((lowX - padX) / stepX) * stepX; b <= highX + padX; b += stepX) {
    svg.append(
      element("line", { class: "axis", x1: sx(b), x2: sx(b), y1: f.height - f.bottom, y2: f.height - f.bottom + 5 }),
      element("text", { x: sx(b), y: f.height - f.bottom + 18, "text-anchor": "middle" }, String(+(b / unit).toFixed(2))),
    );
  }
  svg.append(
    element("text", { x: f.width - f.right, y: f.height - 6, "text-anchor": "end" }, `budget, ${name}`),
    element("text", { x: 0, y: 11 }, "time / before"),
  );
  const at = sx(curve.budget);
  svg.append(element("line", { class: "budget-line", x1: at, x2: at, y1: f.top, y2: f.height - f.bottom }));
  shown.forEach((series, i) => {
    const d = series.points.map((p, n) => `${n ? "L" : "M"}${sx(p.budget)},${sy(p.ratio)}`).join("");
    svg.append(element("path", { d, style: `fill:none;stroke:var(--s${i % 7});stroke-width:2;opacity:.8` }));
  });
  const places = [];
  shown.forEach((series, i) => {
    for (const p of series.points) {
      svg.append(mark(i, sx(p.budget), sy(p.ratio), 4));
      places.push({ name: series.name, p });
    }
  });
  const { chosen, measured } = curve;
  svg.append(element("circle", {
    cx: sx(chosen.budget), cy: sy(chosen.ratio), r: 8, style: "fill:none;stroke:var(--budget);stroke-width:2",
  }));
  places.push({ name: `${chosen.name}: predicted`, p: chosen });
  if (measured) {
    svg.append(plus(sx(measured.budget), sy(measured.ratio)));
    places.push({ name: `${chosen.name}: measured`, p: measured });
  }
  box.replaceChildren(svg);
  listenCurve(svg, f, sx, sy, places);
}

function listenCurve(svg, f, sx, sy, places) {
  const follow = (event) => {
    const box = svg.getBoundingClientRect(), scale = f.width / box.width;
    const x = (event.clientX - box.left) * scale, y = (event.clientY - box.top) * scale;
    const away = ({ p }) => Math.hypot(sx(p.budget) - x, sy(p.ratio) - y);
    const nearest = Math.min(...places.map(away));
    if (!(nearest < 24)) return hideTip();
    // Strategies that chose the same lie on each other: all are named.
    const here = places.filter((place) => away(place) < nearest + 1);
    const { p } = here[0];
    const facts = [
      ["budget", formatBytes(p.budget)], ["time / before", `${p.ratio.toFixed(3)}x`], ["peak", formatBytes(p.peak)],
    ];
    if (p.recomputed) facts.push(["recomputed", formatBytes(p.recomputed)]);
    if (p.offloaded) facts.push(["offloaded", formatBytes(p.offloaded)]);
    return showTip(event.clientX, event.clientY,
      element("b", {}, here.map((place) => place.name).join(", ")), rows(facts));
  };
  svg.addEventListener("pointermove", follow);
  svg.addEventListener("pointerdown", follow);
  svg.addEventListener("pointerleave", hideTip);
}
