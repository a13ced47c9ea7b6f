// Draws the figures of the report, follows light and dark, and lets the data be saved.
// A figure is {data, layout} as Plotly takes it; strings "@name" stand for the CSS colour --name.
"use strict";

(() => {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const charts = [...document.querySelectorAll(".chart[data-figure]")];
  const config = {
    displaylogo: false,
    responsive: true,
    modeBarButtons: [["zoom2d", "pan2d", "resetScale2d", "toImage"]],
    displayModeBar: "hover",
  };

  const read = (id) => JSON.parse(document.getElementById(id).textContent);

  const resolve = (value, style) => {
    if (typeof value === "string" && value.startsWith("@")) {
      return style.getPropertyValue(`--${value.slice(1)}`).trim() || value;
    }
    if (Array.isArray(value)) return value.map((inner) => resolve(inner, style));
    if (value && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([k, v]) => [k, resolve(v, style)]));
    }
    return value;
  };

  const adapt = (layout, width) => {
    // Narrow screens: fewer ticks, smaller text, legends below.
    if (width >= 520) return layout;
    const axes = Object.entries(layout).filter(([key]) => /^[xy]axis\d*$/.test(key));
    for (const [, axis] of axes) axis.nticks = Math.min(axis.nticks || 5, 5);
    layout.font = { ...layout.font, size: 11 };
    return layout;
  };

  // Width of A4 less its margins, in CSS pixels: what is drawn wider would be cut off.
  const PAPER = 680;

  const draw = (chart) => {
    const style = getComputedStyle(document.documentElement);
    const figure = resolve(read(chart.dataset.figure), style);
    figure.layout.font = { ...figure.layout.font, family: getComputedStyle(document.body).fontFamily };
    const printing = document.documentElement.classList.contains("print");
    const layout = adapt(figure.layout, printing ? PAPER : chart.clientWidth);
    if (printing) layout.width = PAPER;
    else layout.autosize = true;
    return Plotly.react(chart, figure.data, layout, config);
  };

  const drawAll = () => Promise.all(charts.map(draw));

  // Arrow keys or wasd: left and right move along the time axis, up and down zoom.
  const onKey = (event) => {
    const chart = event.currentTarget;
    const step = { ArrowLeft: "a", ArrowRight: "d", ArrowUp: "w", ArrowDown: "s" };
    const key = step[event.key] || event.key.toLowerCase();
    if (event.target !== chart || event.ctrlKey || event.metaKey || event.altKey) return;
    const [low, high] = chart.layout.xaxis.range;
    const span = high - low;
    const next = {
      a: [low - span / 5, high - span / 5],
      d: [low + span / 5, high + span / 5],
      w: [low + span / 6, high - span / 6],
      s: [low - span / 4, high + span / 4],
    }[key];
    if (next) Plotly.relayout(chart, { "xaxis.range": next });
    else if (key === "0" || key === "escape") Plotly.relayout(chart, { "xaxis.range": chart.dataset.range.split(",").map(Number) });
    else return;
    event.preventDefault();
  };

  const save = (event) => {
    const { source, file } = event.currentTarget.dataset;
    const text = document.getElementById(source).textContent;
    const url = URL.createObjectURL(new Blob([text], { type: "application/json" }));
    Object.assign(document.createElement("a"), { href: url, download: file }).click();
    URL.revokeObjectURL(url);
  };

  drawAll();
  dark.addEventListener("change", drawAll);
  const onPaper = (isPaper) => () => {
    document.documentElement.classList.toggle("print", isPaper);
    drawAll();
  };
  addEventListener("beforeprint", onPaper(true));
  addEventListener("afterprint", onPaper(false));
  document.querySelectorAll(".chart[data-keys]").forEach((chart) => chart.addEventListener("keydown", onKey));
  document.querySelectorAll("button[data-source]").forEach((button) => button.addEventListener("click", save));
})();
