// A call as a program.

import { address } from "./api.js";

const quote = (text) => `'${text.replaceAll("'", "'\\''")}'`;

/** A call for a shell, with the key as a variable. */
export function curl(body, keys) {
  const lines = [`curl -sS -N ${address("v1/chat/completions")}`, "-H 'Content-Type: application/json'"];
  if (keys) lines.push('-H "Authorization: Bearer $NANO_INFERENCE_API_KEY"');
  lines.push(`-d ${quote(JSON.stringify(body, null, 2))}`);
  return lines.join(" \\\n  ");
}

const OWN = new Set(["top_k", "min_p", "repetition_penalty", "return_weight_versions", "thinking_token_budget", "return_token_ids"]);

/** Python's literal of a JSON value. */
export function literal(value, indent = "") {
  const inner = `${indent}    `;
  if (value === null) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (typeof value === "number") return String(value);
  if (typeof value === "string") return JSON.stringify(value).replaceAll("\u2028", "\\u2028").replaceAll("\u2029", "\\u2029");
  const [open, close] = Array.isArray(value) ? "[]" : "{}";
  const parts = Array.isArray(value) ? value.map((each) => literal(each, inner)) : Object.entries(value).map(([name, each]) => `${JSON.stringify(name)}: ${literal(each, inner)}`);
  if (!parts.length) return open + close;
  const line = `${open}${parts.join(", ")}${close}`;
  return line.length < 72 && !line.includes("\n") ? line : `${open}\n${parts.map((each) => `${inner}${each},\n`).join("")}${indent}${close}`;
}

/** A call with openai-python; fields that it has no argument for go into extra_body. */
export function python(body, keys) {
  const extra = Object.fromEntries(Object.entries(body).filter(([name]) => OWN.has(name)));
  const given = Object.entries(body).filter(([name]) => !OWN.has(name)).map(([name, value]) => `    ${name}=${literal(value, "    ")},`);
  if (Object.keys(extra).length) given.push(`    extra_body=${literal(extra, "    ")},`);
  return [
    ...(keys ? ["import os", ""] : []),
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url="${address("v1")}", api_key=${keys ? 'os.environ["NANO_INFERENCE_API_KEY"]' : '"none"'})`,
    "stream = client.chat.completions.create(",
    ...given,
    ")",
    "for chunk in stream:",
    "    for choice in chunk.choices:",
    '        print(choice.delta.content or "", end="", flush=True)',
    "",
  ].join("\n");
}
