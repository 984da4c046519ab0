// The official SDK for Node works with pdserve. CommonJS, because Node resolves its packages by NODE_PATH.
"use strict";

const assert = require("node:assert/strict");
const test = require("node:test");
const OpenAI = require("openai");

const { PDSERVE_URL, PDSERVE_KEY, PDSERVE_LIMITED_KEY, PDSERVE_MODEL: model } = process.env;
const connect = (apiKey) => new OpenAI({ baseURL: PDSERVE_URL, apiKey, maxRetries: 0, timeout: 60_000 });
const client = connect(PDSERVE_KEY);

const messages = [{ role: "user", content: "Say something." }];
// With random weights, EOS would end an answer at a random token.
const chat = { model, messages, temperature: 0, max_tokens: 24, ignore_eos: true };
// Without the penalty, random weights would generate whitespace in JSON until max_tokens.
const structured = { temperature: 0, frequency_penalty: 2 };
const parameters = {
  type: "object",
  properties: { colour: { enum: ["red", "green"] }, again: { type: "boolean" } },
  required: ["colour", "again"],
  additionalProperties: false,
};
const paint = { name: "paint", parameters, strict: true };

const collect = async (stream) => {
  const parts = [];
  for await (const part of stream) parts.push(part);
  return parts;
};

test("a streamed chat equals the whole answer", async () => {
  const whole = await client.chat.completions.create(chat);
  const options = { stream: true, stream_options: { include_usage: true } };
  const chunks = await collect(await client.chat.completions.create({ ...chat, ...options }));
  const last = chunks.pop();
  const text = chunks.map((chunk) => chunk.choices[0].delta.content ?? "").join("");
  assert.ok(text);
  assert.equal(text, whole.choices[0].message.content);
  assert.equal(last.usage.completion_tokens, 24);
});

test("a streamed completion equals the whole answer", async () => {
  const fields = { model, prompt: "Once", max_tokens: 24, temperature: 0, ignore_eos: true };
  const whole = await client.completions.create(fields);
  const chunks = await collect(await client.completions.create({ ...fields, stream: true }));
  assert.equal(chunks.map((chunk) => chunk.choices[0].text).join(""), whole.choices[0].text);
});

test("a required tool is called, whole and streamed", async () => {
  const fields = { ...structured, model, messages, max_tokens: 500, parallel_tool_calls: false };
  const tools = [{ type: "function", function: paint }];
  const request = { ...fields, tools, tool_choice: "required" };
  const [choice] = (await client.chat.completions.create(request)).choices;
  assert.equal(choice.finish_reason, "tool_calls");
  const call = choice.message.tool_calls[0].function;
  assert.match(JSON.parse(call.arguments).colour, /^(red|green)$/);
  const streamed = await client.chat.completions.stream(request).finalFunctionToolCall();
  assert.deepEqual(streamed, { ...call, parsed_arguments: streamed.parsed_arguments });
});

test("an answer follows the requested JSON schema", async () => {
  const response_format = { type: "json_schema", json_schema: { name: "paint", schema: parameters, strict: true } };
  const answer = await client.chat.completions.create({ ...structured, model, messages, max_tokens: 500, response_format });
  assert.equal(typeof JSON.parse(answer.choices[0].message.content).again, "boolean");
});

test("responses: whole, streamed, and with a function", async () => {
  const request = { model, input: "Say something.", temperature: 0, max_output_tokens: 24, ignore_eos: true };
  const whole = await client.responses.create(request);
  assert.ok(whole.output_text);
  const events = await collect(await client.responses.create({ ...request, stream: true }));
  const deltas = events.filter((event) => event.type === "response.output_text.delta");
  assert.equal(deltas.map((event) => event.delta).join(""), whole.output_text);
  assert.equal(events.at(-1).type, "response.incomplete");

  const forced = { tools: [{ type: "function", ...paint }], tool_choice: "required", parallel_tool_calls: false };
  const called = await client.responses.create({ ...request, ...structured, ...forced, max_output_tokens: 500 });
  const item = called.output.find((item) => item.type === "function_call");
  assert.equal(item.name, "paint");
});

test("responses: in the background, continued and deleted", async () => {
  const request = { model, input: "Say something.", max_output_tokens: 24 };
  const { id } = await client.responses.create({ ...request, background: true, stream: false });
  const events = await collect(await client.responses.create({ ...request, background: true, stream: true }));
  const again = await collect(await client.responses.retrieve(events[0].response.id, { stream: true }));
  assert.deepEqual(again, events);
  let first;
  do first = await client.responses.retrieve(id);
  while (first.status === "in_progress");
  const second = await client.responses.create({ ...request, previous_response_id: id });
  const items = await collect(client.responses.inputItems.list(second.id));
  assert.equal(items.length, 2 + first.output.length);
  await client.responses.delete(id);
  await assert.rejects(client.responses.retrieve(id), OpenAI.NotFoundError);
});

test("models lists the served model", async () => {
  const names = (await collect(client.models.list())).map((entry) => entry.id);
  assert.deepEqual(names, [model]);
});

test("errors have the matching classes of the SDK", async () => {
  const create = (fields, from = client) => from.chat.completions.create({ ...chat, ...fields });
  await assert.rejects(create({ temperature: -1 }), OpenAI.BadRequestError);
  await assert.rejects(create({ model: "gpt-5" }), OpenAI.NotFoundError);
  await assert.rejects(create({}, connect("sk-wrong")), OpenAI.AuthenticationError);
  const limited = connect(PDSERVE_LIMITED_KEY);
  const twice = async () => [await create({}, limited), await create({}, limited)]; // the key allows one request per minute
  await assert.rejects(twice(), OpenAI.RateLimitError);
});
