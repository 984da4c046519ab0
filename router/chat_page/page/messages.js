// The elements of a conversation's messages, and an editor for those that were sent.

import {element, say} from "./dom.js";
import {count, rate, seconds} from "./format.js";
import {copyButton, showMarkdown} from "./markdown.js";

/** An element for a message; `show` again after each change of it. */
export class MessageView {
  /** `onRetry()` and `onEdit(text)`: the user wants another answer to the message as it is, or with this text. */
  constructor(message, onRetry, onEdit) {
    this.message = message;
    this.onEdit = onEdit;
    this.text = element("div", {class: "text"});
    this.pictures = element("div", {class: "pictures"});
    this.reasoning = element("div", {class: "text"});
    this.thoughts = element("details", {class: "thoughts"}, element("summary", {}, "Reasoning"), this.reasoning);
    this.error = element("p", {class: "trouble", role: "alert"});
    this.served = element("p", {class: "served quiet"});
    this.retry = element("button", {type: "button", class: "small"}, "Try again");
    this.retry.addEventListener("click", onRetry);
    this.edit = element("button", {type: "button", class: "small"}, "Edit");
    this.edit.addEventListener("click", () => this.openEditor());
    const own = message.role === "user" ? this.edit : this.retry;
    this.tools = element("p", {class: "tools"}, copyButton(() => message.content), own);
    const name = message.role === "user" ? "You" : "Model";
    this.element = element("li", {class: `message ${message.role}`},
      element("h2", {class: "unseen"}, name), this.thoughts, this.pictures, this.text, this.error, this.served, this.tools);
  }

  /** `state`: "running", "last" (can be tried again) or "". */
  show(state = "") {
    const {role, content, images, reasoning, stats, error} = this.message;
    if (role === "user") say(this.text, content);
    else showMarkdown(this.text, content);
    this.text.hidden = Boolean(images?.length) && !content;
    this.pictures.hidden = !images?.length;
    if (images && !this.pictures.childElementCount) this.pictures.append(...images.map(picture));
    this.thoughts.hidden = !reasoning;
    if (reasoning) showMarkdown(this.reasoning, reasoning);
    this.element.classList.toggle("running", state === "running");
    this.error.hidden = !error;
    say(this.error, error ?? "");
    this.served.hidden = !stats;
    if (stats) this.served.replaceChildren(...served(stats));
    this.tools.hidden = state === "running";
    this.retry.hidden = state !== "last";
  }

  /** Have the user change a sent message, in its place. */
  openEditor() {
    const entry = element("textarea", {rows: "3", "aria-label": "Change the message"});
    entry.value = this.message.content;
    const cancel = element("button", {type: "button", class: "small"}, "Cancel");
    const note = element("small", {class: "quiet"}, "What came after it is dropped.");
    const row = element("div", {class: "tools"}, element("button", {class: "small"}, "Send"), cancel, note);
    const editor = element("form", {class: "editor"}, entry, row);
    const close = () => {
      editor.replaceWith(this.text);
      this.tools.hidden = false;
      this.edit.focus();
    };
    editor.addEventListener("submit", (event) => {
      event.preventDefault();
      if (entry.value.trim() || this.message.images) this.onEdit(entry.value);
    });
    editor.addEventListener("keydown", (event) => {
      if (event.key === "Escape") close();
      else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        editor.requestSubmit();
      }
    });
    cancel.addEventListener("click", close);
    this.tools.hidden = true;
    this.text.replaceWith(editor);
    entry.focus();
  }
}

/** `url` is unknown while the database is read, and "" if the image is not there any more. */
function picture({name, url, width, height}) {
  if (url) return element("img", {src: url, alt: name, title: `${count(width)} × ${count(height)}`, width, height});
  return element("span", {class: "quiet"}, url === "" ? `${name}: this image is not stored any more` : name);
}

/** How fast an answer was, and last the nodes that served it: their names may be long addresses. */
function served({prefillNode, decodeNode, ttft, tokenRate, outputTokens, promptTokens, cachedTokens, stopped}) {
  const parts = [];
  if (ttft !== null) parts.push(`first token ${seconds(ttft)}`);
  if (tokenRate !== null) parts.push(`${rate(tokenRate)} tokens/s`);
  if (outputTokens !== null) parts.push(`${count(outputTokens)} tokens`);
  if (promptTokens !== null) parts.push(`${count(cachedTokens)} of ${count(promptTokens)} prompt tokens cached`);
  if (stopped) parts.push(stopped);
  if (decodeNode) {
    const names = prefillNode ? `${prefillNode} → ${decodeNode}` : decodeNode;
    const title = prefillNode ? "prefill node → decode node" : "the decode node computed the prompt, too";
    parts.push(element("a", {href: "dashboard", title}, names));
  }
  return parts.flatMap((part, index) => (index ? [" · ", part] : [part]));
}
