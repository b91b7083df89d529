// The call that a conversation makes, from its settings and its turns.

import { messageOf } from "./chat.js";

export const EXAMPLE_TOOLS = JSON.stringify([{ type: "function", function: { name: "get_weather", description: "Get the weather in a city", parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] } } }], null, 2);
export const EXAMPLE_SCHEMA = JSON.stringify({ type: "object", properties: { name: { type: "string" }, age: { type: "integer" } }, required: ["name", "age"] }, null, 2);

export const newSettings = () => ({ model: "", system: "", temperature: "0.7", top_p: "", top_k: "", max_tokens: "", seed: "", stop: "", presence_penalty: "", frequency_penalty: "", repetition_penalty: "", reasoning: "", logprobs: true, tools: "", tool_choice: "auto", format: "text", schema: "" });

const NUMBERS = ["temperature", "top_p", "top_k", "max_tokens", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty"];

/** Errors of settings: messages by field. */
export class FieldError extends Error {
  constructor(problems) {
    super(Object.values(problems).join("; "));
    this.problems = problems;
  }
}

/** The field of the settings that a gateway's `param` means; "" for none. */
export function fieldOf(param) {
  const [first] = (param ?? "").split(/[.[]/);
  return { response_format: "schema", tools: "tools", tool_choice: "tools", stop: "stop", model: "model", reasoning_effort: "reasoning", max_completion_tokens: "max_tokens" }[first] ?? (NUMBERS.includes(first) ? first : "");
}

/** Whether an answer is a part of the conversation: one that failed or was stopped without a text is not. */
export const counts = (answer) => !answer.done || Boolean(answer.text || answer.calls.some(Boolean));

/** The turns that the next call has, without those whose answer failed. */
export const counting = (turns) => turns.filter((turn, index) => (turn.answer ? counts(turn.answer) : turns[index + 1]?.answer ? counts(turns[index + 1].answer) : true));

const fenceOf = (text) => "`".repeat(Math.max(3, ...[...text.matchAll(/`+/g)].map(([run]) => run.length + 1)));

/** A turn's text with its files. */
export function textOf({ text, files = [] }) {
  return [...files.map((each) => `${each.name}:\n${fenceOf(each.text)}\n${each.text}\n${fenceOf(each.text)}`), text].filter(Boolean).join("\n\n");
}

function messagesOf(settings, turns) {
  const messages = settings.system.trim() ? [{ role: "system", content: settings.system }] : [];
  for (const turn of counting(turns)) {
    if (turn.answer) messages.push(messageOf(turn.answer));
    else if (turn.role === "tool") messages.push({ role: "tool", tool_call_id: turn.id, content: turn.text });
    else {
      const images = (turn.images ?? []).map((url) => ({ type: "image_url", image_url: { url } }));
      const content = textOf(turn);
      messages.push({ role: "user", content: images.length ? [...images, ...(content ? [{ type: "text", text: content }] : [])] : content });
    }
  }
  return messages;
}

/** The body of the next call. Raises FieldError. */
export function bodyOf(settings, turns) {
  const problems = {};
  const parsed = (field) => {
    const text = settings[field];
    try { return JSON.parse(text); } catch (error) { problems[field] = text.trim() ? `This is no JSON: ${error.message}` : "It is empty. Write one, or use the example."; }
    return null;
  };
  const body = { messages: messagesOf(settings, turns), stream: true, stream_options: { include_usage: true } };
  if (settings.model) body.model = settings.model;
  for (const name of NUMBERS) {
    const text = settings[name].trim();
    if (!text) continue;
    if (Number.isFinite(Number(text))) body[name] = Number(text);
    else problems[name] = "This is no number";
  }
  const stops = settings.stop.split("\n").filter(Boolean);
  if (stops.length) body.stop = stops.map((each) => each.replaceAll("\\n", "\n"));
  if (settings.reasoning) body.reasoning_effort = settings.reasoning;
  if (settings.logprobs) Object.assign(body, { logprobs: true, top_logprobs: 5, return_weight_versions: true });
  if (settings.tools.trim()) {
    body.tools = parsed("tools");
    if (settings.tool_choice !== "auto") body.tool_choice = settings.tool_choice;
  }
  if (settings.format === "json_object") body.response_format = { type: "json_object" };
  if (settings.format === "json_schema") body.response_format = { type: "json_schema", json_schema: { name: "answer", schema: parsed("schema") } };
  if (Object.keys(problems).length) throw new FieldError(problems);
  return body;
}

/** What a call has that a user may have forgotten, in words. */
export const setOf = ({ system, max_tokens, stop }) => [system.trim() && "system prompt", Number(max_tokens) > 0 && `at most ${max_tokens.trim()} tokens`, stop.trim() && "stop strings"].filter(Boolean);

/** The same call as a program makes it: without what only this page shows. */
export function programOf(body) {
  const { logprobs, top_logprobs, return_weight_versions, ...rest } = body;
  return rest;
}
