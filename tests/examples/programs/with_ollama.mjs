// Ollama's own library for JavaScript.
import assert from "node:assert/strict";
import { Ollama } from "ollama";

const { NANO_INFERENCE_URL: URL, NANO_INFERENCE_METRICS_URL: METRICS } = process.env;
const MODEL = "tiny";
const LIMIT_MS = 60_000;
const SUM = "What is 12 + 30?";
const TOTAL = "42";
const options = { temperature: 0 };
const ollama = new Ollama({ host: URL });

function asked(more = {}) {
  return { model: MODEL, messages: [{ role: "user", content: SUM }], options, ...more };
}

async function cancelled() {
  const text = await (await fetch(METRICS)).text();
  const counts = text.matchAll(/^nano_requests_total\{.*nano_request_status="cancelled".*\} (\S+)$/gm);
  return [...counts].reduce((sum, found) => sum + Number(found[1]), 0);
}

const promises = {
  async answer_has_text_and_counts() {
    const answer = await ollama.chat(asked());
    assert.equal(answer.message.content, TOTAL);
    assert.equal(answer.done_reason, "stop");
    assert.ok(answer.prompt_eval_count > 0 && answer.eval_count / answer.eval_duration > 0);
  },

  async stream_is_the_answer_in_parts() {
    let text = "";
    for await (const part of await ollama.chat(asked({ stream: true }))) text += part.message.content;
    assert.equal(text, TOTAL);
    text = "";
    for await (const part of await ollama.generate({ model: MODEL, prompt: SUM, stream: true, options }))
      text += part.response;
    assert.equal(text, TOTAL);
  },

  async format_and_tools_are_obeyed() {
    const age = { type: "integer", maximum: 9 };
    const format = { type: "object", properties: { age }, required: ["age"], additionalProperties: false };
    const answer = await ollama.chat(asked({ format }));
    assert.equal(typeof JSON.parse(answer.message.content).age, "number");
    const parameters = { type: "object", required: ["city"], properties: { city: { type: "string" } } };
    const weather = { name: "get_weather", description: "Get the weather in a city", parameters };
    const messages = [{ role: "user", content: "What is the weather in Oslo?" }];
    const tools = [{ type: "function", function: weather }];
    const called = (await ollama.chat(asked({ messages, tools }))).message;
    assert.deepEqual(called.tool_calls[0].function.arguments, { city: "Oslo" });
    const result = { role: "tool", tool_name: "get_weather", content: "sunny" };
    assert.ok((await ollama.chat(asked({ messages: [...messages, called, result], tools }))).message);
  },

  async models_and_vectors_are_there() {
    assert.deepEqual((await ollama.list()).models.map((each) => each.name), [`${MODEL}:latest`]);
    assert.equal((await ollama.ps()).models.length, 1);
    assert.ok((await ollama.show({ model: MODEL })).capabilities.includes("tools"));
    assert.ok((await ollama.version()).version);
    assert.equal((await ollama.pull({ model: MODEL })).status, "success");
    assert.equal((await ollama.embed({ model: MODEL, input: ["a", "b"] })).embeddings.length, 2);
  },

  async errors_have_their_status() {
    await assert.rejects(ollama.chat(asked({ model: "none" })), (error) => {
      assert.equal(error.status_code, 404);
      return error.message.includes("none");
    });
    await assert.rejects(ollama.chat(asked({ options: { mirostat: 2 } })), /options.mirostat/);
  },

  async aborted_stream_cancels_its_request() {
    const before = await cancelled();
    const format = { type: "array", items: { type: "integer" }, minItems: 1000 };
    const stream = await ollama.chat(asked({ stream: true, format, options: { num_predict: 1900 } }));
    await assert.rejects(async () => {
      for await (const _ of stream) stream.abort();
    }, /abort/);
    for (const end = Date.now() + LIMIT_MS; (await cancelled()) !== before + 1; ) {
      assert.ok(Date.now() < end, "the request is not cancelled");
      await new Promise((resolve) => setTimeout(resolve, 50));
    }
  },
};

for (const [name, promise] of Object.entries(promises)) {
  try {
    await promise();
    console.log(`kept: ${name}`);
  } catch (error) {
    process.exitCode = 1;
    console.log(`broken: ${name}\n${error.stack}`);
  }
}
