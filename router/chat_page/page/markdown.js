// Markdown as elements. Text of a model only ever becomes text nodes, and links lead to http, https and mailto only.

import {element} from "./dom.js";
import {inline} from "./inline.js";

const DEEPEST = 6; // quotes and lists in each other
const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^\s`]*)/;
const HEADING = /^ {0,3}(#{1,6})(?:\s+(.*))?$/;
const ITEM = /^( {0,12})([-*+]|\d{1,9}[.)])(?: +|$)/;
const QUOTE = /^ {0,3}> ?/;

/**
 * Show `text` in `target`. Top-level blocks that are the same as before stay the same elements, so a stream costs
 * little per token and selections stay.
 */
export function showMarkdown(target, text) {
  const blocks = split(text.split("\n"));
  blocks.forEach((lines, index) => {
    const source = lines.join("\n");
    const old = target.children[index];
    if (old?.markdown === source) return;
    const made = block(lines, 0);
    made.markdown = source;
    if (old) old.replaceWith(made);
    else target.append(made);
  });
  while (target.children.length > blocks.length) target.lastChild.remove();
}

const isRule = (line) => /^(-{3,}|\*{3,}|_{3,})$/.test(line.replaceAll(" ", ""));
const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());
const isDivider = (line) => line?.includes("-") && line.includes("|") && cells(line).every((cell) => /^:?-+:?$/.test(cell));
const isTable = (lines, at) => lines[at].includes("|") && isDivider(lines[at + 1]);
const indent = (line) => line.length - line.trimStart().length;

function begins(lines, at) {
  const line = lines[at];
  return FENCE.test(line) || HEADING.test(line) || QUOTE.test(line) || ITEM.test(line) || isRule(line) || isTable(lines, at);
}

/** Cut lines into blocks. */
function split(lines) {
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const end = endOf(lines, at);
    blocks.push(lines.slice(at, end));
    at = end;
  }
  return blocks;
}

/** The line after the block that begins at `at`. */
function endOf(lines, at) {
  const line = lines[at];
  const fence = line.match(FENCE);
  let end = at + 1;
  if (fence) {
    while (end < lines.length && !closes(lines[end], fence[1])) end += 1;
    return Math.min(end + 1, lines.length);
  }
  if (HEADING.test(line) || isRule(line)) return end;
  if (isTable(lines, at)) {
    while (end < lines.length && lines[end].includes("|")) end += 1;
  } else if (QUOTE.test(line)) {
    while (end < lines.length && QUOTE.test(lines[end])) end += 1;
  } else if (ITEM.test(line)) {
    return endOfList(lines, at);
  } else {
    while (end < lines.length && lines[end].trim() && !begins(lines, end)) end += 1;
  }
  return end;
}

const closes = (line, fence) => line.trim().length >= fence.length && line.trim() === fence[0].repeat(line.trim().length);

/** A list goes on with items, indented lines, and lines that follow one without a blank between. */
function endOfList(lines, at) {
  const ordered = isOrdered(lines[at]);
  let blank = false, end = at + 1;
  for (let next = end; next < lines.length; next += 1) {
    const line = lines[next];
    if (!line.trim()) {
      blank = true;
      continue;
    }
    const same = ITEM.test(line) && !isRule(line) && (indent(line) > 1 || isOrdered(line) === ordered);
    if (!same && indent(line) < 2 && (blank || begins(lines, next))) break;
    blank = false;
    end = next + 1;
  }
  return end;
}

const isOrdered = (line) => /\d/.test(line.match(ITEM)[2]);

function block(lines, depth) {
  const [line] = lines;
  const fence = line.match(FENCE);
  if (fence) return code(lines, fence);
  const heading = line.match(HEADING);
  if (heading) return element(`h${Math.min(heading[1].length + 1, 6)}`, {}, ...inline(heading[2] ?? ""));
  if (isRule(line)) return element("hr");
  if (isTable(lines, 0)) return table(lines);
  if (depth < DEEPEST && QUOTE.test(line)) {
    return element("blockquote", {}, ...inner(lines.map((each) => each.replace(QUOTE, "")), depth));
  }
  if (depth < DEEPEST && ITEM.test(line)) return list(lines, depth);
  return element("p", {}, ...inline(lines.join("\n")));
}

const inner = (lines, depth) => split(lines).map((each) => block(each, depth + 1));

function list(lines, depth) {
  const items = [];
  const first = lines[0].match(ITEM);
  for (const line of lines) {
    const found = line.match(ITEM);
    if (found && found[1].length <= first[1].length + 1) items.push([line.slice(found[0].length)]);
    else items.at(-1).push(line.slice(Math.min(indent(line), first[0].length)));
  }
  const ordered = isOrdered(lines[0]);
  const attributes = ordered && parseInt(first[2], 10) !== 1 ? {start: parseInt(first[2], 10)} : {};
  return element(ordered ? "ol" : "ul", attributes, ...items.map((item) => {
    const blocks = inner(item, depth);
    if (blocks[0]?.localName !== "p") return element("li", {}, ...blocks);
    return element("li", {}, ...blocks[0].childNodes, ...blocks.slice(1));
  }));
}

function code(lines, [, fence, language]) {
  const ended = lines.length > 1 && closes(lines.at(-1), fence);
  const text = lines.slice(1, ended ? -1 : undefined).join("\n");
  return element("figure", {class: "code"},
    element("figcaption", {}, element("span", {}, language), copyButton(() => text)),
    element("pre", {tabindex: "0"}, element("code", {}, text)));
}

function table(lines) {
  const [head, divider, ...rows] = lines.map(cells);
  const align = divider.map((cell) => (cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "right") : "left"));
  const row = (name, texts) => element("tr", {}, ...head.map((_, index) =>
    element(name, {class: align[index] ?? "left"}, ...inline(texts[index] ?? ""))));
  return element("div", {class: "wide-table", tabindex: "0"}, element("table", {},
    element("thead", {}, row("th", head)), element("tbody", {}, ...rows.map((texts) => row("td", texts)))));
}

/** Browsers give pages the clipboard over HTTPS and on localhost only. */
export function copyButton(text) {
  const button = element("button", {type: "button", class: "small"}, "Copy");
  button.hidden = !navigator.clipboard;
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(text());
    button.textContent = "Copied";
    setTimeout(() => (button.textContent = "Copy"), 1500);
  });
  return button;
}
