// Live charts as SVG. Each has its newest numbers as text beside it; the drawing is a picture with a name.

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 300, HEIGHT = 100, LEFT = 34, TOP = 8, BOTTOM = 88;
const NUM_SAMPLES = 120;  // two minutes

function drawn(name, attributes, parent) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  parent.append(node);
  return node;
}

function element(name, className, parent) {
  const node = document.createElement(name);
  node.className = className;
  parent.append(node);
  return node;
}

export function shown(value) {
  if (value === null || value === undefined) return "–";
  return value >= 100 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : value.toFixed(2);
}

// 1, 2 or 5 times a power of ten, not below `value`
function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((top) => top >= value * 0.999999);
}

class Chart {
  constructor(parent, id, title, top) {
    const figure = element("figure", "", parent);
    figure.id = id;
    const caption = element("figcaption", "", figure);
    caption.id = `${id}-title`;
    caption.textContent = title;
    this.value = element("p", "value", figure);
    this.value.id = `${id}-value`;
    this.figure = figure;
    this.fixedTop = top;
    this.plot = drawn("svg", {
      class: "plot", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img",
      "aria-labelledby": caption.id, "aria-describedby": this.value.id,
    }, figure);
    drawn("path", {class: "axis", d: `M${LEFT} ${TOP}V${BOTTOM}H${WIDTH}`}, this.plot);
    this.topLabel = drawn("text", {class: "tick", x: LEFT - 4, y: TOP + 6, "text-anchor": "end"}, this.plot);
    drawn("text", {class: "tick", x: LEFT - 4, y: BOTTOM, "text-anchor": "end"}, this.plot).textContent = "0";
  }

  // Sets the scale by the largest of `values`; returns the height of a value.
  scale(values) {
    const top = this.fixedTop ?? roundUp(Math.max(...values, 0.001));
    this.topLabel.textContent = String(Number(top.toPrecision(3)));
    return (value) => (BOTTOM - (BOTTOM - TOP) * Math.min(value / top, 1)).toFixed(1);
  }
}

export class LineChart extends Chart {
  // `unit` follows every number; with names each sample has a number a name
  constructor(parent, id, title, {unit = "", top = null} = {}) {
    super(parent, id, title, top);
    this.unit = unit;
    this.lines = new Map();  // name -> {samples, path}
  }

  // `sample` maps names to numbers, or to null where there is none
  add(sample) {
    for (const name of Object.keys(sample)) if (!this.lines.has(name)) this.addLine(name);
    for (const [name, line] of this.lines) {
      line.samples.push(sample[name] ?? null);
      if (line.samples.length > NUM_SAMPLES) line.samples.shift();
    }
    this.draw();
  }

  addLine(name) {
    const className = `line line-${this.lines.size % 5}`;
    const longest = Math.max(0, ...[...this.lines.values()].map((line) => line.samples.length));
    this.lines.set(name, {samples: Array(longest).fill(null), path: drawn("path", {class: className}, this.plot)});
    if (!name) return;
    this.legend ??= element("ul", "legend", this.figure);
    const entry = element("li", "", this.legend);
    const key = drawn("svg", {viewBox: "0 0 24 10", "aria-hidden": "true"}, entry);
    drawn("path", {class: className, d: "M0 5H24"}, key);
    entry.append(name);
  }

  draw() {
    const all = [...this.lines.values()].flatMap((line) => line.samples.filter((value) => value !== null));
    const height = this.scale(all);
    const step = (WIDTH - LEFT) / (NUM_SAMPLES - 1);
    const parts = [];
    for (const [name, {samples, path}] of this.lines) {
      let d = "", pen = "M";
      samples.forEach((value, index) => {
        if (value === null) { pen = "M"; return; }
        const x = (WIDTH - (samples.length - 1 - index) * step).toFixed(1);
        d += `${pen}${x} ${height(value)}${pen === "M" ? "h.1" : ""}`;
        pen = "L";
      });
      path.setAttribute("d", d);
      parts.push(`${name ? name + " " : ""}${shown(samples.at(-1))}${this.unit}`);
    }
    const most = all.length && this.lines.size === 1 ? `; highest ${shown(Math.max(...all))}` : "";
    this.value.textContent = parts.join(", ") + most;
  }
}

export class BarChart extends Chart {
  constructor(parent, id, title) {
    super(parent, id, title, 100);
    this.bars = drawn("g", {}, this.plot);
  }

  // `shares` are percentages, of positions 1, 2, ...
  set(shares) {
    const height = this.scale(shares);
    const step = (WIDTH - LEFT) / Math.max(shares.length, 1);
    this.bars.replaceChildren();
    shares.forEach((share, index) => {
      const y = height(share), x = LEFT + index * step;
      drawn("rect", {class: "bar", x: x + step * 0.15, y, width: step * 0.7, height: BOTTOM - y}, this.bars);
      const label = {class: "tick", x: x + step / 2, y: HEIGHT - 1, "text-anchor": "middle"};
      drawn("text", label, this.bars).textContent = String(index + 1);
    });
    const parts = shares.map((share, index) => `position ${index + 1}: ${share.toFixed(0)} %`);
    this.value.textContent = parts.join(", ") || "nothing was drafted";
  }
}

const ratio = (part, whole) => (whole > 0 ? part / whole : null);

export class Dashboard {
  constructor(parent) {
    this.speed = new LineChart(parent, "speed", "Generated tokens a second");
    this.length = new LineChart(parent, "acceptance", "Acceptance length, tokens a verification");
    this.positions = new BarChart(parent, "positions", "Accepted at each draft position, last two minutes");
    this.cache = new LineChart(parent, "cache", "KV cache in use", {unit: " %", top: 100});
    this.queue = new LineChart(parent, "queue", "Requests");
    this.stages = new LineChart(parent, "stages", "Time of a step by stage", {unit: " ms"});
    this.samples = [];
  }

  // `data` is an answer of /dashboard/data with `stats`
  add(data) {
    const {stats, time} = data, last = this.samples.at(-1);
    if (last && stats.num_steps < last.stats.num_steps) this.samples = [];  // another engine
    this.samples.push({stats, time});
    if (this.samples.length > NUM_SAMPLES) this.samples.shift();
    this.cache.add({"": stats.kv_cache_usage * 100});
    this.queue.add({running: stats.num_running, waiting: stats.num_waiting});
    if (this.samples.length > 1) this.addRates(this.samples.at(-2), this.samples.at(-1));
  }

  addRates(before, now) {
    const since = (name) => now.stats[name] - before.stats[name];
    const accepted = ratio(since("num_accepted_tokens"), since("num_drafts"));
    this.speed.add({"": ratio(since("generation_tokens"), now.time - before.time)});
    this.length.add({"": accepted === null ? null : 1 + accepted});
    const stages = Object.entries(now.stats.step_seconds).map(([stage, seconds]) =>
      [stage, ratio(1000 * (seconds - (before.stats.step_seconds[stage] ?? 0)), since("num_steps"))]);
    this.stages.add(Object.fromEntries(stages));
    const first = this.samples[0].stats, drafts = now.stats.num_drafts - first.num_drafts;
    const shares = now.stats.accepted_per_pos.map((count, position) =>
      100 * ratio(count - (first.accepted_per_pos[position] ?? 0), drafts));
    this.positions.set(drafts > 0 ? shares : []);
  }
}
