// OpenAI's Agents SDK, over responses and over chats, whole and as a stream.
import { Agent, OpenAIProvider, Runner, tool } from "@openai/agents";
import { z } from "zod";
import { readFile, writeFile } from "./files.mjs";

const [url, prompt] = process.argv.slice(2);
const path = z.string();
const tools = [
  tool({
    name: "write_file",
    description: "Write a text into a file.",
    parameters: z.object({ path, content: z.string() }),
    execute: writeFile,
  }),
  tool({
    name: "read_file",
    description: "Read a file's text.",
    parameters: z.object({ path }),
    execute: readFile,
  }),
];
for (const useResponses of [true, false]) {
  const modelProvider = new OpenAIProvider({ baseURL: `${url}/v1`, apiKey: "none", useResponses });
  const runner = new Runner({ modelProvider, tracingDisabled: true });
  const agent = new Agent({ name: "writer", model: "scripted", tools });
  console.log((await runner.run(agent, prompt)).finalOutput);
  const stream = await runner.run(agent, prompt, { stream: true });
  await stream.completed;
  console.log(stream.finalOutput);
}
