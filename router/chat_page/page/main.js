// The chat: conversations at the side, one of them in the middle, and at most one answer that runs.

import {Attachments} from "./attachments.js";
import {element, find, offer, say, set} from "./dom.js";
import {EXAMPLE, FOLLOW_UPS} from "./example.js";
import {putImages, removeOtherImages, restoreImages} from "./image_store.js";
import {MessageView} from "./messages.js";
import {load, newConversation, remove, save, titleOf} from "./store.js";
import {listModels, NeedsKey, setKey, streamChat} from "./stream.js";

const SETTINGS = ["system", "temperature", "top_p", "max_tokens"];
const LIMIT = 1024; // tokens of an answer, where the settings say nothing; the router's own limit is the context
const FINISHES = {length: "stopped at the limit of tokens, which Settings can raise"};
const EMBEDDED_MODEL = "tiny"; // its name, unless --served-model-name gives another one
const NEAR = 60; // pixels from the end within which the log follows an answer

let conversations = load();
let current = conversations[0] ?? newConversation();
let views = [];
let running = null; // {controller, conversation} of an answer
let models = []; // {name, sees}

const attachments = new Attachments(
  () => (model()?.sees === false ? `${model().name} reads text only; it takes no images.` : ""), follow);

// ---------------------------------------------------------------- what is shown

const model = () => models.find(({name}) => name === find("model").value);

function showAll() {
  const shown = current;
  restoreImages(shown).then((changed) => changed && shown === current && showAll());
  views = current.messages.map((message, index) => new MessageView(message, retry, (text) => edit(index, text)));
  find("log").replaceChildren(...views.map((view) => view.element));
  views.forEach((view, index) => view.show(index === views.length - 1 && !running ? "last" : ""));
  if (running?.conversation === current) views.at(-1)?.show("running");
  for (const name of SETTINGS) find(name).value = current.settings[name] ?? "";
  showState();
  showSide();
  find("scroll").scrollTop = find("scroll").scrollHeight;
}

function showState() {
  find("welcome").hidden = current.messages.length > 0;
  find("stop").hidden = !running;
  find("send").hidden = Boolean(running);
  showFollowUps();
  document.title = `${titleOf(current)} · pdserve`;
}

/** Offer questions below an answer about the example that are not asked yet. */
function showFollowUps() {
  const asked = current.messages.map(({content}) => content);
  const rest = asked[0] === EXAMPLE && !running ? FOLLOW_UPS.filter((question) => !asked.includes(question)) : [];
  follow(() => {
    find("follow-ups").hidden = !rest.length;
    find("questions").replaceChildren(...rest.map((question) => {
      const button = element("button", {type: "button", class: "small"}, question);
      button.addEventListener("click", () => submit(question));
      return button;
    }));
  });
}

function showModel() {
  find("toy").hidden = find("model").value !== EMBEDDED_MODEL;
  find("attach").hidden = !model()?.sees;
}

function showSide() {
  const shown = conversations.includes(current) ? conversations : [current, ...conversations];
  find("conversations").replaceChildren(...shown.map((conversation) => {
    const open = element("button", {class: "open"}, titleOf(conversation));
    if (conversation === current) set(open, "aria-current", "true");
    open.addEventListener("click", () => openConversation(conversation));
    const drop = element("button", {class: "drop", "aria-label": `Delete: ${titleOf(conversation)}`, title: "Delete"}, "×");
    drop.addEventListener("click", () => dropConversation(conversation));
    return element("li", {}, open, drop);
  }));
}

/** Change what is shown, and stay at the end of the log if that is in view. */
function follow(change) {
  const box = find("scroll");
  const atEnd = box.scrollHeight - box.scrollTop - box.clientHeight < NEAR;
  change();
  if (atEnd) box.scrollTop = box.scrollHeight;
}

// ---------------------------------------------------------------- conversations

function openConversation(conversation) {
  current = conversation;
  showAll();
  openSide(false);
  find("entry").focus();
}

function dropConversation(conversation) {
  if (running?.conversation === conversation) running.controller.abort();
  remove(conversation);
  conversations = conversations.filter((each) => each !== conversation);
  if (conversation === current) current = conversations[0] ?? newConversation();
  showAll();
}

function keep(conversation) {
  if (!conversation.messages.length) return;
  save(conversation);
  conversations = [conversation, ...conversations.filter((each) => each !== conversation)];
}

// ---------------------------------------------------------------- an answer

/** Messages to send: without exchanges that failed before the first token. */
function history({settings, messages}) {
  const sent = settings.system?.trim() ? [{role: "system", content: settings.system}] : [];
  messages.forEach(({role, content, images}, index) => {
    const failed = role === "user" && messages[index + 1]?.error && !messages[index + 1].content;
    if ((content || images) && !failed) sent.push({role, content: contentOf(content, images)});
  });
  return sent;
}

/** A model that reads text only gets a word in place of an image: another model has seen it. */
function contentOf(text, images) {
  if (!images) return text;
  const parts = images.map(({url}) => (url && model()?.sees ? {type: "image_url", image_url: {url}} : {type: "text", text: "[image]"}));
  return text ? [...parts, {type: "text", text}] : parts;
}

function bodyOf(conversation) {
  const body = {model: find("model").value, messages: history(conversation), max_tokens: LIMIT};
  for (const name of SETTINGS.slice(1)) {
    const value = parseFloat(conversation.settings[name]);
    if (Number.isFinite(value)) body[name] = value;
  }
  return body;
}

async function answer() {
  const conversation = current;
  const message = {role: "assistant", content: "", reasoning: "", stats: null, error: ""};
  conversation.messages.push(message);
  keep(conversation);
  running = {controller: new AbortController(), conversation};
  showAll();
  const timing = {start: performance.now(), first: null, last: null, events: 0};
  let drawing = 0;
  const draw = () => {
    drawing = 0;
    if (current === conversation) follow(() => views.at(-1).show("running"));
  };
  let seen = {prefillNode: "", decodeNode: "", usage: null, finish: ""};
  try {
    await restoreImages(conversation);
    seen = await ask(bodyOf(conversation), conversation, running.controller.signal, ({content, reasoning}, soFar) => {
      seen = soFar;
      timing.last = performance.now();
      timing.first ??= timing.last;
      timing.events += 1;
      message.content += content;
      message.reasoning += reasoning;
      drawing ||= requestAnimationFrame(draw);
    });
  } catch (error) {
    if (error instanceof NeedsKey) wantKey(error.refused);
    if (error.name === "AbortError") seen.finish = "aborted";
    else message.error = error.message;
  }
  cancelAnimationFrame(drawing);
  message.stats = statsOf(timing, seen);
  running = null;
  if (conversations.includes(conversation)) keep(conversation);
  if (current === conversation) follow(() => views.at(-1).show("last"));
  showState();
  showSide();
  say(find("announcements"), message.error ? "" : "The answer is complete.");
}

/** Send a chat. If the context has no room for an answer of LIMIT tokens, the rest of it is the limit. */
async function ask(body, {settings}, signal, onDelta) {
  try {
    return await streamChat(body, signal, onDelta);
  } catch (error) {
    if (error.param !== "max_tokens" || settings.max_tokens) throw error;
    const {max_tokens: _, ...unlimited} = body;
    return await streamChat(unlimited, signal, onDelta);
  }
}

/** Without usage, which ends a complete answer, tokens are counted by events. */
function statsOf({start, first, last, events}, {prefillNode, decodeNode, usage, finish}) {
  const outputTokens = usage?.completion_tokens ?? (events || null);
  const elapsed = (last - first) / 1000;
  const stopped = finish === "aborted" ? "stopped" : FINISHES[finish] ?? "";
  return {
    prefillNode, decodeNode, outputTokens, stopped,
    ttft: first === null ? null : (first - start) / 1000,
    tokenRate: outputTokens > 1 && elapsed > 0 ? (outputTokens - 1) / elapsed : null,
    promptTokens: usage?.prompt_tokens ?? null,
    cachedTokens: usage?.prompt_tokens_details?.cached_tokens ?? 0,
  };
}

function retry() {
  if (running) return;
  if (current.messages.at(-1)?.role === "assistant") current.messages.pop();
  answer();
}

/** Send a message again with another text. What came after it is dropped. */
function edit(index, text) {
  if (running) return;
  current.messages.splice(index, Infinity, {...current.messages[index], content: text});
  answer();
}

function submit(content, images = []) {
  if (running || !(content.trim() || images.length) || !find("door").hidden) return false;
  current.messages.push(images.length ? {role: "user", content, images} : {role: "user", content});
  answer();
  putImages(images); // after the conversation is stored: other tabs remove images without one
  return true;
}

/** Send the message field and its images, unless an answer runs or a key is missing. */
async function submitEntry() {
  await attachments.reading;
  const refusal = attachments.images.length && attachments.refusal();
  if (refusal) return attachments.notice(`${refusal} Remove them, or choose another model.`);
  if (submit(find("entry").value, attachments.images)) {
    find("entry").value = "";
    attachments.take();
  }
}

find("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  submitEntry();
});
find("entry").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  submitEntry();
});
find("stop").addEventListener("click", () => running?.controller.abort());
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  running?.controller.abort();
  openSide(false);
});

// ---------------------------------------------------------------- side, settings, key

function openSide(open) {
  document.body.classList.toggle("side-open", open);
  set(find("menu"), "aria-expanded", String(open));
}

find("menu").addEventListener("click", () => openSide(!document.body.classList.contains("side-open")));
find("scroll").addEventListener("click", () => openSide(false));
find("new").addEventListener("click", () => openConversation(newConversation(current.settings)));
find("settings-button").addEventListener("click", () => follow(() => {
  find("settings").hidden = !find("settings").hidden;
  set(find("settings-button"), "aria-expanded", String(!find("settings").hidden));
}));
find("model").addEventListener("change", showModel);
find("example").addEventListener("click", () => {
  find("entry").value = EXAMPLE;
  find("entry").focus();
});
find("max_tokens").placeholder = String(LIMIT);
for (const name of SETTINGS) {
  find(name).addEventListener("input", () => {
    current.settings = {...current.settings, [name]: find(name).value};
    keep(current);
  });
}
find("settings").addEventListener("submit", (event) => event.preventDefault());

function wantKey(refused) {
  find("door").hidden = false;
  if (refused) say(find("door-why"), "The router does not know this key.");
  find("key").focus();
}

find("door").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey(find("key").value.trim());
  find("key").value = "";
  find("door").hidden = true;
  begin();
});

async function begin() {
  try {
    models = await listModels();
    find("model").replaceChildren(...models.map(({name}) => element("option", {}, name)));
    find("model").disabled = false;
    showModel();
    find("entry").focus();
  } catch (error) {
    if (error instanceof NeedsKey) wantKey(error.refused);
    else say(find("welcome-text"), error.message);
  }
}

showAll();
removeOtherImages(conversations);
begin();
offer(find("dashboard"));
