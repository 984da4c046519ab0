// The last minutes as lines. All charts show the same moment while one of them is pointed at.

import {drawing, element, find, say, set} from "./dom.js";
import {bytesPerSecond, count, percent, rate, seconds} from "./format.js";

const SPAN = 300; // seconds
const [WIDTH, HEIGHT] = [SPAN, 100]; // of a drawing, stretched to the room there is

const CHARTS = [
  {title: "Requests at the nodes", lines: {running: "running", waiting: "waiting"}, format: count},
  {title: "Requests per second", lines: {requests: "finished", failures: "failed"}, format: rate},
  {title: "Output tokens per second", lines: {output_tokens: "tokens/s"}, format: rate},
  {title: "Time to first token", lines: {ttft_p50: "p50", ttft_p99: "p99"}, format: seconds},
  {title: "Time to next token", lines: {itl_p50: "p50", itl_p99: "p99"}, format: seconds},
  {title: "Handoff time, P → D", lines: {handoff_p50: "p50", handoff_p99: "p99"}, format: seconds},
  {title: "KV read, P → D", lines: {kv_read_rate: "all nodes"}, format: bytesPerSecond},
  {title: "KV in use", lines: {kv_prefill: "prefill", kv_decode: "decode"}, kinds: ["prefill", "decode"], format: percent, top: 1},
];

/** The next of 1, 2, 5, 10, 20 … */
function rounded(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].find((step) => step * power >= value * 0.999) * power;
}

/** A path through the values that there are. */
function path(values, x, y) {
  let text = "", open = false;
  values.forEach((value, index) => {
    if (value === null) {
      open = false;
      return;
    }
    const point = `${x(index)} ${y(value).toFixed(2)}`;
    text += open ? `L${point}` : `M${point}h.01`; // a point alone is a dot
    open = true;
  });
  return text;
}

class Chart {
  constructor({title, lines, kinds = ["first", "second"], format, top}, point) {
    Object.assign(this, {title, format, top, names: Object.keys(lines)});
    this.values = {};
    this.topLabel = element("span", {class: "top"});
    this.cursor = drawing("path", {class: "cursor", d: ""});
    this.paths = this.names.map((_, index) => drawing("path", {class: `line line-${kinds[index]}`}));
    this.plot = drawing("svg", {viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true"},
      drawing("path", {class: "grid", d: `M0 0H${WIDTH}M0 ${HEIGHT / 2}H${WIDTH}M0 ${HEIGHT}H${WIDTH}`}),
      ...this.paths.toReversed(), this.cursor);
    const legend = this.names.map((name, index) => {
      this.values[name] = element("b");
      const sample = drawing("svg", {viewBox: "0 0 18 8", "aria-hidden": "true"}, drawing("path", {class: `line line-${kinds[index]}`, d: "M1 4H17"}));
      return element("span", {}, sample, `${lines[name]} `, this.values[name]);
    });
    this.field = element("div", {class: "plot", tabindex: "0", role: "img"}, this.topLabel, this.plot);
    this.element = element("figure", {class: "card"},
      element("figcaption", {}, element("h3", {}, title), element("p", {class: "legend"}, ...legend)),
      this.field,
      element("p", {class: "axis quiet", "aria-hidden": "true"}, element("span", {}, "5 min ago"), element("span", {}, "now")));
    this.#listen(point);
  }

  #listen(point) {
    const at = (event) => {
      const box = this.field.getBoundingClientRect();
      point(Math.round(SPAN * (1 - (event.clientX - box.left) / box.width)));
    };
    this.field.addEventListener("pointermove", at);
    this.field.addEventListener("pointerdown", at);
    this.field.addEventListener("pointerleave", () => point(null));
    this.field.addEventListener("blur", () => point(null));
    const steps = {ArrowLeft: 5, ArrowRight: -5, Home: SPAN, End: -SPAN};
    this.field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") point(null);
      else if (event.key in steps) point((pointed) => (pointed ?? 0) + steps[event.key]);
      else return;
      event.preventDefault();
    });
  }

  /** `pointed` is how many seconds ago the moment is that is asked for; null: now. */
  draw(history, pointed) {
    const all = history.seconds;
    const last = all.at(-1) ?? 0;
    const most = this.names.reduce((found, name) => history[name].reduce((a, b) => Math.max(a, b ?? 0), found), 0);
    const top = this.top ?? rounded(most);
    const x = (index) => WIDTH - (last - all[index]);
    const y = (value) => HEIGHT * (1 - Math.min(value, top) / top);
    this.names.forEach((name, index) => set(this.paths[index], "d", path(history[name], x, y)));
    say(this.topLabel, this.format(top).replace(".00", ""));
    set(this.cursor, "d", pointed === null ? "" : `M${WIDTH - pointed} 0V${HEIGHT}`);
    const index = pointed === null ? all.length - 1 : all.indexOf(last - pointed);
    const labels = this.names.map((name) => {
      const text = this.format(history[name][index]);
      say(this.values[name], text);
      return `${this.values[name].previousSibling.textContent.trim()} ${text}`;
    });
    const when = pointed ? `${pointed} s ago` : "now";
    set(this.field, "aria-label", `${this.title}, ${when}: ${labels.join(", ")}`);
  }
}

export class Charts {
  constructor() {
    this.pointed = null;
    this.charts = CHARTS.map((chart) => new Chart(chart, (where) => this.#point(where)));
    find("charts").append(...this.charts.map((chart) => chart.element));
    this.clear();
  }

  clear() {
    this.history = {seconds: []};
    for (const {lines} of CHARTS) for (const name of Object.keys(lines)) this.history[name] = [];
  }

  get second() {
    return this.history.seconds.at(-1) ?? -1;
  }

  /** Append history of the same router process. */
  add(more) {
    for (const name of Object.keys(this.history)) this.history[name].push(...more[name]);
    const old = this.history.seconds.findIndex((second) => second > this.second - SPAN);
    if (old > 0) for (const name of Object.keys(this.history)) this.history[name].splice(0, old);
    this.#draw();
  }

  #point(where) {
    const pointed = typeof where === "function" ? where(this.pointed) : where;
    this.pointed = pointed === null ? null : Math.min(SPAN - 1, Math.max(0, pointed));
    this.#draw();
  }

  #draw() {
    say(find("lines-when"), this.pointed ? `${this.pointed} s ago` : "");
    for (const chart of this.charts) chart.draw(this.history, this.pointed);
  }
}
