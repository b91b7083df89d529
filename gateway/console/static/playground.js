// The playground: a chat with one model, or with two models or settings side by side.

import { cancel, messageOf, newAnswer, run } from "./chat.js";
import { check, copy, field, h, icon, ICONS, put, showDialog, toast } from "./dom.js";
import { duration, number } from "./format.js";
import { curl, python } from "./snippets.js";
import { hideTip, TokenText } from "./tokens.js";
import { foldedCauses } from "./waterfall.js";

const KEPT = "console.chat";
const IMAGE_BYTES = 8 << 20;

const WEATHER = JSON.stringify([{ type: "function", function: { name: "get_weather", description: "Get the weather in a city", parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] } } }], null, 2);
const SCHEMA = JSON.stringify({ type: "object", properties: { name: { type: "string" }, age: { type: "integer" } }, required: ["name", "age"] }, null, 2);
const STARTERS = [
  ["How much is 6 + 6?", {}],
  ["Turn into JSON: Ben is a pilot, 44 years old.", {}],
  ["What is the weather in Oslo and Paris?", { tools: WEATHER }],
  ["Tell a story about Iris, a parrot and a green hat.", {}],
];

const newSettings = () => ({ model: "", system: "", temperature: "0.7", top_p: "", top_k: "", max_tokens: "256", seed: "", stop: "", presence_penalty: "", frequency_penalty: "", repetition_penalty: "", reasoning: "", logprobs: true, tools: "", tool_choice: "auto", format: "text", schema: "" });
const newState = () => ({ compare: false, tab: 0, draft: "", panes: [0, 1].map(() => ({ settings: newSettings(), turns: [] })) });

// It outlives the view: an answer goes on while another view is shown.
let state = null;
let running = null;
let redraw = () => {};

function restore() {
  try { state = JSON.parse(sessionStorage.getItem(KEPT)) ?? newState(); } catch { state = newState(); }
  for (const pane of state.panes) pane.settings = { ...newSettings(), ...pane.settings };
}

let keeping = 0;
function keep(now = false) {
  if (!now && keeping) return;
  clearTimeout(keeping);
  keeping = setTimeout(() => {
    keeping = 0;
    try { sessionStorage.setItem(KEPT, JSON.stringify(state)); } catch { /* too large: images, mostly */ }
  }, now ? 0 : 300);
}
addEventListener("pagehide", () => { try { if (state) sessionStorage.setItem(KEPT, JSON.stringify(state)); } catch { /* as above */ } });

// --- the call ---------------------------------------------------------------------------------

class FormError extends Error {}

function parsed(text, what) {
  try { return JSON.parse(text); } catch (error) { throw new FormError(`${what} is no JSON: ${error.message}`); }
}

export function bodyOf({ settings, turns }) {
  const body = { messages: [], stream: true, stream_options: { include_usage: true } };
  if (settings.model) body.model = settings.model;
  if (settings.system.trim()) body.messages.push({ role: "system", content: settings.system });
  for (const turn of turns) {
    if (turn.role === "user") {
      const images = (turn.images ?? []).map((url) => ({ type: "image_url", image_url: { url } }));
      body.messages.push({ role: "user", content: images.length ? [...images, { type: "text", text: turn.text }] : turn.text });
    } else if (turn.role === "tool") body.messages.push({ role: "tool", tool_call_id: turn.id, content: turn.text });
    else if (!turn.answer.error || turn.answer.text) body.messages.push(messageOf(turn.answer));
  }
  for (const name of ["temperature", "top_p", "top_k", "max_tokens", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty"]) {
    const text = settings[name].trim();
    if (!text) continue;
    if (!Number.isFinite(Number(text))) throw new FormError(`${name} is no number: ${text}`);
    body[name] = Number(text);
  }
  const stops = settings.stop.split("\n").filter(Boolean);
  if (stops.length) body.stop = stops.map((each) => each.replaceAll("\\n", "\n"));
  if (settings.reasoning) body.reasoning_effort = settings.reasoning;
  if (settings.logprobs) Object.assign(body, { logprobs: true, top_logprobs: 5, return_weight_versions: true });
  if (settings.tools.trim()) {
    body.tools = parsed(settings.tools, "The field Tools");
    if (settings.tool_choice !== "auto") body.tool_choice = settings.tool_choice;
  }
  if (settings.format === "json_object") body.response_format = { type: "json_object" };
  if (settings.format === "json_schema") body.response_format = { type: "json_schema", json_schema: { name: "answer", schema: parsed(settings.schema, "The schema") } };
  return body;
}

const shownPanes = () => state.panes.slice(0, state.compare ? 2 : 1);

function start(pane) {
  const answer = newAnswer(bodyOf(pane));
  pane.turns.push({ role: "answer", answer });
  follow(answer);
}

function follow(answer) {
  running ??= new Map();
  const stop = new AbortController();
  running.set(answer, stop);
  run(answer, () => { redraw(answer); keep(); }, stop.signal).finally(() => {
    running.delete(answer);
    answer.done = true;
    redraw(answer);
    keep(true);
  });
}

function stopAll() {
  for (const [answer, stop] of running ?? []) {
    stop.abort();
    answer.finish ||= "stopped";
    cancel(answer).catch(() => {});
  }
}

// --- drawing ----------------------------------------------------------------------------------

function answerView(answer, pane, context) {
  const reasoning = new TokenText("Reasoning");
  const text = new TokenText("Answer");
  const fold = h("details", { class: "reasoning", hidden: true }, h("summary", null, "Reasoning"), reasoning.element);
  const calls = h("div", { class: "message" });
  const meta = h("div", { class: "meta" });
  const time = h("div", null);
  const notice = h("p", { class: "small", role: "status" });
  const body = h("div", { class: "message", "aria-live": "polite", "aria-busy": "true" }, fold, text.element, calls);
  const element = h("div", { class: "message assistant" }, h("div", { class: "who" }, answer.body.model || context.session.model || "assistant"), body, notice, time, meta);
  let ended = false;
  const draw = () => {
    const streaming = !answer.done;
    const of = (kind) => answer.tokens.filter((each) => each.k === kind);
    fold.hidden = !answer.reasoning;
    if (!ended) fold.open = streaming && !answer.text;
    reasoning.update(answer.reasoning, of("reasoning"), streaming && !answer.text);
    text.element.hidden = !answer.text && !streaming;
    text.update(answer.text, of("text"), streaming && (Boolean(answer.text) || !answer.reasoning));
    body.setAttribute("aria-busy", String(streaming));
    notice.className = answer.error ? "small error" : "small muted";
    notice.textContent = answer.error ? `${answer.error}${answer.code ? ` (${answer.code})` : ""}` : answer.waiting ? "Connection lost; the answer goes on at the gateway and is picked up again …" : "";
    notice.hidden = !notice.textContent;
    if (streaming || ended) return;
    ended = true;
    fold.open = false;
    put(calls, answer.calls.filter(Boolean).map((each) => callView(each, answer, pane)));
    if (answer.finish === "tool_calls" && pane.turns.at(-1)?.answer === answer) calls.append(h("div", { class: "row" }, h("button", { type: "button", class: "primary", onclick: () => sendResults(answer, pane, calls) }, "Send the results")));
    put(meta, facts(answer).map((each) => h("span", null, each)),
      answer.stream && h("a", { href: `#/requests/${encodeURIComponent(answer.stream)}` }, "Open the request"),
      h("button", { type: "button", class: "quiet", onclick: () => program(answer.body, context) }, "Copy as curl / Python"));
    put(time, answer.usage?.time && foldedCauses(answer.usage.time));
  };
  draw();
  return { element, draw };
}

function facts(answer) {
  const { usage } = answer;
  const tokens = usage?.completion_tokens ?? answer.tokens.length;
  const found = [];
  if (answer.finish) found.push({ stop: "ended", length: "cut at max_tokens", tool_calls: "calls a tool", abort: "cancelled", content_filter: "cut by a guardrail" }[answer.finish] ?? answer.finish);
  if (usage) found.push(`${number(usage.prompt_tokens)} + ${number(tokens)} tokens`);
  if (answer.first) found.push(`first after ${duration((answer.first - answer.began) * 1e6)}`);
  if (answer.last > answer.first && tokens > 1) found.push(`${number((tokens - 1) / ((answer.last - answer.first) / 1e3))} tokens/s`);
  const cached = usage?.prompt_tokens_details?.cached_tokens;
  if (cached) found.push(`${number(cached)} cached`);
  const accepted = usage?.completion_tokens_details?.accepted_prediction_tokens;
  if (accepted) found.push(`${number(accepted)} drafted`);
  if (answer.version) found.push(answer.version.replace("-", " "));
  if (answer.resumed) found.push(`resumed ${answer.resumed}×`);
  return found;
}

function pretty(text) {
  try { return JSON.stringify(JSON.parse(text), null, 2); } catch { return text; }
}

function callView(each, answer, pane) {
  const open = pane.turns.at(-1)?.answer === answer;
  return h("div", { class: "call" },
    h("header", null, h("span", { class: "tag accent" }, "tool"), h("code", null, each.name)),
    h("pre", null, pretty(each.arguments)),
    open && h("div", { class: "result" }, field("Result, as your program would return it", h("textarea", { class: "code", rows: 2, data: { call: each.id }, placeholder: '{"sky": "sunny", "degrees": 12}' }))));
}

function sendResults(answer, pane, calls) {
  const results = [...calls.querySelectorAll("textarea")].map((each) => ({ role: "tool", id: each.dataset.call, text: each.value || "{}" }));
  attempt(() => {
    const next = { settings: pane.settings, turns: [...pane.turns, ...results] };
    bodyOf(next);
    pane.turns.push(...results);
    start(pane);
  });
}

function attempt(work) {
  try { work(); } catch (error) {
    if (!(error instanceof FormError)) throw error;
    toast(error.message, true);
    return;
  }
  keep(true);
  redraw();
}

function program(body, { session }) {
  const pre = h("pre", { class: "snippet", tabindex: 0 });
  const versions = { curl: () => curl(body, session.keys), Python: () => python(body, session.keys) };
  const buttons = Object.entries(versions).map(([name, make]) => h("button", { type: "button", "aria-pressed": "false", onclick: (event) => {
    pre.textContent = make();
    for (const each of buttons) each.setAttribute("aria-pressed", String(each === event.currentTarget));
  } }, name));
  showDialog("This call as a program", h("div", { class: "row" }, h("div", { class: "chips" }, buttons), h("button", { type: "button", onclick: () => copy(pre.textContent) }, "Copy")), pre);
  buttons[0].click();
}

function turnView(turn, pane, context, views) {
  if (turn.role === "answer") {
    const view = answerView(turn.answer, pane, context);
    views.set(turn.answer, view.draw);
    return view.element;
  }
  if (turn.role === "tool") return h("div", { class: "message" }, h("div", { class: "who" }, "result of a tool"), h("div", { class: "text mono" }, turn.text));
  return h("div", { class: "message user" }, h("div", { class: "who" }, "you"), (turn.images ?? []).map((url) => h("img", { src: url, alt: "The image that you sent" })), turn.text && h("div", { class: "text" }, turn.text));
}

// --- settings ---------------------------------------------------------------------------------

function settingsForm(pane, context) {
  const { settings } = pane;
  const set = (name) => (event) => { settings[name] = event.target.value; keep(); };
  const input = (name, placeholder, more = {}) => h("input", { value: settings[name], placeholder, inputmode: "decimal", spellcheck: "false", autocomplete: "off", oninput: set(name), ...more });
  const area = (name, rows, placeholder = "") => h("textarea", { class: "code", rows, value: settings[name], placeholder, spellcheck: "false", oninput: set(name) });
  const choice = (name, options, changed) => {
    const select = h("select", { onchange: (event) => { set(name)(event); changed?.(event.target.value); } }, options.map(([value, text]) => h("option", { value }, text)));
    select.value = settings[name];
    return select;
  };
  const schema = field("JSON schema", area("schema", 6, SCHEMA));
  const showSchema = () => { schema.hidden = settings.format !== "json_schema"; };
  showSchema();
  const models = [["", `default${context.models[0] ? ` (${context.models[0].id})` : ""}`], ...context.models.map((each) => [each.id, each.parent ? `${each.id} · adapter of ${each.parent}` : each.id])];
  return [
    field("Model", choice("model", models, () => redraw())),
    field("System message", h("textarea", { rows: 2, value: settings.system, oninput: set("system") })),
    h("div", { class: "two" },
      field("Temperature", input("temperature", "1")), field("Most tokens", input("max_tokens", "to the end")),
      field("top_p", input("top_p", "1, off")), field("top_k", input("top_k", "0, off")),
      field("Seed", input("seed", "random")), field("Repetition penalty", input("repetition_penalty", "1, off")),
      field("Presence penalty", input("presence_penalty", "0")), field("Frequency penalty", input("frequency_penalty", "0"))),
    field("Stop, one a line", area("stop", 1)),
    field("Reasoning", choice("reasoning", [["", "the model's default"], ["none", "off"], ["low", "low"], ["medium", "medium"], ["high", "high"]])),
    check("Probabilities of each token", settings.logprobs, (value) => { settings.logprobs = value; keep(); }),
    h("hr"),
    field("Answer as", choice("format", [["text", "text"], ["json_object", "JSON"], ["json_schema", "JSON by a schema"]], () => { showSchema(); })), schema,
    h("details", { open: Boolean(settings.tools) }, h("summary", null, "Tools"), h("div", null,
      field("Functions, as OpenAI's tools", area("tools", 7, WEATHER)),
      field("Choice", choice("tool_choice", [["auto", "the model decides"], ["required", "must call"], ["none", "must not call"]])))),
  ];
}

// --- the view ---------------------------------------------------------------------------------

export function render(root, context) {
  if (!state) {
    restore();
    // After a reload answers go on where they were.
    for (const pane of state.panes) for (const turn of pane.turns) if (turn.answer && !turn.answer.done) follow(turn.answer);
  }
  let images = [];
  const views = new Map();
  const panes = h("div", { class: "panes" });
  const settings = h("aside", { class: "settings", "aria-label": "Settings of the call" });
  const text = h("textarea", { rows: 1, "aria-label": "Your message", placeholder: "Ask something", value: state.draft });
  const thumbs = h("div", { class: "thumbs", hidden: true });
  const send = h("button", { type: "button", class: "primary" }, "Send");
  const file = h("input", { type: "file", accept: "image/png,image/jpeg,image/webp,image/gif", multiple: true, hidden: true, "aria-label": "Images" });
  const attach = h("button", { type: "button", class: "quiet icon", title: "Add images", "aria-label": "Add images", onclick: () => file.click() }, icon(ICONS.image));
  const box = h("div", { class: "box" }, thumbs, text, h("div", { class: "row" }, attach, file, h("span", { class: "small muted" }, "Enter sends, Shift+Enter breaks the line"), h("span", { class: "spacer" }), send));
  const compare = h("button", { type: "button", "aria-pressed": String(state.compare), onclick: () => { state.compare = !state.compare; compare.setAttribute("aria-pressed", String(state.compare)); keep(true); drawAll(); } }, "Side by side");
  const sheet = h("button", { type: "button", class: "only-narrow", "aria-expanded": "false", onclick: () => showSheet(!settings.classList.contains("shown")) }, "Settings");

  const takesImages = () => shownPanes().every((pane) => {
    const model = context.models.find((each) => each.id === pane.settings.model) ?? context.models[0];
    return context.session.images.includes(model?.parent ?? model?.id);
  });
  const busy = () => shownPanes().some((pane) => pane.turns.some((turn) => turn.answer && !turn.answer.done));

  function showSheet(shown) {
    settings.classList.toggle("shown", shown);
    sheet.setAttribute("aria-expanded", String(shown));
    if (shown) settings.querySelector("button, select, input")?.focus();
  }

  function drawSettings() {
    const pane = state.panes[state.compare ? state.tab : 0];
    const tabs = state.compare && h("div", { class: "chips", role: "group", "aria-label": "Side" }, ["Left", "Right"].map((name, index) => h("button", { type: "button", "aria-pressed": String(index === state.tab), onclick: () => { state.tab = index; drawSettings(); } }, name)));
    put(settings, h("div", { class: "row" }, h("h2", null, "Settings"), h("span", { class: "spacer" }), tabs, h("button", { type: "button", class: "quiet icon only-narrow", "aria-label": "Close the settings", onclick: () => { showSheet(false); sheet.focus(); } }, icon(ICONS.close))), settingsForm(pane, context));
  }

  function drawPane(pane, index) {
    const inner = h("div", { class: "inner" });
    const element = h("section", { class: "pane", tabindex: 0, "aria-label": state.compare ? ["Left", "Right"][index] : "Conversation" }, inner);
    if (state.compare) inner.append(h("div", { class: "pane-head" }, h("span", { class: "tag accent" }, ["Left", "Right"][index]), h("span", null, pane.settings.model || context.models[0]?.id || "default model"), h("span", null, `temperature ${pane.settings.temperature || "1"}`)));
    if (!pane.turns.length) inner.append(index === 0 || !state.compare ? starter() : h("p", { class: "muted" }, "The same message goes to both sides; the settings are each side's own."));
    for (const turn of pane.turns) inner.append(turnView(turn, pane, context, views));
    return element;
  }

  function starter() {
    return h("div", { class: "starter" }, h("div", null, h("h2", null, "Talk to the model"), h("p", { class: "muted" }, "Hover over a token, or go through the text with the arrow keys, to see what else it could have been.")),
      h("div", { class: "row" }, STARTERS.map(([prompt, more]) => h("button", { type: "button", onclick: () => { for (const pane of shownPanes()) Object.assign(pane.settings, more); submit(prompt); drawSettings(); } }, prompt))));
  }

  function drawAll() {
    views.clear();
    hideTip();
    put(panes, shownPanes().map(drawPane));
    drawSettings();
    refresh();
    for (const each of panes.children) each.scrollTop = each.scrollHeight;
  }

  function refresh() {
    const working = busy();
    send.textContent = working ? "Stop" : "Send";
    send.classList.toggle("primary", !working);
    attach.hidden = !takesImages();
    thumbs.hidden = !images.length;
    put(thumbs, images.map((url, index) => h("div", { class: "thumb" }, h("img", { src: url, alt: `Image ${index + 1}` }), h("button", { type: "button", "aria-label": `Remove image ${index + 1}`, onclick: () => { images.splice(index, 1); refresh(); } }, "×"))));
  }

  let frame = 0;
  const dirty = new Set();
  redraw = (answer) => {
    if (!answer || !views.has(answer)) { if (!answer) drawAll(); else refresh(); return; }
    dirty.add(answer);
    frame ||= setTimeout(() => {
      frame = 0;
      const near = [...panes.children].map((each) => each.scrollHeight - each.scrollTop - each.clientHeight < 80);
      for (const each of dirty) views.get(each)?.();
      dirty.clear();
      [...panes.children].forEach((each, index) => { if (near[index]) each.scrollTop = each.scrollHeight; });
      refresh();
    }, 40);
  };
  context.signal.addEventListener("abort", () => { redraw = () => {}; hideTip(); });

  function submit(prompt) {
    const turn = { role: "user", text: prompt, images };
    attempt(() => {
      for (const pane of shownPanes()) bodyOf({ settings: pane.settings, turns: [...pane.turns, turn] });
      for (const pane of shownPanes()) { pane.turns.push(turn); start(pane); }
      images = [];
      text.value = state.draft = "";
      grow();
    });
  }

  function act() {
    if (busy()) stopAll();
    else if (text.value.trim() || images.length) submit(text.value);
  }

  async function addImages(files) {
    for (const each of files) {
      if (!each.type.startsWith("image/")) continue;
      if (!takesImages()) { toast("The model takes text only", true); return; }
      if (each.size > IMAGE_BYTES) { toast(`${each.name} is larger than 8 MiB; scale it down`, true); continue; }
      images.push(await new Promise((resolve) => { const reader = new FileReader(); reader.onload = () => resolve(reader.result); reader.readAsDataURL(each); }));
    }
    refresh();
  }

  const grow = () => { text.style.height = "auto"; text.style.height = `${text.scrollHeight}px`; };
  text.addEventListener("input", () => { state.draft = text.value; grow(); keep(); });
  text.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); if (!busy()) act(); }
  });
  text.addEventListener("paste", (event) => { if (event.clipboardData.files.length) { event.preventDefault(); addImages(event.clipboardData.files); } });
  box.addEventListener("dragover", (event) => { event.preventDefault(); box.classList.add("drop"); });
  box.addEventListener("dragleave", () => box.classList.remove("drop"));
  box.addEventListener("drop", (event) => { event.preventDefault(); box.classList.remove("drop"); addImages(event.dataTransfer.files); });
  file.addEventListener("change", () => { addImages(file.files); file.value = ""; });
  send.addEventListener("click", act);
  settings.addEventListener("keydown", (event) => { if (event.key === "Escape") { showSheet(false); sheet.focus(); } });

  put(root, h("div", { class: "play" },
    h("header", null, h("h1", null, "Playground"), h("span", { class: "spacer" }), compare,
      h("button", { type: "button", onclick: () => attempt(() => program(bodyOf({ settings: shownPanes()[0].settings, turns: [...shownPanes()[0].turns, { role: "user", text: text.value || "Hello" }] }), context)) }, "Get code"),
      h("button", { type: "button", onclick: () => { stopAll(); for (const pane of state.panes) pane.turns = []; keep(true); drawAll(); text.focus(); } }, "New chat"), sheet),
    panes, h("div", { class: "composer" }, box), settings));
  drawAll();
  grow();
}

