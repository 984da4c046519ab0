// Markdown inside a paragraph: code, emphasis, links. Linear in the length of the text.

import {element} from "./dom.js";

const DEEPEST = 6;
const [LONGEST_LABEL, LONGEST_URL] = [1000, 2000];
const MARKERS = [["**", "strong"], ["__", "strong"], ["~~", "del"], ["*", "em"], ["_", "em"]];
const SPECIAL = /[\\`*_~[\n]|!\[|https?:\/\//g;
const URL_HERE = /https?:\/\/[^\s<>"`]{1,2000}/y;

/** Text nodes and elements. */
export function inline(text, depth = 0) {
  return new Inline(text, depth).parts;
}

class Inline {
  constructor(text, depth) {
    Object.assign(this, {text, depth, parts: [], plain: "", unclosed: new Set()});
    let at = 0;
    while (at < text.length) {
      SPECIAL.lastIndex = at;
      const next = SPECIAL.exec(text)?.index ?? text.length;
      this.plain += text.slice(at, next);
      at = next < text.length ? this.#special(next) : next;
    }
    this.#add();
  }

  #add(...made) {
    if (this.plain) this.parts.push(this.plain);
    this.plain = "";
    this.parts.push(...made);
  }

  /** Handle the character at `at`, and return where to go on. */
  #special(at) {
    const {text} = this;
    const end = this.#line(at) ?? this.#code(at) ?? this.#link(at) ?? this.#url(at)
      ?? (this.depth < DEEPEST ? this.#emphasis(at) : null);
    if (end !== null) return end;
    this.plain += text[at];
    return at + 1;
  }

  #line(at) {
    const {text} = this;
    if (text[at] === "\n") {
      this.plain = this.plain.trimEnd();
      this.#add(element("br"));
      return at + 1;
    }
    if (text[at] !== "\\" || !/[!-/:-@[-`{-~]/.test(text[at + 1] ?? "")) return null;
    this.plain += text[at + 1];
    return at + 2;
  }

  #code(at) {
    const {text} = this;
    if (text[at] !== "`") return null;
    let run = at;
    while (text[run] === "`") run += 1;
    const ticks = text.slice(at, run);
    const close = this.#find(ticks, run, (end) => text[end - 1] !== "`" && text[end + ticks.length] !== "`");
    if (close === -1) {
      this.plain += ticks;
      return run;
    }
    this.#add(element("code", {}, text.slice(run, close).replace(/^ (.*) $/s, "$1")));
    return close + ticks.length;
  }

  #link(at) {
    const {text} = this;
    const image = text[at] === "!";
    const open = at + image;
    if (text[open] !== "[") return null;
    const label = text.slice(open + 1, open + 1 + LONGEST_LABEL);
    const close = label.indexOf("]");
    if (close === -1 || label[close + 1] !== "(") return null;
    const start = open + close + 3;
    const target = text.slice(start, start + LONGEST_URL).match(/^([^\s()]*(?:\([^\s()]*\)[^\s()]*)?)(?:\s+"[^"\n]*")?\)/);
    if (target === null) return null;
    const shown = this.depth < DEEPEST && !image ? inline(label.slice(0, close), this.depth + 1) : [label.slice(0, close)];
    this.#add(...anchor(target[1], shown));
    return start + target[0].length;
  }

  #url(at) {
    URL_HERE.lastIndex = at;
    const found = URL_HERE.exec(this.text)?.[0].replace(/[.,;:!?'*_~)\]]+$/, "");
    if (!found) return null;
    this.#add(...anchor(found, [found]));
    return at + found.length;
  }

  #emphasis(at) {
    const {text} = this;
    const found = MARKERS.find(([marker]) => text.startsWith(marker, at));
    if (!found) return null;
    const [marker, name] = found;
    const start = at + marker.length;
    const word = marker[0] === "_";
    if (/^\s?$/.test(text[start] ?? "") || (word && /\w/.test(text[at - 1] ?? ""))) return null;
    const close = this.#find(marker, start + 1, (end) => {
      const after = text[end + marker.length] ?? "";
      const before = text[end - 1];
      const longer = after === marker[0] || (marker.length === 1 && before === marker[0]);
      return !/\s/.test(before) && !longer && !(word && /\w/.test(after));
    });
    if (close === -1) return null;
    this.#add(element(name, {}, ...inline(text.slice(start, close), this.depth + 1)));
    return close + marker.length;
  }

  /** The next `marker` that `fits`. A marker without one is not looked for again, which keeps this linear. */
  #find(marker, from, fits) {
    if (this.unclosed.has(marker)) return -1;
    for (let at = this.text.indexOf(marker, from); at !== -1; at = this.text.indexOf(marker, at + 1)) {
      if (fits(at)) return at;
    }
    this.unclosed.add(marker);
    return -1;
  }
}

/** A link to another page; other schemes, such as javascript:, stay text. */
function anchor(url, shown) {
  let parsed;
  try {
    parsed = new URL(url);
  } catch {
    return shown;
  }
  if (!["http:", "https:", "mailto:"].includes(parsed.protocol)) return shown;
  return [element("a", {href: parsed.href, target: "_blank", rel: "noopener noreferrer"}, ...shown)];
}
