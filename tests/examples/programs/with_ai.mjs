// Vercel's AI SDK, by its providers for OpenAI's interface, for servers like it, and for Anthropic's.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, Output, generateText, stepCountIs, streamText, tool } from "ai";
import assert from "node:assert/strict";
import { z } from "zod";

const { NANO_INFERENCE_URL: URL, NANO_INFERENCE_METRICS_URL: METRICS } = process.env;
const MODEL = "tiny";
const CONTEXT_LENGTH = 2048;
const LIMIT_MS = 60_000;
const SUM = "What is 12 + 30?";
const TOTAL = "42";
const PERSON = "Write as JSON: Ben is a chef, 10 years old.";

const openai = createOpenAI({ baseURL: `${URL}/v1`, apiKey: "none" });
const compatible = createOpenAICompatible({
  name: "ours",
  baseURL: `${URL}/v1`,
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const anthropic = createAnthropic({ baseURL: `${URL}/v1`, apiKey: "none" });
// What each provider calls a model.
const INTERFACES = {
  chats: (name) => openai.chat(name),
  responses: (name) => openai.responses(name),
  compatible: (name) => compatible(name),
  messages: (name) => anthropic(name),
};
const Person = z.object({
  name: z.string().max(12),
  age: z.number().int().min(0).max(120),
  job: z.enum(["chef", "pilot", "teacher"]),
});
const common = { maxRetries: 0, temperature: 0, maxOutputTokens: 200 };

function asked(interface_, prompt, more = {}, name = MODEL) {
  return { model: INTERFACES[interface_](name), prompt, ...common, ...more };
}

async function cancelled() {
  const text = await (await fetch(METRICS)).text();
  const counts = text.matchAll(/^nano_requests_total\{.*nano_request_status="cancelled".*\} (\S+)$/gm);
  return [...counts].reduce((sum, found) => sum + Number(found[1]), 0);
}

async function loads() {
  return (await (await fetch(`${URL}/v1/loads`)).json()).loads[0];
}

async function until(holds) {
  for (const end = Date.now() + LIMIT_MS; !(await holds()); ) {
    assert.ok(Date.now() < end, `${holds} does not become true`);
    await new Promise((resolve) => setTimeout(resolve, 50));
  }
}

const promises = {
  async answer_has_text_and_usage(each) {
    const answer = await generateText(asked(each, SUM));
    assert.equal(answer.text, TOTAL);
    assert.equal(answer.finishReason, "stop");
    assert.ok(answer.usage.inputTokens > 0 && answer.usage.outputTokens > 0);
  },

  async stream_is_the_answer_in_parts(each) {
    const stream = streamText(asked(each, SUM));
    let text = "";
    for await (const part of stream.textStream) text += part;
    assert.equal(text, TOTAL);
    assert.ok((await stream.usage).outputTokens > 0);
  },

  async output_keeps_its_schema(each) {
    const output = Output.object({ schema: Person });
    Person.parse((await generateText(asked(each, PERSON, { output }))).output);
    const stream = streamText(asked(each, PERSON, { output }));
    for await (const _ of stream.partialOutputStream);
    Person.parse(await stream.output);
  },

  async tool_is_called_and_its_result_taken(each) {
    const cities = [];
    const get_weather = tool({
      description: "Get the weather in a city",
      inputSchema: z.object({ city: z.string() }),
      execute: async ({ city }) => {
        cities.push(city);
        return { sky: "sunny", degrees: 21 };
      },
    });
    const more = { tools: { get_weather }, stopWhen: stepCountIs(2) };
    const answer = await generateText(asked(each, "What is the weather in Oslo?", more));
    assert.deepEqual(cities, ["Oslo"]);
    assert.ok(answer.text);
    const stream = streamText(asked(each, "What is the weather in Oslo?", more));
    assert.ok(await stream.text);
    assert.deepEqual(cities, ["Oslo", "Oslo"]);
  },

  async errors_have_their_class_and_status(each) {
    for (const [request, status, words] of [
      [asked(each, "a ".repeat(CONTEXT_LENGTH + 500)), 400, String(CONTEXT_LENGTH)],
      [asked(each, SUM, {}, "none"), 404, "none"],
      [asked(each, SUM, { topP: 7 }), 400, "top_p"],
    ]) {
      await assert.rejects(generateText(request), (error) => {
        assert.ok(APICallError.isInstance(error), error);
        assert.equal(error.statusCode, status);
        assert.ok(error.message.includes(words), error.message);
        return true;
      });
    }
  },

  async aborted_call_cancels_its_request(each) {
    const before = await cancelled();
    const aborting = new AbortController();
    const output = Output.object({ schema: z.object({ numbers: z.array(z.number().int()).min(1000) }) });
    const more = { output, maxOutputTokens: 1900, abortSignal: aborting.signal };
    const stream = streamText(asked(each, SUM, more)).consumeStream();
    await until(async () => (await loads()).num_running_reqs === 1);
    aborting.abort();
    await stream;
    await until(async () => (await cancelled()) === before + 1 && (await loads()).num_total_reqs === 0);
  },
};

for (const [name, promise] of Object.entries(promises)) {
  for (const each of Object.keys(INTERFACES)) {
    try {
      await promise(each);
      console.log(`kept: ${name} (${each})`);
    } catch (error) {
      process.exitCode = 1;
      console.log(`broken: ${name} (${each})\n${error.stack}\n${error.responseBody ?? ""}`);
    }
  }
}
