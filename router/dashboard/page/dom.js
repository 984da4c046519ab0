// The few things this page does to its document. Text goes in as text only: names come from nodes.

const SVG = "http://www.w3.org/2000/svg";

export const find = (id) => document.getElementById(id);

/** element("td", {class: "number"}, child or text, …) */
export function element(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

export function drawing(name, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, name), attributes, children);
}

function fill(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

/** Show a link to another page of this router if it has that page. */
export async function offer(link) {
  const response = await fetch(link.href, {method: "HEAD"}).catch(() => null);
  link.hidden = !response?.ok;
}

/** Leaves alone what is so already: selections stay, and screen readers have nothing to tell. */
export function say(target, text) {
  if (target.textContent !== text) target.textContent = text;
}

export function set(target, name, value) {
  if (target.getAttribute(name) !== value) target.setAttribute(name, value);
}

export function icon(name) {
  return drawing("svg", {"aria-hidden": "true"}, drawing("use", {href: `#icon-${name}`}));
}

/** A mark with a shape and a word: of a node, or of the way to the router. */
export function mark(target, kind, text) {
  set(target, "class", `state ${kind}`);
  set(target.querySelector("use"), "href", `#icon-${kind}`);
  say(target.querySelector("span"), text);
}

export function newMark() {
  return element("span", {class: "state"}, icon("coming"), element("span"));
}

let announced = "";

/** For screen readers: changes of state, and nothing that changes each second. */
export function announce(text) {
  if (text !== announced) find("announcements").textContent = announced = text;
}
