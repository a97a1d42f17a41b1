"use strict";
// Values of a chart under the pointer or the arrow keys, tables that sort, and samples that are filtered. Text is only
// ever set as text.

function watchChart(svg) {
  const data = JSON.parse(svg.dataset.chart);
  const figure = svg.closest("figure");
  const readout = figure.querySelector(".readout");
  const cursor = svg.querySelector(".cursor");
  const width = svg.viewBox.baseVal.width;
  let current = -1;

  function show(index) {
    current = Math.min(Math.max(index, 0), data.xs.length - 1);
    const pixel = data.pixels[current];
    cursor.setAttribute("x1", pixel);
    cursor.setAttribute("x2", pixel);
    cursor.classList.add("on");
    const lines = [data.x + " " + data.xs[current]];
    for (const series of data.series) {
      const value = series.values[current];
      lines.push(series.name + ": " + value + (value === "-" ? "" : data.unit));
    }
    readout.replaceChildren(...lines.map((line) => {
      const row = document.createElement("p");
      row.textContent = line;
      return row;
    }));
    readout.hidden = false;
    const box = svg.getBoundingClientRect();
    const frame = figure.getBoundingClientRect();
    const x = box.left - frame.left + (pixel / width) * box.width;
    const fits = x + 12 + readout.offsetWidth < frame.width;
    readout.style.left = (fits ? x + 12 : Math.max(0, x - 12 - readout.offsetWidth)) + "px";
    readout.style.top = box.top - frame.top + 16 + "px";
  }

  function hide() {
    current = -1;
    readout.hidden = true;
    cursor.classList.remove("on");
  }

  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const at = ((event.clientX - box.left) / box.width) * width;
    let nearest = 0;
    data.pixels.forEach((pixel, index) => {
      if (Math.abs(pixel - at) < Math.abs(data.pixels[nearest] - at)) nearest = index;
    });
    show(nearest);
  });
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("blur", hide);
  svg.addEventListener("keydown", (event) => {
    const last = data.xs.length - 1;
    const moves = { ArrowRight: current + 1, ArrowLeft: current < 0 ? last : current - 1, Home: 0, End: last };
    if (event.key === "Escape") return hide();
    if (!(event.key in moves)) return;
    event.preventDefault();
    show(moves[event.key]);
  });
}

function sortable(table) {
  const heads = [...table.tHead.rows[0].cells];
  const body = table.tBodies[0];
  heads.forEach((head, column) => {
    const button = head.querySelector("button");
    if (!button) return;
    button.addEventListener("click", () => {
      const rising = head.getAttribute("aria-sort") !== "ascending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", rising ? "ascending" : "descending");
      const rows = [...body.rows].map((row) => ({ row, text: row.cells[column].textContent }));
      rows.sort((a, b) => {
        const [x, y] = [parseFloat(a.text), parseFloat(b.text)];
        const order = Number.isNaN(x) || Number.isNaN(y) ? a.text.localeCompare(b.text) : x - y;
        return rising ? order : -order;
      });
      body.append(...rows.map((item) => item.row));
    });
  });
}

function filterSamples(form) {
  const cards = [...form.parentElement.querySelectorAll("details[data-verdict]")];
  const shown = form.querySelector("output");
  const [verdict, problem] = [form.querySelector("select"), form.querySelector("input")];

  function apply() {
    const wanted = problem.value.toLowerCase();
    let count = 0;
    for (const card of cards) {
      const fits = (!verdict.value || card.dataset.verdict === verdict.value)
        && card.dataset.problem.toLowerCase().includes(wanted);
      card.hidden = !fits;
      count += fits;
    }
    shown.textContent = count + " of " + cards.length + " shown";
  }

  form.addEventListener("input", apply);
  form.addEventListener("submit", (event) => event.preventDefault());
  apply();
}

document.querySelectorAll("form.filters").forEach(filterSamples);
document.querySelectorAll("svg.chart").forEach(watchChart);
document.querySelectorAll("table.families").forEach(sortable);
