// Vercel's AI SDK works with pdserve: its provider for compatible servers, and those of OpenAI (responses) and Anthropic.
"use strict";

const assert = require("node:assert/strict");
const test = require("node:test");
const { createAnthropic } = require("@ai-sdk/anthropic");
const { createOpenAI } = require("@ai-sdk/openai");
const { createOpenAICompatible } = require("@ai-sdk/openai-compatible");
const { generateText, Output, streamText, tool } = require("ai");
const { z } = require("zod");

const { PDSERVE_URL: baseURL, PDSERVE_KEY: apiKey, PDSERVE_MODEL: model } = process.env;
const name = "pdserve";
// Providers know no extensions of servers, so the request gets them here. With random weights, EOS would end an answer
// at a random token, and without the penalty JSON would be whitespace until the limit.
const fetchWith = (extra) => (url, options) =>
  fetch(url, { ...options, body: JSON.stringify({ ...JSON.parse(options.body), ...extra }) });
const providers = (extra) => {
  const settings = { baseURL, apiKey, fetch: fetchWith(extra) };
  return {
    chats: createOpenAICompatible({ ...settings, name, includeUsage: true, supportsStructuredOutputs: true })(model),
    responses: createOpenAI(settings).responses(model),
    messages: createAnthropic(settings)(model),
  };
};
const plain = { prompt: "Say something.", maxOutputTokens: 24, maxRetries: 0 };
const structured = { prompt: "Paint!", maxOutputTokens: 500, maxRetries: 0 };
const schema = z.object({ colour: z.enum(["red", "green"]), again: z.boolean() });

for (const kind of ["chats", "responses", "messages"]) {
  const texts = providers({ ignore_eos: true, temperature: 0 })[kind];
  const objects = providers({ frequency_penalty: 2, temperature: 0 })[kind];

  test(`${kind}: a streamed text equals the whole one`, async () => {
    const whole = await generateText({ ...plain, model: texts });
    assert.equal(whole.usage.outputTokens, 24);
    assert.equal(whole.finishReason, "length");
    const stream = streamText({ ...plain, model: texts });
    let text = "";
    for await (const part of stream.textStream) text += part;
    assert.ok(text);
    assert.equal(text, whole.text);
    assert.equal((await stream.usage).outputTokens, 24);
  });

  test(`${kind}: a required tool is called, whole and streamed`, async () => {
    const tools = { paint: tool({ description: "Paint the wall.", inputSchema: schema }) };
    const request = { ...structured, model: objects, tools, toolChoice: "required" };
    const [call] = (await generateText(request)).toolCalls;
    assert.equal(call.toolName, "paint");
    schema.parse(call.input);
    const [streamed] = await streamText(request).toolCalls;
    schema.parse(streamed.input);
  });

  test(`${kind}: an output has its schema`, async () => {
    const { output } = await generateText({ ...structured, model: objects, output: Output.object({ schema }) });
    schema.parse(output);
  });

  test(`${kind}: a refusal is an error of the SDK`, async () => {
    const refused = generateText({ ...plain, model: providers({ model: "other" })[kind] });
    await assert.rejects(refused, (error) => error.statusCode === 404);
  });
}
