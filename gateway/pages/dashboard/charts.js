// Charts over time, drawn by uPlot in the colours of the page.

import { make } from "../shared/elements.js";

const { uPlot } = window;
const SHORTEST_S = 120;

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

const MINUTES = [60, 120, 300, 600, 1800];
const clock = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit" });
export const oClock = (time) => clock.format(1000 * time);

// One chart in `box`. Each curve has a name, a colour of the page, and may be filled.
export class Chart {
  constructor(box, { curves, say, top, nothing, height = 190 }) {
    this.box = box;
    this.settings = { curves, say, top, height };
    this.columns = [[], ...curves.map(() => [])];
    this.nothing = make("p", { class: "nothing muted" }, nothing);
    this.keys();
    this.draw();
    new ResizeObserver(() => this.plot.setSize({ width: this.width, height })).observe(box);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  get width() {
    return Math.max(200, this.box.clientWidth);
  }

  // Show a legend if there is more than one curve.
  keys() {
    const place = this.box.parentElement.querySelector(".keys");
    if (!place) return;
    place.replaceChildren(...this.settings.curves.map(({ name, tone }) => make("span", { class: `key ${tone}` }, name)));
  }

  draw() {
    this.plot?.destroy();
    this.box.replaceChildren(this.nothing);
    this.plot = new uPlot(options(this.settings, this.width), this.columns, this.box);
  }

  // Show these columns: times, then the values of each curve; null for a missing value.
  show(columns, now) {
    this.columns = columns;
    const any = columns.slice(1).some((column) => column.some((value) => value != null));
    this.nothing.hidden = any;
    this.box.classList.toggle("without", !any);
    this.plot.setData(columns, false);
    const from = Math.min(columns[0][0] ?? now, now - SHORTEST_S);
    this.plot.batch(() => {
      this.plot.setScale("x", { min: from, max: now });
      this.plot.setScale("y", { min: 0, max: this.settings.top ?? highest(columns.slice(1)) });
    });
  }
}

const highest = (columns) => 1.15 * Math.max(1e-4, ...columns.flat().filter((value) => value != null));

// Return the points that no line connects to others.
function alone(plot, series) {
  const values = plot.data[series];
  const isGap = (index, step) => {
    let near = index + step;
    while (values[near] === undefined && near in values) near += step;
    return values[near] == null;
  };
  return values.flatMap((value, index) => (value != null && isGap(index, -1) && isGap(index, 1) ? [index] : []));
}

function options({ curves, say, top, height }, width) {
  const faint = color("--faint");
  const axis = {
    stroke: faint,
    font: `12px ${color("--text")}`,
    grid: { stroke: color("--edge"), width: 1 },
    ticks: { show: false },
    gap: 6,
  };
  return {
    width,
    height,
    padding: [8, 20, 0, 0],
    legend: { show: false },
    cursor: { show: false },
    scales: { x: { time: true, auto: false }, y: { auto: false, range: (_plot, min, max) => [min ?? 0, max ?? top ?? 1] } },
    axes: [
      { ...axis, grid: { show: false }, space: 70, size: 28, incrs: MINUTES, values: (_plot, times) => times.map(oClock) },
      { ...axis, space: 38, size: 58, values: (_plot, values) => values.map(say) },
    ],
    series: [
      {},
      ...curves.map(({ tone, filled }) => ({
        stroke: color(`--${tone}`),
        width: 2,
        fill: filled ? color(`--${tone}-soft`) : undefined,
        points: { show: true, filter: alone, size: 5, fill: color(`--${tone}`), stroke: color(`--${tone}`) },
      })),
    ],
  };
}
