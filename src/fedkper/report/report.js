"use strict";
// Sorting: a click or Enter on a heading; cells without a number stay last.
const key = (row, at) => row.cells[at].dataset.v ?? row.cells[at].textContent.trim();
for (const button of document.querySelectorAll("table.sortable th button")) {
  button.addEventListener("click", () => {
    const head = button.closest("th"), body = head.closest("table").tBodies[0], at = head.cellIndex;
    const text = head.dataset.kind === "text";
    const first = text ? "ascending" : "descending", second = text ? "descending" : "ascending";
    const way = head.getAttribute("aria-sort") === first ? second : first;
    const sign = way === "ascending" ? 1 : -1;
    for (const other of head.parentNode.cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", way);
    const rows = [...body.rows].sort((a, b) => {
      const x = key(a, at), y = key(b, at);
      if (x === "" || y === "") return (x === "") - (y === "");
      return sign * (text ? x.localeCompare(y, "en", { numeric: true }) : Number(x) - Number(y));
    });
    body.append(...rows);
  });
}
// Curves: the legend shows and hides methods; the values of a round on hovering and with the arrow keys.
for (const section of document.querySelectorAll("section.setting")) {
  const store = section.querySelector("script.curves");
  if (!store) continue;
  const data = JSON.parse(store.textContent);
  const visible = (n) => section.querySelector(`.legend input[data-n="${n}"]`).checked;
  for (const box of section.querySelectorAll(".legend input")) {
    box.addEventListener("change", () => {
      for (const part of section.querySelectorAll(`.plot [data-n="${box.dataset.n}"]`)) {
        part.classList.toggle("off", !box.checked);
      }
    });
  }
  for (const plot of section.querySelectorAll(".plot")) {
    const chart = data[plot.dataset.key], readout = plot.parentNode.querySelector(".readout");
    const cursor = plot.querySelector(".cursor"), svg = plot.querySelector("svg");
    const left = Number(plot.dataset.left), right = Number(plot.dataset.right);
    let at = chart.rounds - 1;
    const show = (t) => {
      at = Math.min(chart.rounds - 1, Math.max(0, t));
      const x = left + (right - left) * (chart.rounds > 1 ? at / (chart.rounds - 1) : 0.5);
      cursor.setAttribute("x1", x);
      cursor.setAttribute("x2", x);
      cursor.style.visibility = "visible";
      const values = chart.lines.filter((line) => visible(line.n)).map((line) => [line.name, line.values[at]]);
      values.sort((a, b) => (b[1] ?? -9) - (a[1] ?? -9));
      const texts = values.map(([name, v]) => `${name} ${v === null ? "–" : v.toFixed(3).replace("-", "−")}`);
      readout.textContent = `round ${at + 1}: ${texts.join(", ")}`;
    };
    plot.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect(), scale = svg.viewBox.baseVal.width / box.width;
      const share = ((event.clientX - box.left) * scale - left) / (right - left);
      show(Math.round(share * (chart.rounds - 1)));
    });
    plot.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1, Home: -chart.rounds, End: chart.rounds }[event.key];
      if (step) {
        event.preventDefault();
        show(at + step);
      }
    });
    plot.addEventListener("focus", () => show(at));
  }
}
// What is folded away is printed all the same.
addEventListener("beforeprint", () => {
  for (const part of document.querySelectorAll("details")) part.open = true;
});
