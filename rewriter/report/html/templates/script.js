"use strict";
// Niceties only: the page is complete without them.
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  const headings = [...table.tHead.rows[0].cells];
  headings.forEach((heading, place) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...heading.childNodes);
    heading.append(button);
    button.addEventListener("click", () => {
      const up = heading.getAttribute("aria-sort") !== "ascending";
      for (const each of headings) each.removeAttribute("aria-sort");
      heading.setAttribute("aria-sort", up ? "ascending" : "descending");
      const key = (row) => row.cells[place].dataset.v ?? row.cells[place].textContent;
      const order = (a, b) => {
        const [x, y] = [key(a), key(b)];
        return heading.classList.contains("n") ? number(x) - number(y) || 0 : x.localeCompare(y, "en", { numeric: true });
      };
      body.append(...[...body.rows].sort((a, b) => (up ? order(a, b) : order(b, a))));
    });
  });
}
function number(text) {
  return text === "inf" ? Number.MAX_VALUE : Number(text);
}
let folded = [];
addEventListener("beforeprint", () => {
  folded = [...document.querySelectorAll("details:not([open])")];
  for (const each of folded) each.open = true;
});
addEventListener("afterprint", () => {
  for (const each of folded) each.open = false;
});
