// Vercel's AI SDK by one of its providers, whole and as a stream.
import { generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { readFile, writeFile } from "./files.mjs";

const [url, prompt, provider] = process.argv.slice(2);
const { createAnthropic, createOpenAI, createOpenAICompatible } = await import(provider);
const options = { name: "here", baseURL: `${url}/v1`, apiKey: "none" };
const make = createAnthropic ?? createOpenAI ?? createOpenAICompatible;
const path = z.string();
const asked = {
  model: make(options)("scripted"),
  prompt,
  maxRetries: 0,
  stopWhen: stepCountIs(9),
  tools: {
    write_file: tool({ inputSchema: z.object({ path, content: z.string() }), execute: writeFile }),
    read_file: tool({ inputSchema: z.object({ path }), execute: readFile }),
  },
};
console.log((await generateText(asked)).text);
console.log(await streamText(asked).text);
