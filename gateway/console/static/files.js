// Files in and out: images and texts for a message, exports and imports of conversations.

import { newAnswer } from "./chat.js";
import { h } from "./dom.js";

const MOST_BYTES = 8 << 20;
const MOST_TEXT = 1 << 20;

const dataUrl = (file) => new Promise((resolve, reject) => {
  const reader = new FileReader();
  reader.onload = () => resolve(reader.result);
  reader.onerror = () => reject(reader.error);
  reader.readAsDataURL(file);
});

/** {name, url} of an image, {name, text} of a text, or {problem}. */
export async function readFile(file, takesImages) {
  const { name, size, type } = file;
  if (type.startsWith("image/") && type !== "image/svg+xml") {
    if (!takesImages) return { problem: `${name}: this model takes text only; "nano-inference serve --model tiny-vision" starts one that takes images` };
    if (size > MOST_BYTES) return { problem: `${name} is larger than 8 MiB; scale it down` };
    return { name, url: await dataUrl(file) };
  }
  if (size > MOST_TEXT) return { problem: `${name} is larger than 1 MiB, too long for a prompt` };
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    if (text.includes("\0")) throw new TypeError("binary");
    return { name, text };
  } catch {
    return { problem: `${name} is neither an image nor a text in UTF-8; copy its text into the message` };
  }
}

/** Save JSON as a file. */
export function save(name, value) {
  const href = URL.createObjectURL(new Blob([JSON.stringify(value, null, 2)], { type: "application/json" }));
  h("a", { href, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(href), 10_000);
}

const isText = (value) => typeof value === "string";
const partsOf = (content) => (isText(content) ? [{ type: "text", text: content }] : Array.isArray(content) ? content : []);

function turnOf({ role, content, reasoning_content: reasoning, tool_calls: calls, tool_call_id: id, images, files }) {
  const parts = partsOf(content);
  const text = parts.map((each) => each?.text).filter(isText).join("\n\n");
  if (role === "tool") return { role, id: String(id ?? ""), text };
  if (role === "assistant") {
    const answer = newAnswer({});
    const made = (Array.isArray(calls) ? calls : []).map((each) => ({ id: String(each?.id ?? ""), name: String(each?.function?.name ?? ""), arguments: String(each?.function?.arguments ?? "") }));
    return { role: "answer", answer: Object.assign(answer, { text, reasoning: isText(reasoning) ? reasoning : "", calls: made, done: true, imported: true }) };
  }
  const urls = [...parts.map((each) => each?.image_url?.url), ...(Array.isArray(images) ? images : [])].filter((each) => isText(each) && each.startsWith("data:image/"));
  const texts = (Array.isArray(files) ? files : []).filter((each) => isText(each?.name) && isText(each?.text));
  return { role: "user", text, images: urls, files: texts.map(({ name, text: own }) => ({ name, text: own })) };
}

/** The turns and settings of an export, or of a request's body. Raises TypeError for another file. */
export async function readExport(file, known) {
  let found;
  try { found = JSON.parse(await file.text()); } catch { found = null; }
  if (!Array.isArray(found?.messages)) throw new TypeError(`${file.name} has no "messages"; take an export of a chat, or a request's JSON`);
  const messages = found.messages.filter((each) => ["user", "assistant", "tool", "system"].includes(each?.role));
  const system = messages.filter((each) => each.role === "system").map((each) => turnOf({ ...each, role: "user" }).text).join("\n\n");
  const given = Object.entries(found.settings ?? {}).filter(([name, value]) => name in known && typeof value === typeof known[name]);
  return { turns: messages.filter((each) => each.role !== "system").map(turnOf), settings: { ...(system && { system }), ...Object.fromEntries(given) } };
}
