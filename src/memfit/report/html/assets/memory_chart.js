// Memory over time: each pixel shows the most bytes of its stretch of time, by category.

function startMemory(memory) {
  const charts = memory.charts.map((chart, i) => prepareMemory(memory, chart, i));
  const used = memory.categories.map((_, c) => charts.some((m) => m.curves[c].some((n) => n > 0)));
  const hidden = new Set(used.flatMap((has, c) => has ? [] : [c]));  // nothing is drawn of these
  const legend = document.getElementById("memory-legend");
  const draw = () => {
    const shown = charts.map((m) => memoryColumns(m, hidden));
    const most = 1.1 * (Math.max(
      memory.budget || 0,
      ...shown.map((columns) => Math.max(...columns.map((c) => c.total))),
    ) || Math.max(...charts.map((m) => m.chart.peak)));  // nothing is shown: the scale stays
    const longest = Math.max(...charts.map((m) => m.seconds));
    charts.forEach((m, i) => drawMemory(memory, m, shown[i], hidden, most, longest));
  };
  memory.categories.forEach((name, c) => {
    if (!used[c]) return;
    const button = element(
      "button", { type: "button", "aria-pressed": "true" }, chip(name), name.replace("_", " "),
    );
    button.addEventListener("click", () => {
      hidden.has(c) ? hidden.delete(c) : hidden.add(c);
      button.setAttribute("aria-pressed", String(!hidden.has(c)));
      draw();
    });
    legend.append(button);
  });
  redraws.push(draw);
  draw();
}

// Bytes of each category at each position, from the lives of the tensors.
function prepareMemory(memory, chart, number) {
  const { tensors, length } = chart;
  const curves = memory.categories.map(() => new Float64Array(length + 1));
  tensors.bytes.forEach((size, i) => {
    curves[tensors.category[i]][tensors.start[i]] += size;
    curves[tensors.category[i]][tensors.end[i]] -= size;
  });
  for (const curve of curves) for (let p = 1; p <= length; p += 1) curve[p] += curve[p - 1];
  const times = new Float64Array(length + 1);
  let knot = 0;
  for (let p = 0; p <= length; p += 1) {
    while (knot + 2 < chart.clock.length && chart.clock[knot + 1][0] <= p) knot += 1;
    const [[p0, t0], [p1, t1]] = [chart.clock[knot], chart.clock[knot + 1]];
    times[p] = p1 > p0 ? t0 + (t1 - t0) * Math.min((p - p0) / (p1 - p0), 1) : t1;
  }
  const box = document.getElementById(number ? "memory-after" : "memory-before");
  return { chart, curves, times, seconds: times[length], box };
}

function memoryFrame(box) {
  const width = Math.max(box.clientWidth, 280);
  const narrow = width < 560;
  const left = narrow ? 46 : 62;
  return { width, height: narrow ? 210 : 250, left, right: 10, top: 18, bottom: 26 };
}

// For each pixel the position with the most bytes among those in its stretch of time.
function memoryColumns(m, hidden) {
  const frame = memoryFrame(m.box);
  const count = Math.max(Math.round(frame.width - frame.left - frame.right), 100);
  const { length } = m.chart;
  const longest = Math.max(...data.memory.charts.map((c) => c.clock.at(-1)[1]));
  const shown = m.curves.filter((_, c) => !hidden.has(c));
  const total = (p) => shown.reduce((sum, curve) => sum + curve[p], 0);
  const columns = [];
  let position = 0;
  for (let x = 0; x < count; x += 1) {
    const from = (x / count) * longest, to = ((x + 1) / count) * longest;
    if (from >= m.seconds) break;
    while (position < length - 1 && m.times[position + 1] <= from) position += 1;
    let best = position;
    for (let p = position; p < length && m.times[p] < to; p += 1) {
      if (total(p) > total(best)) best = p;
    }
    columns.push({ x, position: best, total: total(best) });
  }
  return columns;
}

function drawMemory(memory, m, columns, hidden, most, longest) {
  const f = memoryFrame(m.box);
  const wide = f.width - f.left - f.right, high = f.height - f.top - f.bottom;
  const px = wide / Math.max(Math.round(wide), 100);
  const sx = (x) => f.left + x * px;
  const sy = (size) => f.top + high * (1 - size / most);
  const svg = element("svg", {
    viewBox: `0 0 ${f.width} ${f.height}`, height: f.height, role: "img", tabindex: "0",
    "aria-label": `${m.chart.title}: memory over time, peak ${formatBytes(m.chart.peak)}`,
  });
  const { unit, name } = byteUnit(most);
  for (const size of ticks(most, f.height < 230 ? 5 : 6, unit)) {
    svg.append(
      element("line", { class: "grid", x1: f.left, x2: f.width - f.right, y1: sy(size), y2: sy(size) }),
      element("text", { x: f.left - 7, y: sy(size) + 4, "text-anchor": "end" }, String(+(size / unit).toFixed(2))),
    );
  }
  svg.append(element("text", { x: f.left - 7, y: 10, "text-anchor": "end" }, name));
  for (const t of ticks(longest * 1e3, wide < 500 ? 4 : 8)) {
    const x = f.left + (t / 1e3 / longest) * wide;
    if (x < f.width - 50) {
      svg.append(
        element("line", { class: "axis", x1: x, x2: x, y1: sy(0), y2: sy(0) + 4 }),
        element("text", { x, y: f.height - 8, "text-anchor": "middle" }, String(+t.toFixed(3))),
      );
    }
  }
  svg.append(element("text", { x: f.width - f.right, y: f.height - 8, "text-anchor": "end" }, "ms"));
  drawStack(svg, memory, m, columns, hidden, sx, sy);
  drawPhases(svg, m, f, longest, wide);
  drawLines(svg, memory, m, columns, hidden, f, sx, sy);
  m.box.replaceChildren(element("h3", {}, m.chart.title), svg);
  listenMemory(svg, memory, m, columns, hidden, { f, sx, sy, most, high });
}

function drawStack(svg, memory, m, columns, hidden, sx, sy) {
  const base = new Float64Array(columns.length);
  memory.categories.forEach((name, c) => {
    if (hidden.has(c)) return;
    const lower = [], upper = [];
    columns.forEach(({ x, position }, i) => {
      const next = base[i] + m.curves[c][position];
      upper.push(`${sx(x).toFixed(1)},${sy(next).toFixed(1)}`, `${sx(x + 1).toFixed(1)},${sy(next).toFixed(1)}`);
      lower.push(`${sx(x).toFixed(1)},${sy(base[i]).toFixed(1)}`, `${sx(x + 1).toFixed(1)},${sy(base[i]).toFixed(1)}`);
      base[i] = next;
    });
    if (!upper.length) return;
    const d = `M${upper.join("L")}L${lower.reverse().join("L")}Z`;
    svg.append(element("path", { d, "data-category": name, style: `fill:var(--${name})` }));
  });
}

// Where forward, loss, backward and optimizer begin.
function drawPhases(svg, m, f, longest, wide) {
  const phases = [];
  for (const [position, text] of m.chart.places) {
    const label = data.memory.strings[text];
    const name = label.startsWith("head") ? label : label.split(" ")[0];
    if (phases.at(-1)?.name !== name) phases.push({ name, seconds: m.times[position] });
  }
  const sx = (seconds) => f.left + (seconds / longest) * wide;
  phases.forEach(({ name, seconds }, i) => {
    const x = sx(seconds), next = i + 1 < phases.length ? sx(phases[i + 1].seconds) : f.width;
    if (i && x < f.width - f.right - 1) {
      svg.append(element("line", { class: "phase", x1: x, x2: x, y1: f.top - 4, y2: f.height - f.bottom }));
    }
    if (next - x > textWidth(name) + 4) svg.append(element("text", { x: x + 4, y: 10 }, name));
  });
}

function drawLines(svg, memory, m, columns, hidden, f, sx, sy) {
  const right = f.width - f.right;
  if (memory.budget) {
    const y = sy(memory.budget);
    svg.append(
      element("line", { class: "budget-line", x1: f.left, x2: right, y1: y, y2: y }),
      element("text", { class: "label budget", x: right - 4, y: y - 5, "text-anchor": "end" },
        `budget ${formatBytes(memory.budget)}`),
    );
  }
  if (hidden.size) return;  // then the tops of the colours are no peaks
  const peak = columns.reduce((best, c) => (c.total > best.total ? c : best));
  const words = `peak ${formatBytes(m.chart.peak)}` +
    (m.chart.measured ? `, measured ${formatBytes(m.chart.measured)}` : "");
  const x = sx(peak.x), y = sy(m.chart.peak), wide = textWidth(words);
  const start = Math.max(f.left + 4, Math.min(x + 7, right - wide - 4));
  let above = y - 6;
  if (memory.budget && Math.abs(above - sy(memory.budget)) < 16) {
    above = Math.min(above, sy(memory.budget) - 5);
    if (start + wide > right - textWidth(`budget ${formatBytes(memory.budget)}`) - 12) above -= 16;
  }
  svg.append(
    element("circle", { cx: x, cy: y, r: 3.5, style: "fill:var(--ink)" }),
    element("text", { class: "label", x: start, y: Math.max(above, f.top + 8) }, words),
  );
}

// The tensor under a point: the tensors of a position lie on each other in their order.
function tensorAt(m, hidden, position, size) {
  const { tensors } = m.chart;
  let base = 0, found = -1;
  for (let i = 0; i < tensors.bytes.length && found < 0; i += 1) {
    if (tensors.start[i] > position || tensors.end[i] <= position || hidden.has(tensors.category[i])) continue;
    base += tensors.bytes[i];
    if (size < base) found = i;
  }
  return found;
}

// The largest tensors of a position that are not there all the time.
function largest(m, position, hidden, most = 4) {
  const { start, end, bytes, category } = m.chart.tensors;
  return bytes.map((_, i) => i)
    .filter((i) => start[i] <= position && position < end[i] && end[i] - start[i] < m.chart.length && !hidden.has(category[i]))
    .sort((a, b) => bytes[b] - bytes[a])
    .slice(0, most);
}

function listenMemory(svg, memory, m, columns, hidden, { f, sx, sy, most, high }) {
  const cursor = element("line", { class: "cursor", y1: f.top, y2: f.height - f.bottom, visibility: "hidden" });
  const life = element("rect", { class: "life", y: f.top, height: high, width: 0, visibility: "hidden" });
  svg.append(life, cursor);
  let at = 0;
  const point = (number, size, x, y) => {
    at = Math.max(0, Math.min(number, columns.length - 1));
    const { position } = columns[at];
    cursor.setAttribute("x1", sx(at + 0.5));
    cursor.setAttribute("x2", sx(at + 0.5));
    cursor.setAttribute("visibility", "visible");
    const tensor = tensorAt(m, hidden, position, size);
    if (tensor >= 0) {
      const { start, end } = m.chart.tensors;
      const inside = columns.filter((c) => c.position >= start[tensor] && c.position < end[tensor]);
      life.setAttribute("x", sx(inside[0].x));
      life.setAttribute("width", sx(inside.at(-1).x + 1) - sx(inside[0].x));
    }
    life.setAttribute("visibility", tensor >= 0 ? "visible" : "hidden");
    showTip(x, y, ...memoryWords(memory, m, position, tensor, hidden));
  };
  const leave = () => {
    cursor.setAttribute("visibility", "hidden");
    life.setAttribute("visibility", "hidden");
    hideTip();
  };
  const follow = (event) => {
    const box = svg.getBoundingClientRect();
    const scale = f.width / box.width;
    const x = (event.clientX - box.left) * scale, y = (event.clientY - box.top) * scale;
    const number = Math.floor((x - f.left) / (sx(1) - sx(0)));
    if (number < 0 || number >= columns.length || y < f.top || y > f.height - f.bottom) return leave();
    return point(number, most * (1 - (y - f.top) / high), event.clientX, event.clientY);
  };
  svg.addEventListener("pointermove", follow);
  svg.addEventListener("pointerdown", follow);
  svg.addEventListener("pointerleave", leave);
  svg.addEventListener("blur", leave);
  svg.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const box = svg.getBoundingClientRect(), scale = box.width / f.width;
    const next = Math.max(0, Math.min(at + step * (event.shiftKey ? 20 : 1), columns.length - 1));
    const top = columns[next].total;
    point(next, top * (1 - 1e-9), box.left + sx(next) * scale, box.top + sy(top) * scale);
  });
}

function memoryWords(memory, m, position, tensor, hidden) {
  const { tensors, places } = m.chart;
  const text = (what, i) => memory.strings[tensors[what][i]];
  const place = places.findLast(([start]) => start <= position);
  const total = m.curves.reduce((sum, curve) => sum + curve[position], 0);
  const words = [element("div", { class: "dim" },
    `${formatSeconds(m.times[position])}, ${memory.strings[place[1]]}: ${formatBytes(total)}`)];
  if (tensor >= 0) {
    const born = places.findLast(([start]) => start <= tensors.start[tensor]);
    const where = text("module", tensor) || `made in ${memory.strings[born[1]]}`;
    const all = tensors.end[tensor] - tensors.start[tensor] >= m.chart.length;
    const from = m.times[tensors.start[tensor]], to = m.times[tensors.end[tensor]];
    words.push(
      element("b", { "data-what": "tensor" }, text("name", tensor)),
      element("div", { "data-what": "module" }, all ? "there before the step and after it" : where),
      element("code", { "data-what": "source" }, text("source", tensor) || "no line of code is known for it"),
      element("div", {}, [formatBytes(tensors.bytes[tensor]), text("shape", tensor),
        all ? "" : `alive ${formatSeconds(from)} to ${formatSeconds(to)}`].filter(Boolean).join(", ")),
    );
  }
  if (tensor < 0) words.push(rows(largest(m, position, hidden).map((i) => [
    element("span", {}, `${text("name", i)} ${text("module", i)}`), formatBytes(tensors.bytes[i])])));
  const parts = memory.categories
    .map((name, c) => [name, m.curves[c][position], c])
    .filter(([, size, c]) => size > 0 && !hidden.has(c));
  words.push(rows(parts.map(([name, size]) => {
    const cell = element("span", {}, chip(name), name.replace("_", " "));
    return [cell, formatBytes(size)];
  })));
  return words;
}
