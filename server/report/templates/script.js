"use strict";
document.querySelectorAll("table").forEach(table => {
  table.querySelectorAll("thead th").forEach((head, at) => {
    const button = document.createElement("button");
    button.type = "button";
    button.title = "Sort";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      table.querySelectorAll("thead th").forEach(other => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const body = table.tBodies[0], sign = down ? -1 : 1;
      const key = row => {
        const cell = row.cells[at];
        return "value" in cell.dataset ? Number(cell.dataset.value) : null;
      };
      const rows = Array.from(body.rows);
      rows.sort((one, other) => {
        const a = key(one), b = key(other);
        if (a === null && b === null) {
          const words = other.cells[at].textContent;
          return sign * one.cells[at].textContent.localeCompare(words, undefined, {numeric: true});
        }
        if (a === null) return 1;
        if (b === null) return -1;
        return a === b ? 0 : sign * (a - b);
      });
      body.append(...rows);
    });
  });
});
document.querySelectorAll(".legend [data-toggle]").forEach(item => {
  const button = document.createElement("button");
  button.type = "button";
  button.dataset.toggle = item.dataset.toggle;
  button.setAttribute("aria-pressed", "true");
  button.title = "Show or hide";
  button.append(...item.childNodes);
  item.replaceWith(button);
  button.addEventListener("click", () => {
    const shown = button.getAttribute("aria-pressed") !== "true";
    document.querySelectorAll(`.legend [data-toggle="${button.dataset.toggle}"]`).forEach(
      twin => twin.setAttribute("aria-pressed", String(shown)));
    document.querySelectorAll(`[data-series="${button.dataset.toggle}"]`).forEach(
      drawn => drawn.classList.toggle("off", !shown));
  });
});
