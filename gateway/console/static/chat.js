// A streamed chat that survives: a broken connection, a hidden tab, a reload, a killed gateway.
//
// The call has an Idempotency-Key, so that the gateway lets it go on without its client for
// gateway.resume_grace_s, and each event an id, after which any gateway continues it.

import { ApiError, call, events, pause } from "./api.js";

const LONGEST_MS = 600_000;

/** The state of one answer, as it is kept over a reload: plain data. */
export function newAnswer(body) {
  return {
    body, name: crypto.randomUUID?.() ?? String(Math.random()), stream: "", after: "", done: false, error: "", code: "", param: "",
    text: "", reasoning: "", calls: [], tokens: [], finish: "", usage: null, version: "", resumed: 0,
    began: Date.now(), first: 0, last: 0,
  };
}

/** Add a chunk to an answer. */
export function add(answer, chunk) {
  if (chunk.error) {
    answer.error = chunk.error.message;
    answer.code = chunk.error.code ?? "";
    answer.param = chunk.error.param ?? "";
    return;
  }
  answer.stream ||= chunk.id;
  answer.version = chunk.system_fingerprint ?? answer.version;
  if (chunk.usage) answer.usage = chunk.usage;
  const choice = chunk.choices?.[0];
  if (!choice) return;
  const delta = choice.delta ?? {};
  const thought = delta.reasoning_content ?? delta.reasoning ?? "";
  if ((thought || delta.content || delta.tool_calls) && !answer.first) answer.first = Date.now();
  answer.reasoning += thought;
  answer.text += delta.content ?? "";
  for (const each of delta.tool_calls ?? []) {
    const found = (answer.calls[each.index ?? 0] ??= { id: "", name: "", arguments: "" });
    found.id = each.id ?? found.id;
    found.name += each.function?.name ?? "";
    found.arguments += each.function?.arguments ?? "";
  }
  // A chunk without text has tokens that belong to what comes: marks, and spaces that are trimmed.
  const kind = (answer.kind = thought ? "reasoning" : delta.tool_calls ? "call" : delta.content ? "text" : answer.kind ?? "text");
  for (const each of choice.logprobs?.content ?? []) {
    answer.tokens.push({ t: each.token, p: each.logprob, k: kind, v: versionOf(choice), a: each.top_logprobs.map((other) => [other.token, other.logprob]) });
  }
  if (choice.finish_reason) answer.finish = choice.finish_reason;
  answer.last = Date.now();
}

const versionOf = (choice) => choice.weight_versions?.at(-1)?.version;

/** Run an answer to its end, resuming it as often as necessary. `changed` is called after each event. */
export async function run(answer, changed, signal) {
  let failures = 0;
  let lost = 0;
  answer.waiting = "";
  while (!answer.done && !signal.aborted) {
    try {
      for await (const event of events(await connect(answer, signal))) {
        failures = lost = 0;
        if (event.data === "[DONE]") { answer.done = true; break; }
        const chunk = JSON.parse(event.data);
        add(answer, chunk);
        if (event.id) answer.after = event.id;
        changed();
      }
      if (!answer.done && answer.error) answer.done = true;
      if (!answer.done) throw new TypeError("the stream ended early");
    } catch (error) {
      if (signal.aborted) break;
      const final = error instanceof ApiError && error.status !== 503 && error.status !== 502 && error.status !== 504 && error.code !== "overloaded";
      const reached = answer.stream || error instanceof ApiError;
      lost ||= Date.now();
      if (final || Date.now() - lost > LONGEST_MS) {
        answer.error = reached ? error.message : "The server isn't reachable. The message is kept: try again when it is back.";
        answer.code = error.code ?? "";
        answer.param = error.param ?? "";
        answer.restarted = error.code === "stream_not_found" && failures > 0;
        answer.done = true;
        break;
      }
      failures += 1;
      if (failures === 1 && answer.stream) answer.resumed += 1;
      answer.waiting = answer.stream ? "Connection lost; trying to pick up the answer …" : reached ? `The server can't take the message yet; it is sent again soon. ${error.message}` : "The server isn't reachable. The message is sent as soon as it is back.";
      changed();
      await again(Math.min(4000, 250 * 2 ** Math.min(failures, 5)), signal);
    }
    answer.waiting = "";
  }
  answer.waiting = "";
  changed();
}

function connect(answer, signal) {
  if (answer.stream) {
    const headers = answer.after ? { "Last-Event-ID": answer.after } : {};
    return call(`v1/streams/${encodeURIComponent(answer.stream)}`, { headers, signal });
  }
  // The same key: if the gateway died before its first event, the call runs once all the same.
  return call("v1/chat/completions", { method: "POST", body: answer.body, headers: { "Idempotency-Key": answer.name }, signal });
}

/** Wait before the next try; a tab that becomes visible and a network that returns try at once. */
async function again(ms, signal) {
  const stop = new AbortController();
  const wake = () => { if (!document.hidden) stop.abort(); };
  document.addEventListener("visibilitychange", wake);
  addEventListener("online", wake);
  signal.addEventListener("abort", () => stop.abort(), { once: true });
  await pause(ms, stop.signal);
  document.removeEventListener("visibilitychange", wake);
  removeEventListener("online", wake);
}

/** End an answer at the gateway as well. */
export async function cancel(answer) {
  if (answer.stream) await call(`v1/streams/${encodeURIComponent(answer.stream)}`, { method: "DELETE" });
}

/** The message of an answer, as the next call of the conversation has it. */
export function messageOf(answer) {
  const message = { role: "assistant", content: answer.text || null };
  if (answer.reasoning) message.reasoning_content = answer.reasoning;
  const calls = answer.calls.filter(Boolean);
  if (calls.length) message.tool_calls = calls.map(({ id, name, arguments: given }) => ({ id, type: "function", function: { name, arguments: given } }));
  else message.content = answer.text;
  return message;
}

