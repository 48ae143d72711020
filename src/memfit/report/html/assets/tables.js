// Tables that sort by any column and filter by words and by decision; long ones come in pieces.

const FIRST = innerWidth < 640 ? 10 : 30;
const PIECE = 300;
const formats = { bytes: formatBytes, seconds: formatSeconds, number: String };

function startTable(box, { columns }) {
  const count = columns[0].values.length;
  const text = (column, i) => column.strings[column.values[i]];
  const choice = columns.find((c) => c.kind === "choice");
  const named = columns.find((c) => c.kind === "text").title;
  const sizes = columns.find((c) => c.kind === "bytes");
  const state = { words: "", decision: "", by: box.dataset.order, down: box.dataset.down === "true", shown: FIRST };

  const search = element("input", { type: "search", placeholder: "filter by any word", "aria-label": "filter" });
  const decisions = element("select", { "aria-label": "decision" }, element("option", { value: "" }, "all decisions"));
  choice.strings.forEach((name) => decisions.append(element("option", { value: name }, name)));
  const order = element("select", { class: "sort-by", "aria-label": "sort by" });
  columns.forEach((c) => order.append(
    element("option", { value: `${c.title}|up` }, `${c.title}, up`),
    element("option", { value: `${c.title}|down` }, `${c.title}, down`),
  ));
  const counted = element("span", { class: "count", role: "status" });
  const head = element("tr"), body = element("tbody");
  const more = element("button", { type: "button", class: "more" });

  const classes = ({ kind, title }) =>
    [kind in formats ? "n" : title, title === named ? "title" : "", title === "#" ? "index" : ""].join(" ").trim();

  columns.forEach((column) => {
    const button = element("button", { type: "button" }, column.title);
    const cell = element("th", { class: classes(column), "data-column": column.title }, button);
    button.addEventListener("click", () => {
      const again = state.by === column.title;
      // Numbers are first wanted from the largest down.
      state.down = again ? !state.down : column.kind in formats;
      state.by = column.title;
      draw();
    });
    head.append(cell);
  });

  const matches = (i) => {
    if (state.decision && text(choice, i) !== state.decision) return false;
    return state.words.split(/\s+/).every((word) =>
      columns.some((c) => c.strings && text(c, i).toLowerCase().includes(word)));
  };

  const draw = () => {
    const column = columns.find((c) => c.title === state.by);
    const way = state.down ? -1 : 1;
    const compare = column.strings
      ? (a, b) => text(column, a).localeCompare(text(column, b), "en", { numeric: true })
      : (a, b) => column.values[a] - column.values[b];
    const found = Array.from({ length: count }, (_, i) => i).filter(matches);
    found.sort((a, b) => way * compare(a, b) || a - b);
    for (const cell of head.children) {
      const sorted = cell.dataset.column === state.by;
      cell.setAttribute("aria-sort", sorted ? (state.down ? "descending" : "ascending") : "none");
    }
    order.value = `${state.by}|${state.down ? "down" : "up"}`;
    body.replaceChildren(...found.slice(0, state.shown).map(row));
    const sum = found.reduce((total, i) => total + sizes.values[i], 0);
    counted.textContent = `${found.length} of ${count}, ${formatBytes(sum)} ${sizes.title === "size" ? "" : sizes.title}`.trim();
    more.hidden = found.length <= state.shown;
    more.textContent = `show ${Math.min(PIECE, found.length - state.shown)} more`;
  };

  const row = (i) => element("tr", {}, ...columns.map((column) => {
    const cell = element("td", { class: classes(column), "data-label": column.title });
    if (column.kind === "choice") {
      cell.append(element("span", { class: `mark ${text(column, i)}` }, text(column, i)));
    } else if (column.strings) {
      const words = text(column, i);
      cell.append(words.length > 24 ? element("div", { class: "clamp", title: words }, words) : words);
    } else {
      const value = column.values[i];
      const none = !value && column.kind !== "number";
      cell.append(none ? "-" : formats[column.kind](value));
      if (none) cell.classList.add("none");
    }
    return cell;
  }));

  const narrowed = () => { state.shown = FIRST; draw(); };
  search.addEventListener("input", () => { state.words = search.value.trim().toLowerCase(); narrowed(); });
  decisions.addEventListener("change", () => { state.decision = decisions.value; narrowed(); });
  order.addEventListener("change", () => {
    const [by, way] = order.value.split("|");
    Object.assign(state, { by, down: way === "down" });
    draw();
  });
  more.addEventListener("click", () => { state.shown += PIECE; draw(); });
  box.append(
    element("div", { class: "controls" }, search, decisions, order, counted),
    element("table", {}, element("thead", {}, head), body),
    more,
  );
  draw();
}
