// Ten turns with Anthropic's library: `node anthropic_node.mjs URL whole|streamed`.
import Anthropic from "@anthropic-ai/sdk";

const [url, mode] = process.argv.slice(2);
const client = new Anthropic({ baseURL: url, apiKey: "none", maxRetries: 0 });
const tools = [
  {
    name: "look",
    description: "How it is in a place",
    input_schema: {
      type: "object",
      properties: { place: { type: "string" }, days: { type: "array" } },
      required: ["place"],
    },
  },
];
const messages = [];
for (let turn = 1; turn <= 10; turn++) {
  messages.push({ role: "user", content: `How is it in place ${turn}?` });
  for (;;) {
    const asked = { model: "tiny", max_tokens: 500, messages, tools };
    const message =
      mode === "whole"
        ? await client.messages.create(asked)
        : await client.messages.stream(asked).finalMessage();
    messages.push({ role: "assistant", content: message.content });
    const results = message.content
      .filter((block) => block.type === "tool_use")
      .map((block) => ({
        type: "tool_result",
        tool_use_id: block.id,
        content: `cold in ${block.input.place}.`,
      }));
    if (results.length === 0) break;
    messages.push({ role: "user", content: results });
  }
}
