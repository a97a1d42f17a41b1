// The charts of one run or of two, drawn by uPlot from points that come piece by piece. Text is only ever set as text.
// `element` is that of rollouts.js, which the page loads before.

const HEIGHT = 220, MOST_ROWS = 1000;
const DASHES = [[], [7, 4], [2, 4], [8, 3, 2, 3], [12, 3], [4, 2], [1, 4], [10, 3, 2, 3, 2, 3]];

// A row of a table: a heading, or several of them, and cells.
export function row(scope, heads, texts = []) {
  const made = element("tr");
  for (const text of heads) made.append(Object.assign(element("th", text), { scope }));
  made.append(...texts.map((text) => element("td", text)));
  return made;
}

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

export function shortNumber(value) {
  if (value === null || value === undefined) return "-";
  return value === 0 || (Math.abs(value) >= 1e-3 && Math.abs(value) < 1e7)
    ? String(Number(value.toPrecision(4))) : value.toExponential(2);
}

// A value to one digit of its error, or two where the first is 1.
export function withError(value, error) {
  if (!error || value === null || value === undefined) return shortNumber(value);
  const power = Math.floor(Math.log10(error));
  const digits = Math.min(Math.max(0, -power + (error < 2 * 10 ** power)), 9);
  return value.toFixed(digits) + " ± " + error.toFixed(digits);
}

// One chart: its figure, and the points of its series by run, name and x.
class Chart {
  constructor(told, charts) {
    this.told = told;
    this.charts = charts;
    this.series = new Map();
    this.figure = element("figure");
    this.legend = element("ul", undefined, "legend");
    this.plot = element("div", undefined, "plot");
    this.plot.tabIndex = 0;
    this.plot.setAttribute("role", "img");
    const words = told.title + ", by " + told.x + ". Left and right arrow keys read the values.";
    this.plot.setAttribute("aria-label", words);
    this.at = element("p", "", "at");
    this.values = element("details");
    const box = element("div", undefined, "values");
    box.tabIndex = 0;
    this.values.append(element("summary", "values"), box);
    const caption = element("figcaption");
    this.title = element("h3", told.title);
    caption.append(this.title, this.legend);
    this.figure.append(caption, this.plot, this.at);
    if (told.note) this.figure.append(element("p", told.note, "note"));
    this.figure.append(this.values);
    this.values.addEventListener("toggle", () => this.showValues());
    this.plot.addEventListener("keydown", (event) => this.read(event));
  }

  take(run, source, series) {
    for (const one of series) {
      const key = JSON.stringify([run, one.name]);
      if (!this.series.has(key)) {
        if (!one.points.some((point) => point[1] !== null)) continue;
        this.series.set(key, { run, source, name: one.name, joined: one.joined, points: new Map() });
      }
      const { points } = this.series.get(key);
      for (const [x, value, error] of one.points) points.set(x, [value, error]);
    }
  }

  // Without `after` all points, else those behind it.
  forget(run, source, after) {
    for (const [key, one] of this.series) {
      if (one.run !== run || (source && one.source !== source)) continue;
      for (const x of one.points.keys()) if (!after || x > after[this.told.x]) one.points.delete(x);
      if (!one.points.size) this.series.delete(key);
    }
  }

  // [x, values of each series...], with null where a curve has a gap and undefined where it goes on.
  data() {
    const found = [...this.series.values()];
    const xs = [...new Set(found.flatMap((one) => [...one.points.keys()]))].sort((a, b) => a - b);
    return [xs, ...found.map((one) => xs.map((x) => one.points.get(x)?.[0] ?? (one.joined ? undefined : null)))];
  }

  draw() {
    const found = [...this.series.values()];
    this.figure.hidden = !found.length;
    if (!found.length) return;
    this.shown = this.data();
    const data = this.told.layered ? shares(this.shown) : this.shown;
    this.isLog = needsLog(this.told, data);
    this.title.textContent = this.told.title + (this.isLog ? ", log axis" : "");
    const names = [...this.series.keys()].join() + this.isLog + this.plot.clientWidth + colour("--ink");
    if (names !== this.names) {
      this.names = names;
      this.drawn?.destroy();
      this.drawn = new uPlot(this.options(found), data, this.plot);
      this.showLegend(found);
    } else {
      this.drawn.setData(data, false);
    }
    this.setRange(this.charts.range);
    this.tell(null);
    if (this.values.open) this.showValues();
  }

  setRange(range) {
    const xs = this.shown?.[0];
    if (!this.drawn || !xs?.length) return;
    const zoomed = this.told.x === "step" && range;
    const [low, high] = zoomed ? [range.low ?? xs[0], range.high ?? xs[xs.length - 1]] : [xs[0], xs[xs.length - 1]];
    this.drawn.setScale("x", high > low ? { min: low, max: high } : { min: low - 1, max: low + 1 });
  }

  options(found) {
    const { told } = this;
    const axis = { stroke: colour("--soft"), grid: { stroke: colour("--rule"), width: 1 }, ticks: { show: false } };
    const bars = told.layered ? uPlot.paths.bars({ size: [0.92] }) : undefined;
    const line = uPlot.paths.linear();
    const order = found.map((one, at) => ({
      label: one.name,
      stroke: colour("--series-" + (at % 8)),
      fill: told.layered ? colour("--series-" + (at % 8)) : undefined,
      width: told.layered ? 0 : 2,
      dash: DASHES[at % 8],
      spanGaps: one.joined,
      paths: bars ?? ((plot, index, ...rest) => few(plot.data[index], one.joined, 2) ? null : line(plot, index, ...rest)),
      points: told.layered ? { show: false } : { size: 6, show: (plot, index) => few(plot.data[index], one.joined, 24) },
    }));
    const bounds = (plot, min, max) => {
      const error = Math.max(0, ...found.flatMap((one) => [...one.points.values()].map((point) => point[1] ?? 0)));
      const [low, high] = uPlot.rangeNum((min ?? 0) - error, ((min || max) ? max : 1) + error, 0.1, true);
      const [bottom, top] = told.layered ? [0, 1] : [told.low ?? low, told.high ?? high];
      return [bottom, top > bottom ? top : bottom + 1];
    };
    return {
      width: Math.max(200, this.plot.clientWidth),
      height: HEIGHT,
      legend: { show: false },
      scales: { x: { time: false }, y: this.isLog ? { distr: 3 } : { range: bounds } },
      axes: [
        { ...axis, size: 26, gap: 4, label: told.x, labelSize: 16, labelGap: 0, labelFont: "12px system-ui" },
        { ...axis, size: 52, values: (_, ticks) => ticks.map((tick) => (told.layered ? 100 * tick + " %" : tick === null ? "" : shortNumber(tick))) },
      ],
      cursor: {
        drag: { x: told.x === "step", y: false, setScale: false },
        sync: told.x === "step" ? { key: "steps" } : undefined,
        y: false,
      },
      series: [{}, ...order],
      hooks: {
        setCursor: [(plot) => this.tell(plot.cursor.idx)],
        setSelect: [(plot) => this.select(plot)],
        draw: [(plot) => this.whiskers(plot, found)],
      },
    };
  }

  select(plot) {
    const { left, width } = plot.select;
    if (width < 4) return;
    const low = Math.floor(plot.posToVal(left, "x")), high = Math.ceil(plot.posToVal(left + width, "x"));
    plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    this.charts.zoom({ low, high });
  }

  whiskers(plot, found) {
    const context = plot.ctx, { left, top, width, height } = plot.bbox;
    context.save();
    context.beginPath();
    context.rect(left - 2, top, width + 4, height);
    context.clip();
    found.forEach((one, at) => {
      context.strokeStyle = colour("--series-" + (at % 8));
      context.lineWidth = 1.5 * devicePixelRatio;
      for (const [x, [value, error]] of one.points) {
        if (!error || value === null) continue;
        const pixel = plot.valToPos(x, "x", true);
        context.beginPath();
        context.moveTo(pixel, plot.valToPos(value - error, "y", true));
        context.lineTo(pixel, plot.valToPos(value + error, "y", true));
        context.stroke();
      }
    });
    context.restore();
  }

  showLegend(found) {
    const several = new Set(found.map((one) => one.run)).size > 1;
    this.told_values = found.map((one, at) => {
      const item = element("li");
      const mark = document.createElementNS("http://www.w3.org/2000/svg", "svg");
      mark.setAttribute("viewBox", "0 0 22 10");
      mark.setAttribute("aria-hidden", "true");
      const line = document.createElementNS("http://www.w3.org/2000/svg", this.told.layered ? "rect" : "line");
      const sides = this.told.layered ? { x: 6, width: 10, height: 10 } : { x1: 0, x2: 22, y1: 5, y2: 5 };
      for (const [name, value] of Object.entries(sides)) line.setAttribute(name, value);
      line.setAttribute("class", (this.told.layered ? "fill-" : "line-") + (at % 8));
      mark.append(line);
      const value = element("b");
      item.append(mark, (several ? one.run + ": " : "") + one.name, value);
      return { item, value };
    });
    this.legend.replaceChildren(...this.told_values.map(({ item }) => item));
  }

  text(one, x) {
    const [value, error] = one.points.get(x) ?? [null];
    return withError(value, error) + (value === null ? "" : this.told.unit);
  }

  // The values at a point; without one those of the last point of each series.
  tell(index) {
    const x = index === null || index === undefined ? null : this.shown[0][index];
    [...this.series.values()].forEach((one, at) => {
      const last = x === null ? [...one.points.keys()].reduce((a, b) => Math.max(a, b)) : x;
      if (this.told_values[at]) this.told_values[at].value.textContent = this.text(one, last);
    });
    this.at.textContent = x === null ? "" : "at " + this.told.x + " " + x;
  }

  read(event) {
    const last = this.shown[0].length - 1, now = this.drawn.cursor.idx;
    const moves = { ArrowRight: (now ?? -1) + 1, ArrowLeft: (now ?? last + 1) - 1, Home: 0, End: last };
    if (event.key === "Escape") this.charts.zoom(null);
    if (!(event.key in moves)) return;
    event.preventDefault();
    const index = Math.min(Math.max(moves[event.key], 0), last);
    this.drawn.setCursor({ left: this.drawn.valToPos(this.shown[0][index], "x"), top: 10 });
    this.tell(index);
  }

  showValues() {
    if (!this.values.open) return;
    const found = [...this.series.values()];
    const several = new Set(found.map((one) => one.run)).size > 1;
    const table = element("table");
    const names = found.map((one) => (several ? one.run + ": " : "") + one.name);
    table.createTHead().append(row("col", [this.told.x, ...names]));
    const xs = this.shown[0].slice(-MOST_ROWS);
    table.createTBody().append(...xs.map((x) => row("row", [x], found.map((one) => this.text(one, x)))));
    this.values.lastChild.replaceChildren(table);
  }
}

// Whether a line has one value, or a joined one at most `most`: then they are dots.
function few(values, joined, most) {
  return values.filter((value) => value !== null && value !== undefined).length <= (joined ? most : 1);
}

// As Chart.is_logarithmic (report/charts.py): whether an outlier would flatten the curves.
function needsLog({ layered, high }, [, ...values]) {
  const there = values.flat().filter((value) => value !== null && value !== undefined).sort((a, b) => a - b);
  const middle = there[there.length >> 1];
  return !layered && high === null && middle > 0 && middle < 1000 * there[0] && there[there.length - 1] > 10 * middle;
}

// Each value and those below it as a share of the sum at that x. The first series is on top, so it is drawn first.
function shares([xs, ...values]) {
  const sums = xs.map((_, at) => values.reduce((sum, one) => sum + Math.max(0, one[at] ?? 0), 0) || 1);
  const share = (index, at) => values.slice(index).reduce((sum, one) => sum + Math.max(0, one[at] ?? 0), 0) / sums[at];
  return [xs, ...values.map((_, index) => xs.map((_, at) => share(index, at)))];
}

export class Charts {
  constructor(place, zoomed) {
    this.place = place;
    this.zoomed = zoomed;
    this.range = null;
    this.byTitle = new Map();
    this.due = false;
    new ResizeObserver(() => this.redraw()).observe(place);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.redraw());
    place.addEventListener("dblclick", () => this.zoom(null));
  }

  // `source` says what the points come from. They replace all of that source, or those behind `after`.
  take(run, source, charts, after) {
    this.forget(run, source, after);
    for (const told of charts) {
      if (!this.byTitle.has(told.title)) {
        this.place.querySelector(".empty")?.remove();
        const chart = new Chart(told, this);
        this.byTitle.set(told.title, chart);
        const after = [...this.byTitle.values()].filter((one) => one.told.place > told.place)
          .sort((a, b) => a.told.place - b.told.place)[0];
        this.place.insertBefore(chart.figure, after ? after.figure : null);
      }
      this.byTitle.get(told.title).take(run, source, told.series);
    }
    this.redraw();
  }

  forget(run, source, after) {
    for (const chart of this.byTitle.values()) chart.forget(run, source, after);
    this.redraw();
  }

  zoom(range) {
    this.range = range && (range.low !== null || range.high !== null) ? range : null;
    for (const chart of this.byTitle.values()) chart.setRange(this.range);
    this.zoomed(this.range);
  }

  // Once for all points that come together.
  redraw() {
    if (this.due) return;
    this.due = true;
    requestAnimationFrame(() => {
      this.due = false;
      for (const chart of this.byTitle.values()) chart.draw();
    });
  }
}
