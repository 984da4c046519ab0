// What is to be seen at a glance.

import {element, find, mark, newMark, say} from "./dom.js";
import {count, rate, seconds, secondsParts, UNKNOWN} from "./format.js";

function tile(name, number, unit, more, ill = false) {
  const box = find(`tile-${name}`);
  say(box.querySelector("b"), number);
  say(box.querySelector("i"), unit);
  say(box.querySelector(".more"), more || "\u00a0");
  box.classList.toggle("ill", ill);
}

const sum = (numbers) => Object.values(numbers).reduce((a, b) => a + b, 0);

function times(name, {p50, p99}, none = "none in a minute") {
  tile(name, ...secondsParts(p50), p50 === null ? none : `p99 ${seconds(p99)}`);
}

export function showTiles({nodes, traffic, handoffs}) {
  const others = new Map();
  for (const {state} of nodes) if (state !== "ready") others.set(state, (others.get(state) ?? 0) + 1);
  const ready = nodes.filter((node) => node.state === "ready").length;
  const trouble = [...others].map(([state, number]) => `${number} ${state}`).join(", ");
  tile("nodes", String(ready), `of ${nodes.length}`, trouble || (nodes.length ? "all well" : "none listed"), others.size > 0);
  tile("running", count(traffic.running), "requests", `${count(traffic.waiting)} waiting`);
  tile("requests", rate(traffic.request_rate), "req/s", `${count(sum(traffic.outcomes))} in a minute`);
  tile("tokens", rate(traffic.output_token_rate), "tok/s", `prompts ${rate(traffic.prompt_token_rate)}/s`);
  showFailures(traffic);
  times("ttft", traffic.ttft);
  times("itl", traffic.itl);
  if (handoffs === null) tile("handoff", UNKNOWN, "", "");
  else times("handoff", handoffs.exposed, `${count(handoffs.total)} so far`);
}

/** Those that are no client's fault count; in the last minute, by kind, all that have not ended well. */
function showFailures({failure_rate, outcomes}) {
  const kinds = Object.entries(outcomes).filter(([name]) => name !== "ok");
  const words = kinds.map(([name, number]) => `${count(number)} ${name.replace(/_(request_)?error$/, "").replace("_", " ")}`);
  tile("failures", rate(failure_rate), "req/s", words.join(", ") || "none in a minute", failure_rate > 0);
}

export function showModels(models) {
  const list = find("models");
  while (list.children.length < models.length) list.append(element("li", {}, newMark(), element("span", {class: "quiet"})));
  while (list.children.length > models.length) list.lastChild.remove();
  models.forEach((model, index) => {
    const [state, text] = list.children[index].children;
    mark(state, model.served ? "good" : "gone", model.name);
    const roles = {prefill: model.prefill, decode: model.decode, both: model.both};
    const shown = Object.keys(roles).filter((role) => roles[role] || (role !== "both" && !model.both));
    const nodes = shown.map((role) => `${model[`${role}_ready`]} of ${roles[role]} ${role}`).join(", ");
    say(text, model.served ? nodes : `not served: ${nodes}`);
  });
}
