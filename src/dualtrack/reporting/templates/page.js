// Sorting is a convenience: without it the page says the same.
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  const headings = [...table.tHead.rows[0].cells];
  headings.forEach((heading, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...heading.childNodes);
    heading.append(button);
    button.addEventListener("click", () => {
      const direction = heading.getAttribute("aria-sort") === "ascending" ? -1 : 1;
      const key = (row) => row.cells[column].dataset.sort ?? row.cells[column].textContent.trim();
      const compare = (a, b) => {
        const [x, y] = [key(a), key(b)];
        const [p, q] = [parseFloat(x), parseFloat(y)];
        return direction * (Number.isNaN(p) || Number.isNaN(q) ? x.localeCompare(y) : p - q);
      };
      body.append(...[...body.rows].sort(compare));
      headings.forEach((other) => other.removeAttribute("aria-sort"));
      heading.setAttribute("aria-sort", direction === 1 ? "ascending" : "descending");
    });
  });
}
