// OpenAI's library for Node: npm install openai
import OpenAI, { toFile } from "openai";

const url = process.env.NANO_INFERENCE_URL ?? "http://127.0.0.1:8000";
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none" });
const messages = [{ role: "user", content: "How much is 6 + 6?" }];

const answer = await client.chat.completions.create({ model: "tiny", messages, temperature: 0 });
console.log("chat:", answer.choices[0].message.content, answer.usage.total_tokens);

// A stream; the last chunk has the usage, and no choices.
const stream = await client.chat.completions.create({
  model: "tiny",
  messages,
  temperature: 0,
  stream: true,
  stream_options: { include_usage: true },
});
let text = "";
for await (const chunk of stream) {
  for (const choice of chunk.choices) text += choice.delta.content ?? "";
}
console.log("stream:", text);

// The library puts several choices together. What it has no field for may be sent all the same.
const several = await client.chat.completions
  .stream({ model: "tiny", messages, n: 3, seed: 1, max_tokens: 8, top_k: 5 })
  .finalChatCompletion();
for (const choice of several.choices) console.log("choice:", choice.index, choice.message.content);

const response = await client.responses.create({
  model: "tiny",
  input: "How much is 6 + 6?",
  temperature: 0,
});
console.log("response:", (await client.responses.retrieve(response.id)).output_text);

const events = client.responses.stream({ model: "tiny", input: "How much is 6 + 6?", temperature: 0 });
console.log("events:", (await events.finalResponse()).output_text);

// What can't be obeyed is an error that names the field.
try {
  await client.chat.completions.create({ model: "tiny", messages, top_p: 7 });
} catch (error) {
  console.log("error:", error.status, error.code, error.param);
}

// A batch: a file of calls, whose answers come as another file.
const line = {
  custom_id: "a",
  method: "POST",
  url: "/v1/chat/completions",
  body: { model: "tiny", messages, temperature: 0 },
};
const file = await client.files.create({
  file: await toFile(Buffer.from(JSON.stringify(line)), "calls.jsonl"),
  purpose: "batch",
});
let batch = await client.batches.create({
  input_file_id: file.id,
  endpoint: "/v1/chat/completions",
  completion_window: "24h",
});
while (!["completed", "failed", "expired", "cancelled"].includes(batch.status)) {
  await new Promise((resolve) => setTimeout(resolve, 500));
  batch = await client.batches.retrieve(batch.id);
}
const found = JSON.parse(await (await client.files.content(batch.output_file_id)).text());
const message = found.response.body.choices[0].message;
console.log("batch:", batch.status, found.custom_id, message.content);
