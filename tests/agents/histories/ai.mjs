// Ten turns with the AI SDK: `node ai.mjs URL PACKAGE chat|responses whole|streamed`.
import { generateText, isStepCount, streamText, tool } from "ai";
import { z } from "zod";

const [url, name, api, mode] = process.argv.slice(2);
const provider = await import(name);
const models = {
  "@ai-sdk/openai": () => provider.createOpenAI({ baseURL: `${url}/v1`, apiKey: "none" })[api]("tiny"),
  "@ai-sdk/openai-compatible": () =>
    provider.createOpenAICompatible({ name: "here", baseURL: `${url}/v1`, apiKey: "none" })("tiny"),
  "@ai-sdk/anthropic": () =>
    provider.createAnthropic({ baseURL: `${url}/v1`, apiKey: "none" })("tiny"),
};
const messages = [];
for (let turn = 1; turn <= 10; turn++) {
  messages.push({ role: "user", content: `How is it in place ${turn}?` });
  const asked = {
    model: models[name](),
    messages,
    maxRetries: 0,
    tools: {
      look: tool({
        description: "How it is in a place",
        inputSchema: z.object({ place: z.string(), days: z.array(z.any()).optional() }),
        execute: async ({ place }) => `cold in ${place}.`,
      }),
    },
    stopWhen: isStepCount(3),
    providerOptions: {
      anthropic: { thinking: { type: "enabled", budgetTokens: 200 } },
      openai: { store: false, forceReasoning: true },
    },
    onError: ({ error }) => {
      throw error;
    },
  };
  if (mode === "whole") {
    const answer = await generateText(asked);
    messages.push(...answer.responseMessages);
  } else {
    const stream = streamText(asked);
    await stream.consumeStream();
    messages.push(...(await stream.responseMessages));
  }
}
