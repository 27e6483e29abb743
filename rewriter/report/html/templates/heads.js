"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const at = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
const SIDES = { Q: "Queries read", K: "Keys read", V: "Values read", O: "Writes" };
// Weights are integers, and -n is n zeros.
const unpacked = (row) => row.flatMap((each) => (each < 0 ? Array(-each).fill(0) : each / 1e4));
for (const head of data.heads) head.pattern &&= head.pattern.map((rows) => rows.map(unpacked));
const heads = new Map(data.heads.map((head) => [head.name, head]));
const attributed = data.heads.some((head) => head.effect !== null);
let measure = attributed ? "effects" : "activation";
let shown = null;
let order = "layer";

function make(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}
function draw(tag, attributes = {}, text = "") {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text) made.textContent = text;
  return made;
}
const number = (value) => (value === 0 ? "0" : Math.abs(value) >= 1e4 || Math.abs(value) < 1e-3 ? value.toExponential(2) : value.toPrecision(3));
const largest = (values) => Math.max(...values.map(Math.abs), 0) || 1;

// What is coloured: red is negative, blue is positive, both relative to the largest value in sight.
function coloured(made, value, scale) {
  made.style.setProperty("--v", Math.min(Math.abs(value) / scale, 1).toFixed(3));
  made.classList.toggle("minus", value < 0);
  return made;
}

function choose(name, focus = false) {
  const head = heads.get(name);
  if (!head) return;
  shown = head;
  for (const [other, button] of buttons) button.setAttribute("aria-pressed", String(other === name));
  at("head").textContent = head.name;
  const facts = [head.kind === "neuron" ? "A neuron: attends from a token to itself and to bias tokens." : "An original head."];
  facts.push(`Largest activation ${number(largest(head.activation))}.`);
  if (head.effect !== null) facts.push(`It adds ${number(head.effect)} to the logit along all paths.`);
  at("facts").textContent = facts.join(" ");
  at("patterns").replaceChildren(...patterns(head));
  at("vocabulary").replaceChildren(...vocabulary(head));
  strip();
  history.replaceState(null, "", `#${encodeURIComponent(head.name)}`);
  if (focus) at("head").focus();
}

function step(by) {
  const among = order === "layer" ? matching() : [...matching()].sort(bySize);
  const place = among.indexOf(shown) + by;
  if (among.length) choose(among[(place + among.length) % among.length].name);
}

// -- the first token ------------------------------------------------------------------------------------------------

// Many heads rest on the first token: without it, the colours of a pattern tell its other weights apart.
const original = data.heads.filter((head) => head.kind === "head" && !head.cross && head.pattern?.[0][1]?.length > 1);
const toFirst = original.flatMap((head) => head.pattern[0].slice(1).map((row) => row[0]));
const resting = data.tokens[0]?.place === 0 && toFirst.length ? toFirst.reduce((sum, value) => sum + value, 0) / toFirst.length : null;
let without = resting > 0.4;
const hatched = (head) => without && original.includes(head);
const fullColour = (head) => (hatched(head) ? Math.max(...head.pattern[0].map((row) => Math.max(...row.slice(1)))) || 1 : 1);

// By the square root, so that weights spread over many tokens can be seen.
const shade = (value, full = 1) => Math.sqrt(Math.min(Math.max(value / full, 0), 1));

function strongest(head, row) {
  const weights = head.pattern[0][row];
  const others = hatched(head) ? weights.slice(1) : weights;
  const most = Math.max(...others);
  return most > 0 ? weights.length - others.length + others.indexOf(most) : 0;
}

// -- all heads: a row for each layer, or the largest first ----------------------------------------------------------

const buttons = new Map();
const size = (head) => (attributed ? head.effect ?? 0 : head.activation.reduce((a, b) => (Math.abs(b) > Math.abs(a) ? b : a), 0));
const bySize = (a, b) => Math.abs(size(b)) - Math.abs(size(a));
const layerOf = (sublayer) => sublayer.replace(/\.[^.]*$/, "");
// Layers are called by their numbers where nothing else tells them apart.
const numbered = new Set(data.sublayers.map((each) => layerOf(each.name).replace(/\d+/g, "0"))).size === 1;
const brief = (layer) => (numbered && layer.match(/\d+/g)?.join(".")) || layer;

function map() {
  const scales = Object.fromEntries(["head", "neuron"].map((kind) => [kind, largest(data.heads.filter((head) => head.kind === kind).map(size))]));
  const cell = (head, label) => {
    const button = make("button", { type: "button", title: `${head.name}: ${number(size(head))}`, "aria-label": head.name, "aria-pressed": "false" });
    coloured(button, Math.sign(size(head)) * Math.sqrt(Math.abs(size(head)) / scales[head.kind]), 1);
    if (head.kind === "head") button.append(thumbnail(head), make("span", {}, label));
    button.addEventListener("click", () => choose(head.name));
    buttons.set(head.name, button);
    return button;
  };
  const row = (kind, name, ...cells) => make("div", { class: `row ${kind}`, role: "group", "aria-label": name, title: name }, ...cells);
  const layers = new Set(data.sublayers.filter((each) => each.shown).map((each) => layerOf(each.name)));
  const most = Math.max(...data.sublayers.filter((each) => each.kind === "heads").map((each) => each.count), 1);
  const width = order === "layer" ? Math.max(1, Math.min(3, 48 / layers.size, 18 / most)) : 3;
  const aligned = width * most < 18.1; // heads of one number stand below each other, with gaps for those not shown
  const listed = data.sublayers.filter((each) => each.shown && (order === "layer" || each.kind === "neurons"));
  const rows = [...layers].flatMap((layer) => {
    const own = listed.filter((each) => layerOf(each.name) === layer).map((each) => {
      const members = data.heads.filter((head) => head.sublayer === each.name);
      if (each.kind === "neurons") members.sort(bySize);
      const name = each.shown < each.count ? `${each.name}, ${each.shown} of ${each.count} shown` : each.name;
      const made = row(each.kind, name, ...members.map((head) => cell(head, String(head.number))));
      made.classList.toggle("aligned", aligned && each.kind === "heads");
      members.forEach((head, place) => { made.children[place].style.gridColumn = head.number + 1; });
      return made;
    });
    return own.length ? [make("div", { class: "layer" }, make("span", { class: "side", title: layer }, brief(layer)), make("div", { class: "rows" }, ...own))] : [];
  });
  if (order !== "layer") {
    const sorted = data.heads.filter((head) => head.kind === "head").sort(bySize);
    rows.unshift(row("heads sorted", "Heads, the largest first", ...sorted.map((head) => cell(head, `${brief(layerOf(head.sublayer))}.${head.number}`))));
  }
  at("map").style.setProperty("--cell", `${width.toFixed(2)}rem`);
  at("map").style.setProperty("--heads", most);
  at("map").classList.toggle("small", width < 2.5);
  at("map").replaceChildren(...rows);
  for (const [key, button] of [["layer", "bylayer"], ["size", "bysize"]]) at(button).setAttribute("aria-pressed", String(key === order));
  at("without").setAttribute("aria-pressed", String(without));
  search();
}

function thumbnail(head) {
  const rows = head.pattern?.[0] ?? [];
  const canvas = make("canvas", { width: Math.max(rows[0]?.length ?? 0, 1), height: Math.max(rows.length, 1), "aria-hidden": "true" });
  const pen = canvas.getContext("2d");
  const [hot, muted] = ["--hot", "--muted"].map((name) => getComputedStyle(document.documentElement).getPropertyValue(name));
  const full = fullColour(head);
  rows.forEach((row, y) => row.forEach((value, x) => {
    if (!value) return;
    const left = x === 0 && hatched(head);
    pen.fillStyle = left ? muted : hot;
    pen.globalAlpha = left ? (y % 2 ? 0.3 : 0) * shade(value) : shade(value, full);
    pen.fillRect(x, y, 1, 1);
  }));
  return canvas;
}

function matching() {
  const text = at("search").value.toLowerCase();
  if (!text) return data.heads;
  const words = (head) => head.tokens.flatMap((side) => side.top.map(([word]) => word.toLowerCase()));
  const named = data.heads.filter((head) => head.name.toLowerCase().includes(text));
  return named.length ? named : data.heads.filter((head) => words(head).some((word) => word.includes(text)));
}

function search() {
  const found = new Set(matching());
  for (const [name, button] of buttons) button.classList.toggle("other", !found.has(heads.get(name)));
  at("matching").textContent = at("search").value ? `${found.size} of ${data.heads.length}` : "";
}

// -- tokens ---------------------------------------------------------------------------------------------------------

function strip() {
  const values = shown[measure] ?? shown.activation;
  const scale = largest(values);
  at("strip").replaceChildren(...data.tokens.map((token, place) => {
    const value = values[place];
    if (value === undefined) return make("span", {}, token.text);
    const made = coloured(make("span", { title: `${token.place}: ${number(value)}` }, token.text), value, scale);
    made.addEventListener("pointerenter", () => point(place));
    made.addEventListener("pointerleave", () => point());
    return made;
  }));
  point();
  const names = attributed ? { effects: "attribution to the logit", activation: "activation" } : { activation: "activation" };
  at("measures").replaceChildren(...Object.entries(names).map(([key, text]) => {
    const button = make("button", { type: "button", "aria-pressed": String(key === measure) }, text);
    button.addEventListener("click", () => {
      measure = key;
      strip();
      at("measures").querySelector("[aria-pressed=true]").focus();
    });
    return button;
  }));
}

// A token that attends, and perhaps one that it attends to: marked in the strip and in the patterns.
function point(row, column) {
  const values = row === undefined ? null : shown.pattern?.[0]?.[row];
  const among = values && shown.kind === "head" && !shown.cross;
  [...at("strip").children].forEach((token, place) => {
    token.classList.toggle("attends", place === row);
    token.classList.toggle("attended", among && place === column);
    token.classList.toggle("linked", Boolean(among));
    token.style.setProperty("--w", among && !(place === 0 && hatched(shown)) ? shade(values[place] ?? 0, fullColour(shown)).toFixed(3) : "0");
  });
  for (const svg of at("patterns").querySelectorAll("svg")) svg.mark(row);
  at("told").textContent = row === undefined || !values ? "Point at a token to see what it attends to."
    : shown.kind === "neuron" ? `${data.tokens[row].text} attends to itself with ${values[0]}.`
    : `${data.tokens[row].text} attends most to ${heaviest(values)}.`;
}

function heaviest(values) {
  const places = values.map((_, place) => place).sort((a, b) => values[b] - values[a]).slice(0, 3);
  return places.filter((place) => values[place] > 0).map((place) => `${key(place)} (${values[place]})`).join(", ");
}
const key = (place) => (shown.cross ? `source ${place}` : data.tokens[place]?.text ?? String(place));

function vocabulary(head) {
  const parts = [];
  const sides = Object.entries(data.missing).map(([what, reason]) => `The tokens that heads ${what === "reads" ? "read" : "write"} cannot be shown: ${reason}.`);
  if (head.tokens.length) parts.push(make("h3", {}, "Tokens it reads and writes"));
  for (const side of head.tokens) {
    const names = [...side.side].map((kind, place) => (place ? SIDES[kind].toLowerCase() : SIDES[kind])).join(", ");
    const share = side.share < 0.999 ? `: first singular direction, ${Math.round(side.share * 100)} % of the squared weights` : "";
    parts.push(make("p", { class: "side" }, names + share));
    const scale = largest([...side.top, ...side.bottom].map(([, score]) => score));
    for (const end of [side.top, side.bottom]) {
      parts.push(make("ul", { class: "chips" }, ...end.map(([text, score]) =>
        make("li", {}, coloured(make("span", { title: String(score) }, text), score, scale), make("small", {}, number(score))))));
    }
  }
  return [...parts, ...sides.map((text) => make("p", { class: "side" }, text))];
}

// -- patterns -------------------------------------------------------------------------------------------------------

function patterns(head) {
  return head.pattern.flatMap((rows, place) => pattern(head, rows, head.pattern.length > 1 ? `head ${place + 1} of this neuron` : ""));
}

// Original heads: rows attend, columns are attended to. Neurons, whose keys are few: the other way round.
function pattern(head, weights, what) {
  const neuron = head.kind === "neuron";
  const keys = weights[0]?.length ?? 0;
  const [down, across] = neuron ? [keys, weights.length] : [weights.length, keys];
  const side = Math.max(4, Math.min(neuron ? 26 : 34, Math.floor(440 / Math.max(across, 1))));
  const left = 80, top = 56, every = Math.ceil(11 / side);
  const high = neuron ? 22 : side;
  const attending = (row) => data.tokens[row]?.text ?? String(row);
  const attended = (place) => (neuron ? (place ? `bias token ${place}` : "itself") : key(place));
  const [rows, columns] = neuron ? [attended, attending] : [attending, attended];
  const weight = (row, column) => (neuron ? weights[column][row] : weights[row][column]);
  const about = neuron ? "From every token (column) to itself and to the bias tokens (rows)" : "From every token (row) to those that it attends to (columns)";
  const height = top + down * high + 4;
  const svg = draw("svg", {
    class: "map", viewBox: `0 0 ${left + across * side + 4} ${height}`, width: left + across * side + 4, height, tabindex: "0", role: "img",
    "aria-label": `Pattern ${what}: ${neuron ? "columns are tokens, rows" : "rows are tokens, columns"} what they attend to. Arrow keys read values.`,
  });
  svg.style.minWidth = `${left + 3 * across}px`; // narrower columns cannot be pointed at
  const full = fullColour(head);
  const hatch = draw("pattern", { id: "hatch", width: 6, height: 6, patternUnits: "userSpaceOnUse" });
  hatch.append(draw("path", { class: "hatch", d: "M-1 1 1 -1M0 6 6 0M5 7 7 5" }));
  if (hatched(head)) svg.append(hatch);
  const frame = draw("rect", { class: "frame", x: left, y: top, width: across * side, height: down * high });
  svg.append(frame);
  for (let column = 0; column < across; column++) {
    if (column % every) continue;
    const [x, y] = [left + column * side + side / 2 + 4, top - 6];
    svg.append(draw("text", { transform: `translate(${x} ${y}) rotate(-90)` }, String(columns(column)).slice(0, 7)));
  }
  for (let row = 0; row < down; row++) {
    if (high >= 11 || row % every === 0) svg.append(draw("text", { x: left - 6, y: top + row * high + high / 2 + 4, "text-anchor": "end" }, rows(row).replace("bias token", "bias").slice(0, 10)));
    for (let column = 0; column < across; column++) {
      if (!weight(row, column)) continue;
      const cell = draw("rect", { class: "cell", x: left + column * side, y: top + row * high, width: side, height: high });
      cell.style.setProperty("--v", shade(weight(row, column), full).toFixed(3));
      if (column === 0 && hatched(head)) {
        cell.style.fill = "url(#hatch)";
        cell.style.fillOpacity = shade(weight(row, column)).toFixed(3);
      }
      svg.append(cell);
    }
  }
  const line = draw("rect", { class: "line", x: left, y: top, width: neuron ? side : across * side, height: neuron ? down * high : high, visibility: "hidden" });
  svg.mark = (token) => {
    line.setAttribute("visibility", token === undefined ? "hidden" : "visible");
    line.setAttribute(neuron ? "x" : "y", neuron ? left + (token ?? 0) * side : top + (token ?? 0) * high);
    if (token !== undefined && !neuron) explain(token, strongest(head, token));
  };
  const cursor = draw("rect", { class: "cursor", x: left, y: top, width: side, height: high, visibility: "hidden" });
  svg.append(line, cursor);
  const reading = make("p", { class: "reading", role: "status" }, "Point at a cell, or focus the pattern and use the arrow keys.");
  const terms = make("div", { class: "scroll terms" });
  const explain = (row, column) => terms.replaceChildren(...why(head, row, column));
  if (!neuron && down && across) explain(down - 1, strongest(head, down - 1));
  let here = neuron ? [0, across - 1] : [down - 1, 0];
  const show = (row, column) => {
    here = [row, column];
    cursor.setAttribute("visibility", "visible");
    cursor.setAttribute("x", left + column * side);
    cursor.setAttribute("y", top + row * high);
    const [token, place] = neuron ? [column, row] : [row, column];
    reading.textContent = `${what ? `${what}: ` : ""}${attending(token)} attends to ${attended(place)}: ${weight(row, column)}`;
    point(token, neuron ? undefined : place);
    if (!neuron) explain(row, column);
  };
  for (const kind of ["pointermove", "click"]) {
    svg.addEventListener(kind, (event) => {
      const box = frame.getBoundingClientRect();
      const [row, column] = [[event.clientY - box.top, box.height, down], [event.clientX - box.left, box.width, across]].map(([far, whole, count]) => Math.floor((far / whole) * count));
      if (row >= 0 && row < down && column >= 0 && column < across) show(row, column);
    });
  }
  svg.addEventListener("pointerleave", () => point());
  svg.addEventListener("keydown", (event) => {
    const move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!move || !across) return;
    event.preventDefault();
    show(Math.min(Math.max(here[0] + move[0], 0), down - 1), Math.min(Math.max(here[1] + move[1], 0), across - 1));
  });
  const except = hatched(head) ? `; the first token, hatched, is left out: full colour is ${number(full)}` : "";
  return [make("p", { class: "side" }, `${about}${what && `, ${what}`}; the stronger the colour, the larger the weight${except}`), make("div", { class: "scroll" }, svg), reading, terms];
}

// Why a head attends: the score of a pair of tokens as a sum over what was written at both.
function why(head, row, column) {
  const found = head.scores?.find(([query, place]) => query === row && place === column);
  const place = `${data.tokens[row].text} for ${key(column)}`;
  if (!found) return head.scores ? [make("p", { class: "side" }, `Why ${place}: not on this page, which explains the largest weights of all heads, those of the first token last.`)] : [];
  const [, , total, added, rows] = found;
  const left = rows.reduce((sum, [, , value]) => sum - value, total - added);
  const scale = largest(rows.map(([, , value]) => value));
  const named = (source) => {
    const other = data.sources[source].replace(/\[(\d+)\]$/, ".$1");
    if (!heads.has(other)) return data.sources[source];
    const button = make("button", { type: "button" }, data.sources[source]);
    button.addEventListener("click", () => choose(other, true));
    return button;
  };
  const line = (value, ...cells) => make("tr", {}, ...cells, coloured(make("td", { class: "n" }, number(value)), value, scale));
  const body = rows.map(([asked, told, value]) => line(value, make("td", {}, named(asked)), make("td", {}, named(told))));
  body.push(line(left, make("td", { colspan: "2" }, "all other pairs")));
  if (added) body.push(line(added, make("td", { colspan: "2" }, "masks and position biases")));
  const header = ["What the query reads", "What the key reads"].map((text) => make("th", { scope: "col" }, text));
  return [
    make("p", { class: "side" }, `Why ${place}: the score before the softmax is ${number(total)}, a sum over pairs`),
    make("table", {}, make("thead", {}, make("tr", {}, ...header, make("th", { scope: "col", class: "n" }, "Adds"))), make("tbody", {}, ...body)),
  ];
}

// -- ranking --------------------------------------------------------------------------------------------------------

function ranking() {
  const first = [...data.heads].sort((a, b) => Math.abs(size(b)) - Math.abs(size(a))).slice(0, 15);
  at("largest").textContent = attributed ? "Heads with the largest attribution" : "Heads with the largest activation";
  at("measured").textContent = attributed ? "Attribution" : "Activation";
  at("signed").textContent = attributed ? "attribution (all tokens together)" : "largest activation";
  at("ranking").replaceChildren(...first.map((head) => {
    const values = attributed && head.effects ? head.effects : head.activation;
    const place = values.reduce((best, value, index) => (Math.abs(value) > Math.abs(values[best]) ? index : best), 0);
    const button = make("button", { type: "button" }, head.name);
    button.addEventListener("click", () => choose(head.name, true));
    return make("tr", {}, make("th", { scope: "row" }, button), make("td", { class: "n" }, number(size(head))), make("td", {}, data.tokens[place]?.text ?? ""));
  }));
}

// -- the page -------------------------------------------------------------------------------------------------------

function redraw() {
  map();
  choose(shown.name);
  at("resting").textContent = resting === null ? "" : `Of their attention, heads give ${Math.round(100 * resting)} % to the first token${without ? ": hatched or grey, it is left out, and full colour is the largest other weight of each pattern" : ""}.`;
}

function tokens() {
  if (!data.embed) return;
  const parts = data.embed.map((value, place) => [data.tokens[place].text, value]);
  const rest = data.logit.value - data.embed.reduce((sum, value) => sum + value, 0);
  const scale = largest([...data.embed, rest]);
  parts.push(["everything else", Math.abs(rest) < 1e-3 * scale ? 0 : rest]); // the data have four digits
  at("parts").replaceChildren(...parts.map(([text, value]) => make("li", {}, coloured(make("span", {}, text), value, scale), make("small", {}, number(value)))));
  at("bytokens").hidden = false;
}

at("search").addEventListener("input", search);
at("search").addEventListener("keydown", (event) => {
  if (event.key !== "Enter") return;
  event.preventDefault();
  const [first] = matching();
  if (first) choose(first.name);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => redraw());
at("bylayer").addEventListener("click", () => redraw(order = "layer"));
at("bysize").addEventListener("click", () => redraw(order = "size"));
at("without").addEventListener("click", () => redraw(without = !without));
at("previous").addEventListener("click", () => step(-1));
at("next").addEventListener("click", () => step(1));
const wanted = data.logit;
at("about").textContent = wanted
  ? `The logit of ${wanted.entry} is ${number(wanted.value)}; ${data.tokens.length} tokens, ${data.heads.length} heads.`
  : `${data.tokens.length} tokens, ${data.heads.length} heads.`;
if (data.heads.length) {
  at("main").hidden = false;
  at("without").hidden = resting === null;
  at("bysize").textContent = attributed ? "By attribution" : "By activation";
  tokens();
  ranking();
  const asked = (() => { try { return decodeURIComponent(location.hash.slice(1)); } catch { return ""; } })();
  const best = data.heads.reduce((a, b) => (Math.abs(b.effect ?? 0) > Math.abs(a.effect ?? 0) ? b : a));
  shown = heads.get(heads.has(asked) ? asked : best.name);
  redraw();
}
