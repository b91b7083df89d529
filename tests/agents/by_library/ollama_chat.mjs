// Ollama's client, whole and as a stream.
import { Ollama } from "ollama";
import { readFile, writeFile } from "./files.mjs";

const [host, prompt] = process.argv.slice(2);
const client = new Ollama({ host });
const run = { write_file: writeFile, read_file: readFile };
const tool = (name, ...required) => ({
  type: "function",
  function: {
    name,
    description: name,
    parameters: {
      type: "object",
      required,
      properties: Object.fromEntries(required.map((each) => [each, { type: "string" }])),
    },
  },
});
const tools = [tool("write_file", "path", "content"), tool("read_file", "path")];

async function turn(messages, stream) {
  const answer = await client.chat({ model: "scripted", messages, tools, stream });
  const message = { role: "assistant", content: "", tool_calls: [] };
  for await (const part of stream ? answer : [answer]) {
    message.content += part.message.content;
    message.tool_calls.push(...(part.message.tool_calls ?? []));
  }
  return message;
}

for (const stream of [false, true]) {
  const messages = [{ role: "user", content: prompt }];
  let message;
  do {
    message = await turn(messages, stream);
    messages.push(message);
    for (const { function: { name, arguments: given } } of message.tool_calls) {
      messages.push({ role: "tool", content: run[name](given), tool_name: name });
    }
  } while (message.tool_calls.length);
  console.log(message.content);
}
