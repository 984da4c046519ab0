// A table whose rows stay the same elements from one second to the next.

import {element, say} from "./dom.js";

/**
 * Columns are {title, kind, make, show}: `make()` builds what a cell holds, and `show(made, item)` fills it in.
 * Where rows become cards, each cell says its column's title.
 */
export class Table {
  constructor(table, caption, columns, nothing) {
    this.columns = columns;
    this.rows = new Map();
    this.body = element("tbody", {role: "rowgroup"});
    const span = {colspan: columns.length, role: "cell"};
    this.nothing = element("tr", {class: "nothing", role: "row"}, element("td", span, nothing));
    const titles = columns.map(({title, kind = "text"}) =>
      element("th", {scope: "col", role: "columnheader", class: kind}, title));
    table.setAttribute("role", "table"); // a table of cards is none to some browsers
    table.append(
      element("caption", {class: "unseen"}, caption),
      element("thead", {role: "rowgroup"}, element("tr", {role: "row"}, ...titles)),
      this.body,
    );
  }

  /** `items` are [key, item] in the order of rows; `kind(item)` is a class of the row. */
  show(items, kind = () => "") {
    const rows = items.map(([key, item]) => {
      const row = this.rows.get(key) ?? this.#add(key);
      this.columns.forEach(({show}, index) => show(row.made[index], item));
      row.element.className = kind(item);
      return row.element;
    });
    const kept = new Set(items.map(([key]) => key));
    for (const key of [...this.rows.keys()]) if (!kept.has(key)) this.rows.delete(key);
    this.#arrange(rows.length ? rows : [this.nothing]);
  }

  #add(key) {
    const made = this.columns.map(({make}) => make());
    const cells = this.columns.map(({title, kind = "text"}, index) =>
      element(index ? "td" : "th",
        {class: kind, "data-title": title, role: index ? "cell" : "rowheader", ...(index ? {} : {scope: "row"})},
        made[index]));
    const row = {element: element("tr", {role: "row"}, ...cells), made};
    this.rows.set(key, row);
    return row;
  }

  #arrange(rows) {
    const now = [...this.body.children];
    if (now.length !== rows.length || now.some((row, index) => row !== rows[index])) this.body.replaceChildren(...rows);
  }
}

/** A column of text: what `text(item)` says, and in a second line `more(item)`. */
export function column(title, text, more = () => "") {
  return {
    title,
    kind: "number",
    make: () => element("div", {}, element("b"), element("small")),
    show(made, item) {
      say(made.firstChild, text(item));
      say(made.lastChild, more(item));
    },
  };
}
