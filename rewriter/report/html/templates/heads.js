"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const at = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
const SIDES = { Q: "Queries read", K: "Keys read", V: "Values read", O: "Writes" };
const heads = new Map(data.heads.map((head) => [head.name, head]));
const attributed = data.heads.some((head) => head.effect !== null);
let measure = attributed ? "effects" : "activation";
let shown = null;

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
  if (at("sublayer").value !== head.sublayer) {
    at("sublayer").value = head.sublayer;
    numbers();
  }
  at("number").value = head.name;
  at("head").textContent = head.name;
  const facts = [head.kind === "neuron" ? "A neuron: attends from a token to itself and to bias tokens." : "An original head."];
  facts.push(`Largest activation ${number(largest(head.activation))}.`);
  if (head.effect !== null) facts.push(`It adds ${number(head.effect)} to the logit along all paths.`);
  at("facts").textContent = facts.join(" ");
  strip();
  at("patterns").replaceChildren(...patterns(head));
  at("vocabulary").replaceChildren(...vocabulary(head));
  history.replaceState(null, "", `#${encodeURIComponent(head.name)}`);
  if (focus) at("head").focus();
}

function numbers() {
  const own = data.heads.filter((head) => head.sublayer === at("sublayer").value);
  at("number").replaceChildren(...own.map((head) => make("option", { value: head.name }, `${head.kind} ${head.number}`)));
}

function step(by) {
  const place = data.heads.indexOf(shown) + by;
  choose(data.heads[(place + data.heads.length) % data.heads.length].name);
}

// -- tokens ---------------------------------------------------------------------------------------------------------

function strip() {
  const values = shown[measure] ?? shown.activation;
  const scale = measure === "effects" && shown.effects ? largest(shown.effects) : largest(shown.activation);
  at("strip").replaceChildren(...data.tokens.map((token, place) => {
    const value = values[place];
    if (value === undefined) return make("span", {}, token.text);
    return coloured(make("span", { title: `${token.place}: ${number(value)}` }, token.text), value, scale);
  }));
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
  if (head.pattern === null) return [make("p", {}, "An operator keeps this pattern to itself.")];
  return head.pattern.flatMap((rows, place) => map(head, rows, head.pattern.length > 1 ? `head ${place + 1} of this neuron` : ""));
}

function map(head, rows, what) {
  const neuron = head.kind === "neuron";
  const width = rows[0]?.length ?? 0;
  const size = neuron ? 22 : Math.max(8, Math.min(34, Math.floor(440 / Math.max(width, 1))));
  const across = neuron ? 72 : size;
  const left = 80, top = neuron ? 20 : 56;
  const keys = (column) => (neuron ? (column ? `bias token ${column}` : "itself") : head.cross ? `source ${column}` : data.tokens[column]?.text ?? column);
  const token = (row) => data.tokens[row]?.text ?? String(row);
  const about = neuron ? "From every token (row) to itself and to the bias tokens; the stronger the colour, the larger the weight" : "From every token (row) to those that it attends to (columns); the stronger the colour, the larger the weight";
  const height = top + rows.length * size + 4;
  const svg = draw("svg", {
    class: "map", viewBox: `0 0 ${left + width * across + 4} ${height}`, width: left + width * across + 4, height,
    tabindex: "0", role: "img", "aria-label": `Pattern ${what}: rows are tokens, columns what they attend to. Arrow keys read values.`,
  });
  for (let column = 0; column < width; column++) {
    if (!neuron && size < 11 && column % 4) continue;
    const [x, y] = [left + column * across + across / 2, top - 6];
    const place = neuron ? { x, y, "text-anchor": "middle" } : { transform: `translate(${x + 4} ${y}) rotate(-90)` };
    svg.append(draw("text", place, neuron && column ? `bias ${column}` : String(keys(column)).slice(0, 7)));
  }
  rows.forEach((row, place) => {
    if (size >= 11 || place % 4 === 0) {
      const label = draw("text", { x: left - 6, y: top + place * size + size / 2 + 4, "text-anchor": "end" }, token(place).slice(0, 10));
      svg.append(label);
    }
    row.forEach((value, column) => {
      const cell = draw("rect", { class: "cell", x: left + column * across, y: top + place * size, width: across, height: size, "data-row": place, "data-column": column });
      // By the square root, so that weights spread over many tokens can be seen.
      cell.style.setProperty("--v", Math.sqrt(Math.min(Math.max(value, 0), 1)).toFixed(3));
      svg.append(cell);
    });
  });
  svg.append(draw("rect", { class: "frame", x: left, y: top, width: width * across, height: rows.length * size }));
  const cursor = draw("rect", { class: "cursor", x: left, y: top, width: across, height: size, visibility: "hidden" });
  svg.append(cursor);
  const reading = make("p", { class: "reading", role: "status" }, "Point at a cell, or focus the pattern and use the arrow keys.");
  let here = [rows.length - 1, 0];
  const show = (row, column) => {
    here = [row, column];
    cursor.setAttribute("visibility", "visible");
    cursor.setAttribute("x", left + column * across);
    cursor.setAttribute("y", top + row * size);
    reading.textContent = `${what ? `${what}: ` : ""}${token(row)} attends to ${keys(column)}: ${rows[row][column]}`;
  };
  svg.addEventListener("pointermove", (event) => {
    const { row, column } = event.target.dataset ?? {};
    if (row !== undefined) show(Number(row), Number(column));
  });
  svg.addEventListener("click", (event) => {
    const { row, column } = event.target.dataset ?? {};
    if (row !== undefined) show(Number(row), Number(column));
  });
  svg.addEventListener("keydown", (event) => {
    const move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!move || !width) return;
    event.preventDefault();
    show(Math.min(Math.max(here[0] + move[0], 0), rows.length - 1), Math.min(Math.max(here[1] + move[1], 0), width - 1));
  });
  return [make("p", { class: "side" }, what ? `${about}, ${what}` : about), make("div", { class: "scroll" }, svg), reading];
}

// -- ranking --------------------------------------------------------------------------------------------------------

function ranking() {
  const size = (head) => (attributed ? head.effect ?? 0 : largest(head.activation));
  const first = [...data.heads].sort((a, b) => Math.abs(size(b)) - Math.abs(size(a))).slice(0, 15);
  at("largest").textContent = attributed ? "Heads with the largest attribution" : "Heads with the largest activation";
  at("measured").textContent = attributed ? "Attribution" : "Activation";
  at("ranking").replaceChildren(...first.map((head) => {
    const values = attributed && head.effects ? head.effects : head.activation;
    const place = values.reduce((best, value, index) => (Math.abs(value) > Math.abs(values[best]) ? index : best), 0);
    const button = make("button", { type: "button" }, head.name);
    button.addEventListener("click", () => choose(head.name, true));
    return make("tr", {}, make("th", { scope: "row" }, button), make("td", { class: "n" }, number(size(head))), make("td", {}, data.tokens[place]?.text ?? ""));
  }));
}

// -- the page -------------------------------------------------------------------------------------------------------

at("sublayer").replaceChildren(...data.sublayers.filter((each) => each.shown).map((each) =>
  make("option", { value: each.name }, each.shown < each.count ? `${each.name} (${each.shown} of ${each.count})` : each.name)));
at("sublayer").addEventListener("change", () => {
  numbers();
  choose(at("number").value);
});
at("number").addEventListener("change", () => choose(at("number").value));
at("previous").addEventListener("click", () => step(-1));
at("next").addEventListener("click", () => step(1));
const wanted = data.logit;
at("about").textContent = wanted
  ? `Logit ${wanted.logit}${wanted.minus === null ? "" : ` minus logit ${wanted.minus}`} is ${number(wanted.value)}; ${data.tokens.length} tokens, ${data.heads.length} heads.`
  : `${data.tokens.length} tokens, ${data.heads.length} heads.`;
if (data.heads.length) {
  at("main").hidden = false;
  numbers();
  ranking();
  const asked = (() => { try { return decodeURIComponent(location.hash.slice(1)); } catch { return ""; } })();
  const best = data.heads.reduce((a, b) => (Math.abs(b.effect ?? 0) > Math.abs(a.effect ?? 0) ? b : a));
  choose(heads.has(asked) ? asked : best.name);
}
