"use strict";
// Draws the figures of the page. The JSON holds for each figure its traces by step, and `tokens`, their other x axis.
const figures = JSON.parse(document.getElementById("figures").textContent);
const config = { displaylogo: false, responsive: true, modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"] };
const font = { family: getComputedStyle(document.body).fontFamily, size: 12, color: "#374151" };
const axis = { gridcolor: "#eef0f3", linecolor: "#d1d5db", zerolinecolor: "#e5e7eb", automargin: true };
const plot = (figure) => document.getElementById("plot-" + figure.id);

for (const figure of figures) {
  const { xaxis = {}, yaxis = {}, ...layout } = figure.layout;
  const x = figure.tokens ? { title: { text: "step" }, ...xaxis } : xaxis;
  Plotly.newPlot(plot(figure), figure.data, {
    font, margin: { l: 56, r: 12, t: 8, b: 40 }, showlegend: true, paper_bgcolor: "#fff", plot_bgcolor: "#fff",
    legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, traceorder: "normal" },
    hoverlabel: { font: { size: 12 } }, xaxis: { ...axis, ...x }, yaxis: { ...axis, ...yaxis }, ...layout,
  }, config);
}

function press(button, others) {
  for (const other of others) other.setAttribute("aria-pressed", String(other === button));
}

const axes = document.querySelectorAll("[data-axis]");
for (const button of axes) {
  button.addEventListener("click", () => {
    press(button, axes);
    const tokens = button.dataset.axis === "tokens";
    for (const figure of figures.filter((each) => each.tokens)) {
      const x = tokens ? figure.tokens : figure.data.map((trace) => trace.x);
      Plotly.update(plot(figure), { x }, { "xaxis.title.text": tokens ? "tokens" : "step", "xaxis.autorange": true });
    }
  });
}

for (const button of document.querySelectorAll("[data-log]")) {
  button.addEventListener("click", () => {
    const log = button.getAttribute("aria-pressed") !== "true";
    button.setAttribute("aria-pressed", String(log));
    Plotly.relayout("plot-" + button.dataset.log, { "yaxis.type": log ? "log" : "linear", "yaxis.autorange": true });
  });
}
