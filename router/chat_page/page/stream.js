// Requests to the router: the list of models, and the events of a streamed answer.

const KEY = "pdserve-api-key"; // in the storage of this tab, as on the dashboard

export class NeedsKey extends Error {
  constructor(refused) {
    super("This router requires an API key.");
    this.refused = refused;
  }
}

export function setKey(key) {
  sessionStorage.setItem(KEY, key);
}

async function send(path, options = {}) {
  const key = sessionStorage.getItem(KEY);
  const headers = {"Content-Type": "application/json", ...(key ? {Authorization: `Bearer ${key}`} : {})};
  let response;
  try {
    response = await fetch(new URL(path, document.baseURI), {...options, headers, cache: "no-store"});
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The router does not answer. Check that it runs, then try again.");
  }
  if (response.status === 401) {
    sessionStorage.removeItem(KEY);
    throw new NeedsKey(key !== null);
  }
  if (!response.ok) throw await errorOf(response);
  return response;
}

/** The error that a response says, with the name of the field that caused it. */
async function errorOf(response) {
  const text = await response.text();
  try {
    const {message, param} = JSON.parse(text).error;
    return Object.assign(new Error(message), {param});
  } catch {
    return new Error(`The router answered with status ${response.status}.`);
  }
}

/** The models in the router's order: {name, sees}; `sees`: it takes images. */
export async function listModels() {
  const {data} = await (await send("v1/models")).json();
  return data.map(({id, architecture}) => ({name: id, sees: architecture.input_modalities.includes("image")}));
}

const nodeOf = (response, role) => decodeURIComponent(response.headers.get(`x-pdserve-${role}-node`) ?? "");

/**
 * Send a chat and call `onDelta({content, reasoning})` per event. Returns {prefillNode, decodeNode, usage, finish};
 * nodes are "" where the router does not name them.
 */
export async function streamChat(body, signal, onDelta) {
  const text = JSON.stringify({...body, stream: true, stream_options: {include_usage: true}});
  const response = await send("v1/chat/completions", {method: "POST", body: text, signal});
  const result = {prefillNode: nodeOf(response, "prefill"), decodeNode: nodeOf(response, "decode"), usage: null, finish: ""};
  let complete = false;
  for await (const data of events(response)) {
    if (data === "[DONE]") {
      complete = true;
      break;
    }
    const event = JSON.parse(data);
    if (event.error) throw new Error(event.error.message);
    if (event.usage) result.usage = event.usage;
    for (const {delta, finish_reason: finish} of event.choices) {
      if (finish) result.finish = finish;
      if (delta.content || delta.reasoning) onDelta({content: delta.content ?? "", reasoning: delta.reasoning ?? ""}, result);
    }
  }
  if (!complete) throw new Error("The connection to the router broke off.");
  return result;
}

/** The data of server-sent events. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    while (true) {
      const {done, value} = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) if (line.startsWith("data: ")) yield line.slice(6).trimEnd();
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The connection to the router broke off.");
  } finally {
    reader.cancel().catch(() => {});
  }
}
