// Colours of code: comments, strings, numbers and the words that many languages reserve. A language only decides how
// comments begin; quotes behind & and < are Rust's lifetimes. Each pattern reads a character once, so long code takes linear time.

import {element} from "./dom.js";

const LONGEST = 100_000; // characters; longer code has no colours

const HASH = "python py ruby rb bash sh shell zsh fish yaml yml toml ini r perl makefile dockerfile elixir nix";
const SLASHES = "javascript js typescript ts jsx tsx java c h cpp c++ cc csharp cs go rust rs kotlin swift scala dart php css scss proto cuda";
const DASHES = "sql lua haskell hs";
const PLAIN = "json jsonc";

const COMMENTS = new Map([
  ...HASH.split(" ").map((name) => [name, "#[^\\n]*"]),
  ...SLASHES.split(" ").map((name) => [name, "//[^\\n]*|/\\*[^]*?(?:\\*/|$)"]),
  ...DASHES.split(" ").map((name) => [name, "--[^\\n]*"]),
  ...PLAIN.split(" ").map((name) => [name, "(?!)"]),
]);

const STRINGS = '"""[^]*?(?:"""|$)|\'\'\'[^]*?(?:\'\'\'|$)|"(?:\\\\.|[^"\\\\\\n])*"?|(?<![&<])\'(?:\\\\.|[^\'\\\\\\n])*\'?|`(?:\\\\[^]|[^`\\\\])*`?';
const NUMBERS = "\\b(?:0[xX][\\da-fA-F_]+|\\d[\\d_]*(?:\\.\\d+)?(?:[eE][+-]?\\d+)?)\\b";

const WORDS = new Set((
  "abstract and as assert async await begin bool boolean break byte case catch char class const constexpr continue def "
  + "default defer del delete do done double elif else elseif elsif end enum esac except export extends extern false "
  + "False fi final finally float fn for foreach from func function global go goto if impl implements import in include "
  + "instanceof int interface is lambda let local long loop match mod module move mut mutable namespace new nil None "
  + "nonlocal not null or override package pass private protected pub public raise range readonly ref return self short "
  + "signed sizeof static struct super switch template then this throw throws trait True true try type typedef typeof "
  + "undefined union unless unsigned until use using var virtual void volatile when where while with yield"
).split(" "));
const SQL = new Set((
  "add all alter and as asc between by case create cross delete desc distinct drop else end exists from full group "
  + "having in index inner insert into is join key left like limit not null offset on or order outer primary references "
  + "right select set table then union unique update values view when where with"
).split(" "));

/** Replace the text of `code` by parts of it, some of which have the class of their kind. */
export function highlight(code, language) {
  const comments = COMMENTS.get(language.toLowerCase());
  const text = code.textContent;
  if (comments === undefined || text.length > LONGEST) return;
  const parts = new RegExp(`(?<comment>${comments})|(?<string>${STRINGS})|(?<number>${NUMBERS})|(?<word>[A-Za-z_]\\w*)`, "g");
  const sql = language.toLowerCase() === "sql";
  const shown = [];
  let end = 0;
  for (const {0: part, index, groups} of text.matchAll(parts)) {
    const reserved = groups.word && (sql ? SQL.has(part.toLowerCase()) : WORDS.has(part));
    const kind = ["comment", "string", "number"].find((name) => groups[name]) ?? (reserved ? "reserved" : "");
    if (!kind) continue;
    shown.push(text.slice(end, index), element("span", {class: kind}, part));
    end = index + part.length;
  }
  if (shown.length) code.replaceChildren(...shown, text.slice(end));
}
