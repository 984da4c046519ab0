// Conversations in this browser's storage, an entry for each: tabs do not overwrite each other's.

import {removeImages} from "./image_store.js";

const PREFIX = "pdserve-chat-";
const MOST = 100; // conversations; older ones are removed

const TITLE = 60; // characters

/**
 * {id, updated, settings: {system, temperature, …}, messages: [{role, content, images, reasoning, stats, error}]}
 *
 * Images of messages are {id, name, width, height, was, url}; their URLs are in image_store.js.
 */
export function newConversation(settings = {}) {
  return {id: `${Date.now()}-${Math.random().toString(36).slice(2, 8)}`, updated: Date.now(), settings, messages: []};
}

export function titleOf(conversation) {
  const text = conversation.messages[0]?.content.trim().replace(/\s+/g, " ") ?? "";
  const untitled = conversation.messages.length ? "Image" : "New chat";
  return text.length > TITLE ? `${text.slice(0, TITLE)}…` : text || untitled;
}

/** All stored conversations, the latest first. */
export function load() {
  const found = [];
  for (const name of Object.keys(localStorage)) {
    if (!name.startsWith(PREFIX)) continue;
    try {
      found.push(JSON.parse(localStorage.getItem(name)));
    } catch {
      localStorage.removeItem(name); // not ours
    }
  }
  return found.sort((a, b) => b.updated - a.updated);
}

/** Store a conversation; the oldest others make room. */
export function save(conversation) {
  conversation.updated = Date.now();
  const others = load().filter(({id}) => id !== conversation.id);
  while (others.length >= MOST) remove(others.pop());
  const text = JSON.stringify(conversation, (name, value) => (name === "url" ? undefined : value));
  while (true) {
    try {
      localStorage.setItem(PREFIX + conversation.id, text);
      return;
    } catch {
      if (!others.length) return; // larger than the storage: it lasts as long as the page
      remove(others.pop());
    }
  }
}

export function remove(conversation) {
  localStorage.removeItem(PREFIX + conversation.id);
  removeImages(conversation);
}
