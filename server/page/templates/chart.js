// One curve as SVG, drawn anew for the width that there is, so that its text keeps its size.
import {element, say} from "./tables.js";

const SVG = "http://www.w3.org/2000/svg", LEFT = 46, RIGHT = 10, TOP = 8, BOTTOM = 20;

function shape(name, attributes, parent) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  parent?.append(made);
  return made;
}

// Round numbers between low and high, at most `most` of them.
export function ticks(low, high, most) {
  const raw = (high - low) / most || 1, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map(each => each * power).find(each => each >= raw) ?? raw;
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-9 && found.length < 20; at += step)
    found.push(Math.abs(at) < step / 1e6 ? 0 : at);
  return found;
}

export function short(value) {
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e5)) return value.toExponential(1);
  return String(Number(value.toPrecision(4)));
}

export class Chart {
  constructor(parent, title, format, zero = false) {
    this.zero = zero;
    this.format = format;
    this.points = [];
    this.name = element("span", {text: title});
    this.told = element("span");
    this.svg = shape("svg", {role: "img"});
    this.figure = element("figure", {}, element("figcaption", {}, this.name, this.told), this.svg);
    parent.append(this.figure);
    this.axes = shape("g", {}, this.svg);
    this.curve = shape("path", {class: "curve"}, this.svg);
    this.line = shape("line", {class: "at", visibility: "hidden"}, this.svg);
    this.dot = shape("circle", {class: "dot", r: 3.2, visibility: "hidden"}, this.svg);
    new ResizeObserver(() => this.draw()).observe(this.svg);
    this.svg.addEventListener("pointermove", event => this.point(event));
    this.svg.addEventListener("pointerdown", event => this.point(event));
    this.svg.addEventListener("pointerleave", () => { this.over = undefined; this.mark(); });
  }

  // points: [round, value], by round; rounds: how many there are to be.
  show(title, points, rounds) {
    say(this.name, title);
    this.figure.hidden = !points.length;
    this.points = points;
    this.rounds = rounds;
    this.draw();
  }

  draw() {
    const {width, height} = this.svg.getBoundingClientRect();
    if (!this.points.length || !width) return;
    const rounds = this.points.map(point => point[0]), values = this.points.map(point => point[1]);
    // Of many points those that a screen can show.
    const step = Math.ceil(this.points.length / (2 * width));
    let low = values.reduce((a, b) => Math.min(a, b)), high = values.reduce((a, b) => Math.max(a, b));
    if (this.zero) low = Math.min(low, 0);
    if (low === high) [low, high] = [low - Math.abs(low) / 10 - 1e-9, high + Math.abs(high) / 10 + 1e-9];
    const first = Math.min(1, rounds[0]), last = Math.max(this.rounds || 0, rounds.at(-1), first + 1);
    this.x = round => LEFT + (round - first) / (last - first) * (width - LEFT - RIGHT);
    this.y = value => height - BOTTOM - (value - low) / (high - low) * (height - TOP - BOTTOM);
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    const axes = [];
    for (const at of ticks(low, high, height / 38)) {
      const y = this.y(at).toFixed(1), text = shape("text", {x: LEFT - 6, y: Number(y) + 4, "text-anchor": "end"});
      text.textContent = short(at);
      axes.push(shape("line", {class: "grid", x1: LEFT, x2: width - RIGHT, y1: y, y2: y}), text);
    }
    for (const at of ticks(first, last, Math.max(2, width / 90)).filter(Number.isInteger)) {
      const text = shape("text", {x: this.x(at), y: height - 5, "text-anchor": at === last ? "end" : "middle"});
      text.textContent = String(at);
      axes.push(text);
    }
    this.axes.replaceChildren(...axes);
    const drawn = this.points.filter((_, index) => index % step === 0 || index === this.points.length - 1);
    this.curve.setAttribute("d", drawn.map(([round, value], index) =>
      `${index ? "L" : "M"}${this.x(round).toFixed(1)} ${this.y(value).toFixed(1)}`).join(""));
    this.mark();
  }

  point(event) {
    const box = this.svg.getBoundingClientRect(), x = event.clientX - box.left;
    if (!this.x) return;
    this.over = this.points.reduce((best, point) =>
      Math.abs(this.x(point[0]) - x) < Math.abs(this.x(best[0]) - x) ? point : best, this.points[0]);
    this.mark();
  }

  mark() {
    const point = this.over ?? this.points.at(-1);
    if (!point || !this.x) return;
    const [round, value] = point, [x, y] = [this.x(round), this.y(value)];
    this.dot.setAttribute("cx", x); this.dot.setAttribute("cy", y);
    this.dot.setAttribute("visibility", "visible");
    for (const [key, at] of [["x1", x], ["x2", x], ["y1", TOP], ["y2", this.svg.clientHeight - BOTTOM]])
      this.line.setAttribute(key, at);
    this.line.setAttribute("visibility", this.over ? "visible" : "hidden");
    say(this.told, `${this.format(value)} in round ${round}`);
    this.svg.setAttribute("aria-label", `${this.name.textContent}, ${this.told.textContent}`);
  }
}
