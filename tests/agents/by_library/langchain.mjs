// LangChain's agent, over chats and over responses, with the model that n8n's OpenAI node has.
import { ChatOpenAI } from "@langchain/openai";
import { createAgent, tool } from "langchain";
import { z } from "zod";
import { readFile, writeFile } from "./files.mjs";

const [url, prompt] = process.argv.slice(2);
const path = z.string();
const tools = [
  tool(writeFile, {
    name: "write_file",
    description: "Write a text into a file.",
    schema: z.object({ path, content: z.string() }),
  }),
  tool(readFile, {
    name: "read_file",
    description: "Read a file's text.",
    schema: z.object({ path }),
  }),
];
for (const useResponsesApi of [false, true]) {
  const model = new ChatOpenAI({
    model: "scripted",
    apiKey: "none",
    maxRetries: 0,
    useResponsesApi,
    configuration: { baseURL: `${url}/v1` },
  });
  const agent = createAgent({ model, tools });
  const { messages } = await agent.invoke({ messages: [{ role: "user", content: prompt }] });
  console.log(messages.at(-1).text);
}
