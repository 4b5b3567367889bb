"use strict";
(async () => {
  const element = (name, attributes = {}, ...children) => {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) {
      if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
      else if (value !== null && value !== false) made.setAttribute(key, value);
    }
    made.append(...children.filter((child) => child !== null));
    return made;
  };
  const find = (selector) => document.querySelector(selector);

  // A copy button beside every line that runs a case again.
  const copyable = (line) => {
    const button = element("button", { type: "button", class: "copy", onclick: async () => {
      const text = line.querySelector("code").textContent;
      try {
        await navigator.clipboard.writeText(text);
      } catch {
        // A page opened from a file may have no clipboard: select the line instead.
        getSelection().selectAllChildren(line.querySelector("code"));
        button.textContent = "selected";
        return;
      }
      button.textContent = "copied";
      setTimeout(() => { button.textContent = "copy"; }, 1500);
    } }, "copy");
    line.append(button);
    return line;
  };
  document.querySelectorAll(".replay").forEach(copyable);

  // What a link leads to may lie in something closed.
  const reveal = () => {
    const target = location.hash.length > 1 && document.getElementById(location.hash.slice(1));
    if (!target) return;
    for (let at = target; at; at = at.parentElement) if (at.localName === "details") at.open = true;
    target.scrollIntoView();
  };
  addEventListener("hashchange", reveal);
  reveal();

  const unpack = async () => {
    const packed = Uint8Array.from(atob(find("#rows").textContent), (letter) => letter.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Response(stream).json();
  };
  let data;
  try {
    data = await unpack();
  } catch (problem) {
    for (const place of ["#case-controls", "#pair-controls"]) {
      find(place)?.append(element("p", { class: "note" }, `The page's data could not be unpacked here: ${problem}`));
    }
    return;
  }
  const { ops, rows, texts, statuses } = data;
  const count = rows.op.length;

  const spelledUse = (use) => {
    if (use === null) return "–";
    if (use >= data.off) return "∞";
    if (use === 0) return "0";
    if (use < 1e-4 || use >= 1e4) return use.toExponential(0).replace("+", "");
    return use >= 100 ? use.toFixed(0) : use.toPrecision(3);
  };
  const heat = (use) => {
    if (use === null) return -1;
    if (use <= 0) return 0;
    const step = data.steps.findIndex((end) => use < end);
    return step < 0 ? data.steps.length + 1 : step + 1;
  };
  const useCell = (use) => element("td", { class: `use h${heat(use)}` }, (use !== null && use >= 1 ? "✕\u00a0" : "") + spelledUse(use));
  const spelledSeconds = (seconds) => seconds >= 100 ? `${Math.floor(seconds / 60)} min ${String(Math.floor(seconds % 60)).padStart(2, "0")} s`
    : seconds >= 1 ? `${seconds.toFixed(1)} s` : seconds >= 1e-3 ? `${Number((seconds * 1e3).toPrecision(3))} ms`
    : seconds > 0 ? `${Math.round(seconds * 1e6)} µs` : "0";

  // The words of a row's case, axis by axis.
  const cellsOf = (row) => {
    const op = ops[rows.op[row]];
    const place = rows.case[row];
    return op.axes.map((axis, at) => ({ axis, index: op.cells[at][place], word: op.words[at][op.cells[at][place]], usual: op.common[at] }))
      .filter((cell) => cell.index >= 0);
  };
  const idOf = (row) => {
    const op = ops[rows.op[row]];
    return op.odd[rows.case[row]] ?? `${op.name}:${cellsOf(row).map((cell) => `${cell.axis}=${cell.word}`).join(",")}`;
  };
  const quoted = (word) => /^[A-Za-z0-9_.:+=@%\/,-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\"'\"'")}'`;
  const replayOf = (row) => `mla-oracle replay ${quoted(idOf(row))} --impl ${quoted(data.impls[rows.impl[row]])} --on ${quoted(data.ons[rows.on[row]])}`
    + (data.laws[rows.law[row]] ? ` --law ${quoted(data.laws[rows.law[row]])}` : "") + data.trees;

  // An id may break after a comma; the text stays what it is.
  const breakable = (text) => text.split(/(?<=,)/).flatMap((part) => [part, element("wbr")]);

  // The table of all cases.

  const columns = [
    ["Status", (row) => rows.status[row]],
    ["Use", (row) => rows.use[row] ?? -1],
    ["Op", (row) => ops[rows.op[row]].name],
    ["By, on", (row) => `${data.impls[rows.impl[row]]} ${data.ons[rows.on[row]]}`],
    ["Case", null],
    ["Worst output", (row) => data.outputs[rows.output[row]]],
    ["Time", (row) => rows.seconds[row]],
  ];
  const PAGE = matchMedia("(max-width: 40rem)").matches ? 25 : 100;
  const state = { text: "", status: "", op: "", impl: "", on: "", sort: 1, down: true, page: 0 };
  const haystacks = new Array(count);
  const haystack = (row) => haystacks[row] ??= [
    idOf(row).replace(":", ","), statuses[rows.status[row]], data.impls[rows.impl[row]], data.ons[rows.on[row]], data.laws[rows.law[row]],
    data.outputs[rows.output[row]], ...rows.texts[row].map((at) => texts[at]), ...rows.diagnosis[row].map((at) => texts[at]),
  ].join(",").toLowerCase() + ",";

  // `axis=word` means that very word, `axis=1..9` a number between, `-term` what must be absent, any other term a part of
  // anything.
  const matcher = (text) => {
    const terms = text.toLowerCase().split(/\s+/).filter(Boolean).map((term) => {
      const absent = term.length > 1 && term.startsWith("-");
      const bare = absent ? term.slice(1) : term;
      const range = bare.match(/^(\w+)=(\d+)\.\.(\d+)$/);
      const part = /^\w+=[^|]+$/.test(bare) ? `,${bare},` : bare;
      if (!range) return (row) => haystack(row).includes(part) !== absent;
      const [, axis, low, high] = range;
      return (row) => {
        const cell = cellsOf(row).find((one) => one.axis.toLowerCase() === axis);
        return (cell !== undefined && Number(cell.word) >= Number(low) && Number(cell.word) <= Number(high)) !== absent;
      };
    });
    return (row) => terms.every((fits) => fits(row));
  };
  const select = (label, options, change, chosen = "") => {
    const made = element("select", { onchange: (event) => change(event.target.value) });
    for (const [value, words] of options) made.append(new Option(words, value, false, value === chosen));
    return [element("label", {}, label, made), made];
  };
  const inputs = {};
  const tally = element("span", { class: "found", role: "status" });
  const body = element("tbody");
  const heads = columns.map(([name, key], at) => element("th", { scope: "col", class: name === "Use" || name === "Time" ? "n" : null }, key === null ? name
    : element("button", { type: "button", onclick: () => { state.down = state.sort === at ? !state.down : name === "Use" || name === "Time"; state.sort = at; state.page = 0; draw(); } }, name)));
  const back = element("button", { type: "button", onclick: () => { state.page -= 1; draw(); } }, "Previous");
  const onward = element("button", { type: "button", onclick: () => { state.page += 1; draw(); } }, "Next");
  const pages = element("span", { class: "found" });

  const opened = (row) => {
    const said = rows.texts[row].map((at) => element("p", { class: "why" }, texts[at]));
    const guessed = rows.diagnosis[row].map((at) => element("p", { class: "why" }, `diagnosis: ${texts[at]}`));
    const line = copyable(element("div", { class: "replay" }, element("code", {}, ...breakable(replayOf(row)))));
    return [...said, ...guessed, line];
  };
  const caseCell = (row) => {
    const op = ops[rows.op[row]];
    const cells = cellsOf(row);
    const shown = op.alone ? cells : cells.filter((cell) => cell.index !== cell.usual);
    const spelled = element("span", { class: "case" });
    for (const cell of shown) spelled.append(`${cell.axis}=`, element("b", {}, cell.word), " ");
    const hidden = cells.length - shown.length;
    if (!shown.length) spelled.append(element("i", {}, "the usual case"));
    else if (hidden) spelled.append(element("i", {}, `+ ${hidden} usual`));
    const law = data.laws[rows.law[row]];
    if (law) spelled.append(" ", element("i", { class: "law" }, `law: ${law}`));
    const more = element("details", { ontoggle: () => { if (more.open && more.childElementCount === 1) more.append(...opened(row)); } },
      element("summary", {}, spelled));
    return element("td", { class: "told" }, more);
  };
  const draw = () => {
    const matches = matcher(state.text);
    const chosen = [];
    for (let row = 0; row < count; row += 1) {
      if (state.status === "wrong" ? rows.status[row] >= data.wrong : state.status !== "" && statuses[rows.status[row]] !== state.status) continue;
      if (state.op !== "" && ops[rows.op[row]].name !== state.op) continue;
      if (state.impl !== "" && data.impls[rows.impl[row]] !== state.impl) continue;
      if (state.on !== "" && data.ons[rows.on[row]] !== state.on) continue;
      if (state.text && !matches(row)) continue;
      chosen.push(row);
    }
    const key = columns[state.sort][1];
    const sign = state.down ? -1 : 1;
    chosen.sort((a, b) => { const x = key(a), y = key(b); return (x < y ? -sign : x > y ? sign : 0) || rows.status[a] - rows.status[b] || a - b; });
    const last = Math.max(0, Math.ceil(chosen.length / PAGE) - 1);
    state.page = Math.min(Math.max(0, state.page), last);
    heads.forEach((head, at) => at === state.sort ? head.setAttribute("aria-sort", state.down ? "descending" : "ascending") : head.removeAttribute("aria-sort"));
    body.replaceChildren(...chosen.slice(state.page * PAGE, (state.page + 1) * PAGE).map((row) => {
      const status = statuses[rows.status[row]];
      return element("tr", {}, element("td", {}, element("span", { class: `status s-${status}` }, status)), useCell(rows.use[row]),
        element("td", { class: "k" }, ops[rows.op[row]].name),
        element("td", { class: "k" }, data.impls[rows.impl[row]], element("br"), element("span", { class: "quiet" }, data.ons[rows.on[row]])),
        caseCell(row), element("td", {}, data.outputs[rows.output[row]]), element("td", { class: "n" }, spelledSeconds(rows.seconds[row])));
    }));
    tally.textContent = `${chosen.length.toLocaleString("en")} of ${count.toLocaleString("en")}`;
    pages.textContent = last ? `page ${state.page + 1} of ${last + 1}` : "";
    back.hidden = onward.hidden = last === 0;
    back.disabled = state.page === 0;
    onward.disabled = state.page === last;
  };
  const named = (names, all) => [["", all], ...[...names].sort().map((name) => [name, name])];
  const refine = (name) => (value) => { state[name] = value; state.page = 0; draw(); };
  const present = statuses.filter((_, at) => rows.status.includes(at));
  const controls = [
    select("Status", [["", "any"], ["wrong", "wrong"], ...present.map((name) => [name, name])], refine("status")),
    select("Op", named(ops.map((op) => op.name), "any"), refine("op")),
    select("By", named(data.impls, "any"), refine("impl")),
    select("On", named(data.ons, "any"), refine("on")),
  ];
  ["status", "op", "impl", "on"].forEach((name, at) => { inputs[name] = controls[at][1]; });
  inputs.text = element("input", { type: "search", placeholder: "heads=128 -values=randn out[", autocomplete: "off", spellcheck: "false",
    oninput: (event) => refine("text")(event.target.value.trim()) });
  const show = (filter) => {
    Object.assign(state, { text: "", status: "", op: "", impl: "", on: "", sort: 1, down: true, page: 0 }, filter);
    for (const [name, input] of Object.entries(inputs)) input.value = state[name];
    draw();
    find("#cases").scrollIntoView();
  };
  find("#case-controls").append(
    element("label", { class: "wide" }, "Terms: axis=word, any text, -without", inputs.text), ...controls.map(([label]) => label),
    element("button", { type: "button", onclick: () => show({}) }, "Clear"), tally);
  find("#case-table").append(element("table", { class: "rows" }, element("thead", {}, element("tr", {}, ...heads)), body));
  find("#case-pages").append(back, onward, pages);
  draw();
  document.querySelectorAll(".matrix a").forEach((link) => link.addEventListener("click", (event) => {
    event.preventDefault();
    show({ op: link.dataset.op, impl: link.dataset.impl, on: link.dataset.on });
  }));

  // The map of two axes.

  const map = find("#pair-map");
  if (!map) return;
  const mapped = ops.map((op, at) => at).filter((at) => ops[at].ranked.length > 1);
  if (!mapped.length) {
    find("#pair-controls").append(element("p", { class: "quiet" }, "No op of this run was judged on two axes that vary."));
    return;
  }
  mapped.sort((a, b) => ops[a].name < ops[b].name ? -1 : 1);
  // The op to start with: most wrong cases, then most cases with an error at all.
  const weight = ops.map(() => 0);
  for (let row = 0; row < count; row += 1) weight[rows.op[row]] += rows.use[row] >= 1 ? 1e6 : rows.use[row] > 0 ? 1 : 0;
  const pair = { op: mapped.reduce((best, at) => weight[at] > weight[best] ? at : best), who: "", down: 0, across: 0, measure: "worst" };
  const naturally = (a, b) => a.localeCompare(b, "en", { numeric: true });
  const measures = {
    worst: ["worst use", (uses) => Math.max(...uses)],
    median: ["median use", (uses) => { const sorted = uses.toSorted((a, b) => a - b), half = sorted.length >> 1;
      return sorted.length % 2 || sorted[half] >= data.off ? sorted[half] : (sorted[half - 1] + sorted[half]) / 2; }],
    wrong: ["cases wrong", (uses) => uses.filter((use) => use >= 1).length],
    cases: ["cases judged", (uses) => uses.length],
  };
  // The word of an axis, or the range of integers in which it lies where there are many.
  const valueOf = (op, axis, row) => {
    const at = op.cells[axis][rows.case[row]];
    return at < 0 ? null : (op.bins[axis] ?? op.words[axis])[at];
  };
  const drawMap = () => {
    const op = ops[pair.op];
    const uses = new Map();
    const used = [new Set(), new Set()];
    for (let row = 0; row < count; row += 1) {
      if (rows.op[row] !== pair.op || rows.use[row] === null) continue;
      if (pair.who !== "" && `${rows.impl[row]} ${rows.on[row]}` !== pair.who) continue;
      const at = [pair.down, pair.across].map((axis) => valueOf(op, axis, row));
      if (at[0] === null || at[1] === null) continue;
      used[0].add(at[0]); used[1].add(at[1]);
      const name = JSON.stringify(at);
      if (uses.has(name)) uses.get(name).push(rows.use[row]); else uses.set(name, [rows.use[row]]);
    }
    const down = [...used[0]].sort(naturally), across = [...used[1]].sort(naturally);
    const [words, measure] = measures[pair.measure];
    const head = element("thead", {}, element("tr", {}, element("th", { scope: "col", class: "of" }, `${op.axes[pair.down]} ↓ ${op.axes[pair.across]} →`),
      ...across.map((other) => element("th", { scope: "col" }, other))));
    const lines = down.map((one) => element("tr", {}, element("th", { scope: "row" }, one), ...across.map((other) => {
      const found = uses.get(JSON.stringify([one, other]));
      if (!found) return element("td", { class: "empty" }, "·");
      const value = measure(found);
      const counted = pair.measure === "wrong" || pair.measure === "cases";
      const step = pair.measure === "wrong" ? (value ? data.steps.length + 1 : 0) : pair.measure === "cases" ? 0 : heat(value);
      const cross = (counted ? pair.measure === "wrong" && value > 0 : value >= 1) ? "✕\u00a0" : "";
      const spelled = cross + (counted ? value.toLocaleString("en") : spelledUse(value));
      return element("td", { class: `h${step}` }, element("button", { type: "button",
        "aria-label": `${spelled}, ${words} of ${found.length}: ${op.axes[pair.down]}=${one}, ${op.axes[pair.across]}=${other}`,
        onclick: () => { const [impl, on] = pair.who === "" ? ["", ""] : pair.who.split(" ").map(Number);
          show({ op: op.name, impl: pair.who === "" ? "" : data.impls[impl], on: pair.who === "" ? "" : data.ons[on],
            text: [[pair.down, one], [pair.across, other]].map(([axis, value]) => `${op.axes[axis]}=${op.bins[axis] ? value.replace("–", "..") : value}`)
              .join(" ") }); } }, spelled));
    })));
    map.replaceChildren(element("table", {}, head, element("tbody", {}, ...lines)));
  };
  const drawControls = () => {
    const op = ops[pair.op];
    const who = new Map();
    for (let row = 0; row < count; row += 1) {
      if (rows.op[row] === pair.op && rows.use[row] !== null) who.set(`${rows.impl[row]} ${rows.on[row]}`, `${data.impls[rows.impl[row]]} on ${data.ons[rows.on[row]]}`);
    }
    const axes = op.ranked.filter((axis) => op.bins[axis] || op.words[axis].length <= 40);
    [pair.down, pair.across] = [axes[0], axes[1] ?? axes[0]];
    pair.who = "";
    const options = axes.map((axis) => [String(axis), op.axes[axis]]);
    const change = (name, read = (value) => value) => (value) => { pair[name] = read(value); drawMap(); };
    find("#pair-controls").replaceChildren(
      select("Op", mapped.map((at) => [String(at), ops[at].name]), (value) => { pair.op = Number(value); drawControls(); drawMap(); }, String(pair.op))[0],
      select("By, on", [["", "all together"], ...who], change("who"))[0],
      select("Down", options, change("down", Number), String(pair.down))[0],
      select("Across", options, change("across", Number), String(pair.across))[0],
      select("Shown", Object.entries(measures).map(([name, [words]]) => [name, words]), change("measure"), pair.measure)[0],
      element("span", { class: "found" }, "a cell leads to its cases"));
  };
  drawControls();
  drawMap();
})();
