// fetch of Node as it comes.

import { readFileSync } from "node:fs";

const url = process.env.PDSERVE_URL;

async function post(path, file) {
  const headers = { "Content-Type": "application/json" };
  const response = await fetch(url + path, { method: "POST", headers, body: readFileSync(file) });
  let text = "";
  for await (const piece of response.body.pipeThrough(new TextDecoderStream())) text += piece;
  return [response.status, ...text.split("\n").filter(Boolean).map((line) => line.slice(0, 300))].join(" ");
}

console.log("models", (await fetch(`${url}/v1/models`)).status);
console.log("upload", await post("/tokenize", process.env.UPLOAD));
console.log("stream", await post("/v1/completions", process.env.STREAM));
console.log("again", await post("/v1/completions", process.env.BRIEF));
