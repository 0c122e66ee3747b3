// Draws the charts that page.py describes, in the colours of the theme, and makes the controls work.
"use strict";
(() => {
  const root = document.documentElement;
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const nodes = [...document.querySelectorAll("[data-chart]")];
  const state = charts.map(() => ({ log: false }));

  function colour(role) {
    const name = /^\d$/.test(role) ? "c" + role : role;
    return getComputedStyle(root).getPropertyValue("--" + name).trim() || role;
  }

  // "@1" or "@muted" anywhere in a trace or layout becomes a colour; "@1/0.3" one that lets others shine through.
  function resolve(value) {
    if (typeof value === "string" && value[0] === "@") {
      const [role, alpha] = value.slice(1).split("/");
      const plain = colour(role);
      if (!alpha) return plain;
      const [r, g, b] = [1, 3, 5].map((at) => parseInt(plain.slice(at, at + 2), 16));
      return `rgba(${r},${g},${b},${alpha})`;
    }
    if (Array.isArray(value)) {
      const isNumbers = typeof value[0] === "number" && typeof value[1] !== "string";  // [0, "@1"]: of a colour scale
      return isNumbers ? value : value.map(resolve);
    }
    if (value && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, resolve(item)]));
    }
    return value;
  }

  function merge(base, over) {
    const out = { ...base };
    for (const [key, value] of Object.entries(over)) {
      const both = value && typeof value === "object" && !Array.isArray(value) && out[key] && typeof out[key] === "object";
      out[key] = both ? merge(out[key], value) : value;
    }
    return out;
  }

  function layoutOf(index, node) {
    const spec = charts[index];
    const narrow = node.clientWidth < 480;
    const axis = {
      gridcolor: "@line", zerolinecolor: "@line", linecolor: "@line", automargin: true, tickfont: { size: narrow ? 10 : 12 },
      title: { font: { size: 12 }, standoff: 8 },
    };
    const base = {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", hovermode: "x unified",
      font: { family: "inherit", color: "@ink", size: 12 }, colorway: [1, 2, 3, 4, 5, 6, 7, 8].map((i) => "@" + i),
      margin: { l: narrow ? 40 : 52, r: narrow ? 6 : 12, t: 8, b: 38 }, dragmode: narrow ? false : "zoom",
      hoverlabel: { bgcolor: "@card", bordercolor: "@line", font: { color: "@ink" } },
      legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, font: { size: narrow ? 10 : 12 } },
      xaxis: { ...axis, title: { ...axis.title, text: spec.x } },
      yaxis: { ...axis, title: { ...axis.title, text: narrow ? "" : spec.y }, rangemode: "tozero" },
      yaxis2: { ...axis, overlaying: "y", side: "right", showgrid: false, rangemode: "tozero" },
    };
    const layout = merge(base, spec.layout);
    if (state[index].log) layout.yaxis = { ...layout.yaxis, type: "log", rangemode: "normal", range: undefined };
    return resolve(layout);
  }

  function draw(index) {
    const node = nodes[index];
    const spec = charts[index];
    const select = node.closest("figure").querySelector("[data-choice]");
    const names = Object.keys(spec.choices);
    const name = select ? select.value : names[0];
    const traces = [...spec.traces, ...(name === undefined ? [] : spec.choices[name])];
    const config = { responsive: true, displayModeBar: false };
    return Plotly.react(node, resolve(traces), layoutOf(index, node), config);
  }

  const drawAll = () => Promise.all(nodes.map((_, index) => draw(index)));

  nodes.forEach((node, index) => {
    const figure = node.closest("figure");
    figure.querySelector("[data-choice]")?.addEventListener("change", () => draw(index));
    figure.querySelector("[data-log]")?.addEventListener("click", (event) => {
      state[index].log = !state[index].log;
      event.currentTarget.setAttribute("aria-pressed", String(state[index].log));
      draw(index);
    });
  });

  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);

  const refused = document.querySelector("[data-refused]");
  refused?.addEventListener("click", () => {
    const hidden = document.getElementById("sample-list").classList.toggle("hide-refused");
    refused.setAttribute("aria-pressed", String(!hidden));
  });

  drawAll().then(() => { root.dataset.drawn = String(nodes.length); });
})();
