// Ten turns with OpenAI's library: `node openai_node.mjs URL chat|responses|stored whole|streamed`.
import OpenAI from "openai";

const [url, api, mode] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const look = {
  name: "look",
  description: "How it is in a place",
  parameters: {
    type: "object",
    properties: { place: { type: "string" }, days: { type: "array" } },
    required: ["place"],
  },
};

async function chat(messages) {
  const asked = { model: "tiny", messages, tools: [{ type: "function", function: look }] };
  const answer =
    mode === "whole"
      ? await client.chat.completions.create(asked)
      : await client.chat.completions.stream(asked).finalChatCompletion();
  const { message } = answer.choices[0];
  messages.push(message);
  for (const call of message.tool_calls ?? []) {
    const { place } = JSON.parse(call.function.arguments);
    messages.push({ role: "tool", tool_call_id: call.id, content: `cold in ${place}.` });
  }
  return (message.tool_calls ?? []).length > 0;
}

let previous;

async function responses(input) {
  const asked = { model: "tiny", input, tools: [{ type: "function", ...look, strict: false }] };
  if (api === "stored") asked.previous_response_id = previous;
  else asked.store = false;
  const answer =
    mode === "whole"
      ? await client.responses.create(asked)
      : await client.responses.stream(asked).finalResponse();
  previous = answer.id;
  if (api === "stored") input.length = 0;
  else input.push(...answer.output);
  let called = false;
  for (const item of answer.output) {
    if (item.type !== "function_call") continue;
    called = true;
    const { place } = JSON.parse(item.arguments);
    input.push({ type: "function_call_output", call_id: item.call_id, output: `cold in ${place}.` });
  }
  return called;
}

const history = [];
for (let turn = 1; turn <= 10; turn++) {
  history.push({ role: "user", content: `How is it in place ${turn}?` });
  while (await (api === "chat" ? chat : responses)(history));
}
