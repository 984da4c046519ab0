// Markdown as elements. marked parses it, and all of its HTML passes DOMPurify. HTML that a model writes stays text.

import {element} from "./dom.js";
import {highlight} from "./highlight.js";
import {Marked, Tokenizer} from "./vendor/marked.esm.js";
import DOMPurify from "./vendor/purify.es.mjs";

const DEEPEST = 6; // quotes and lists in each other; marked calls itself for each
const LONGEST_EMPHASIS = 4000; // characters of a paragraph; marked's time for emphasis is quadratic in it

const TAGS = "a blockquote br code del em h2 h3 h4 h5 h6 hr li ol p pre strong table tbody td th thead tr ul";

DOMPurify.setConfig({
  ALLOWED_TAGS: TAGS.split(" "),
  ALLOWED_ATTR: ["align", "class", "href", "start"],
  ADD_URI_SAFE_ATTR: ["align", "start"],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  ALLOW_ARIA_ATTR: false,
  ALLOW_DATA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
});

let depth = 0;

/** marked's tokenizer of a quote or list, which leaves those that are too deep to be text. */
function nested(name) {
  return function tokenize(source) {
    if (depth >= DEEPEST) return undefined;
    depth += 1;
    try {
      return Tokenizer.prototype[name].call(this, source);
    } finally {
      depth -= 1;
    }
  };
}

/** false: marked's own tokenizer does it; undefined: it is text. */
const unlessLong = (source, masked) => (masked.length > LONGEST_EMPHASIS ? undefined : false);

const markdown = new Marked({
  gfm: true,
  breaks: true,
  tokenizer: {
    blockquote: nested("blockquote"),
    list: nested("list"),
    emStrong: unlessLong,
    del: unlessLong,
    html: () => undefined,
    tag: () => undefined,
  },
  renderer: {
    heading(token) {
      const level = Math.min(token.depth + 1, 6); // h1 is the page's
      return `<h${level}>${this.parser.parseInline(token.tokens)}</h${level}>`;
    },
    image({href, text}) { // as a link: the page loads nothing from other hosts
      return this.link({href, title: null, tokens: [{type: "text", raw: text, text}]});
    },
    checkbox: ({checked}) => (checked ? "☑ " : "☐ "),
  },
});

/**
 * Show `text` in `target`. Top-level blocks that are the same as before stay the same elements, so a stream costs
 * little per token and selections stay.
 */
export function showMarkdown(target, text) {
  const blocks = markdown.lexer(text).map((token) => markdown.parser([token])).filter((html) => html);
  blocks.forEach((html, index) => {
    const old = target.children[index];
    if (old?.html === html) return;
    const made = block(html);
    made.html = html;
    if (old) old.replaceWith(made);
    else target.append(made);
  });
  while (target.children.length > blocks.length) target.lastChild.remove();
}

/** The element of a top-level block. */
function block(html) {
  const holder = element("div", {}, DOMPurify.sanitize(html));
  for (const link of holder.querySelectorAll("a[href]")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer";
  }
  for (const code of holder.querySelectorAll("pre")) frame(code, codeFrame(code));
  for (const table of holder.querySelectorAll("table")) frame(table, element("div", {class: "wide-table", tabindex: "0"}));
  return holder.childElementCount === 1 ? holder.firstElementChild : holder;
}

function frame(content, around) {
  content.replaceWith(around);
  around.append(content);
}

/** A figure for code, with its language and a button that copies it. */
function codeFrame(pre) {
  const language = pre.firstElementChild.className.replace(/^language-/, "");
  const text = pre.textContent.replace(/\n$/, "");
  highlight(pre.firstElementChild, language);
  pre.tabIndex = 0;
  return element("figure", {class: "code"},
    element("figcaption", {}, element("span", {}, language), copyButton(() => text)));
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
