// The turns of a conversation, drawn: what was said, and what can be done with it.

import { messageOf } from "./chat.js";
import { parentOf } from "./conversations.js";
import { copy, field, h, icon, ICONS, put, showDialog } from "./dom.js";
import { bytes, duration, number } from "./format.js";
import { Markdown } from "./markdown.js";
import { counts, programOf } from "./request.js";
import { curl, python } from "./snippets.js";
import { TokenText } from "./tokens.js";
import { foldedCauses } from "./waterfall.js";

const FINISHES = { stop: "ended", length: "cut at max tokens", tool_calls: "calls a tool", abort: "cancelled", content_filter: "cut by a guardrail", stopped: "stopped" };
const LEAST_MS = 50;
const LONG = 600;

const action = (name, path, onclick, more = {}) => h("button", { type: "button", class: "quiet icon", title: name, "aria-label": name, onclick, ...more }, icon(path));

/** Buttons between the versions of a turn: edited questions, regenerated answers. */
function versions(turn, pane, does) {
  const parent = parentOf(pane, turn);
  if (parent.children.length < 2) return null;
  const at = parent.children.indexOf(turn);
  const go = (step) => () => { parent.shown = at + step; does.changed(); };
  return h("span", { class: "versions" },
    action("Earlier version", ICONS.left, go(-1), { disabled: at === 0 }),
    h("span", { class: "num" }, `${at + 1}/${parent.children.length}`),
    action("Later version", ICONS.right, go(1), { disabled: at === parent.children.length - 1 }));
}

/** A text that grows: as Markdown, or by its tokens. Only the one that is shown is drawn. */
class Shown {
  constructor(label) {
    this.markdown = new Markdown(label);
    this.label = label;
    this.element = h("div", null, this.markdown.element);
  }

  update(text, tokens, streaming, byTokens) {
    const view = byTokens && tokens().length ? (this.tokens ??= new TokenText(this.label)) : this.markdown;
    if (view.element.parentNode !== this.element) put(this.element, view.element);
    if (view === this.markdown) view.update(text, streaming);
    else view.update(text, tokens(), streaming);
  }
}

/** An answer: its element, and a function that draws what has come since. */
export function answerView(turn, pane, does) {
  const { answer } = turn;
  const reasoning = new Shown("Reasoning");
  const text = new Shown("Answer");
  const fold = h("details", { class: "reasoning", hidden: true }, h("summary", null, "Reasoning"), reasoning.element);
  const calls = h("div", { class: "message" });
  const meta = h("div", { class: "meta" });
  const time = h("div", null);
  const notice = h("div", { class: "notice", role: "status" });
  const actions = h("div", { class: "actions" });
  const body = h("div", { class: "message", "aria-live": "polite", "aria-busy": "true" }, fold, text.element, calls);
  const element = h("div", { class: "message assistant" }, h("div", { class: "who" }, does.nameOf(answer)), body, notice, actions, meta, time);
  let ended = false;
  const draw = () => {
    const streaming = !answer.done;
    const of = (kind) => () => answer.tokens.filter((each) => each.k === kind);
    fold.hidden = !answer.reasoning;
    if (!ended) fold.open = streaming && !answer.text;
    reasoning.update(answer.reasoning, of("reasoning"), streaming && !answer.text, turn.byTokens);
    text.element.hidden = !answer.text && !streaming;
    text.update(answer.text, of("text"), streaming && (Boolean(answer.text) || !answer.reasoning), turn.byTokens);
    body.setAttribute("aria-busy", String(streaming));
    if (streaming || !ended) drawNotice();
    if (streaming || ended) return;
    ended = true;
    fold.open = false;
    put(calls, answer.calls.filter(Boolean).map((each) => callView(each, turn)));
    if (answer.finish === "tool_calls" && !turn.children.length) calls.append(h("div", { class: "row" }, h("button", { type: "button", class: "primary", onclick: () => does.sendResults(turn, calls) }, "Send the results")));
    drawActions();
    put(meta, facts(answer).map((each) => h("span", null, each)),
      answer.stream && h("a", { href: `#/requests/${encodeURIComponent(answer.stream)}` }, "Open the request"));
    put(time, answer.usage?.time && foldedCauses(answer.usage.time));
  };
  function drawNotice() {
    notice.className = answer.error ? "notice bad" : "notice";
    const said = [answer.error, answer.code && h("code", null, ` ${answer.code}`)];
    const lost = answer.code === "stream_not_found" && (answer.restarted ? `The server was restarted and ${answer.text ? "the rest of " : ""}this answer is lost. Try again.` : "The server no longer has this answer. Try again.");
    if (answer.error) put(notice, lost ? [h("p", null, lost), h("details", { class: "small" }, h("summary", null, "Details"), said)] : h("p", null, said), answer.done && !counts(answer) && h("p", { class: "small" }, "The message and this failed answer are left out of the next call."),
      answer.done && h("div", { class: "row" }, h("button", { type: "button", onclick: () => does.edit(parentOf(pane, turn)) }, "Edit the message"), h("button", { type: "button", onclick: () => does.regenerate(turn) }, "Try again")));
    else put(notice, answer.waiting || (answer.done && !counts(answer) && "No text: the message is left out of the next call."));
    notice.hidden = !notice.textContent;
  }
  function drawActions() {
    put(actions, versions(turn, pane, does),
      answer.text && action("Copy", ICONS.copy, () => copy(answer.text)),
      action("Regenerate", ICONS.again, () => does.regenerate(turn)),
      action("Branch into a new chat", ICONS.branch, () => does.branch(turn)),
      answer.tokens.length > 0 && h("button", { type: "button", class: "quiet", "aria-pressed": String(Boolean(turn.byTokens)), title: "Each token with its probability and its alternatives", onclick: () => { turn.byTokens = !turn.byTokens; drawActions(); draw(); does.keep(); } }, "Tokens"),
      answer.body.messages && h("button", { type: "button", class: "quiet", onclick: () => program(answer.body, does.session) }, "Code"));
  }
  draw();
  return { element, draw };
}

function facts(answer) {
  const { usage } = answer;
  const tokens = usage?.completion_tokens ?? answer.tokens.length;
  const found = [];
  if (answer.finish) found.push((FINISHES[answer.finish] ?? answer.finish) + (answer.finish === "length" && answer.body.max_tokens ? ` (${answer.body.max_tokens})` : ""));
  if (usage) found.push(`${number(usage.prompt_tokens)} + ${number(tokens)} tokens`);
  const [first, all] = [answer.first, answer.last].map((each) => duration((each - answer.began) * 1e6));
  if (answer.first) found.push(first === all ? `after ${all}` : `first after ${first}, all after ${all}`);
  // After a resume tokens come that were made before; a moment is too short for a rate.
  const took = answer.last - answer.first;
  if (answer.first && !answer.resumed && tokens > 1 && took >= LEAST_MS) found.push(`${number((tokens - 1) / (took / 1e3))} tokens/s`);
  const cached = usage?.prompt_tokens_details?.cached_tokens;
  if (cached) found.push(`${number(cached)} cached`);
  const accepted = usage?.completion_tokens_details?.accepted_prediction_tokens;
  if (accepted) found.push(`${number(accepted)} drafted`);
  if (answer.version) found.push(answer.version.replace("-", " "));
  if (answer.resumed && !answer.error) found.push(`resumed ${answer.resumed}×`);
  return found;
}

function pretty(text) {
  try { return JSON.stringify(JSON.parse(text), null, 2); } catch { return text; }
}

const callView = (each, turn) => h("div", { class: "call" },
  h("header", null, h("span", { class: "tag accent" }, "tool"), h("code", null, each.name)),
  h("pre", null, pretty(each.arguments)),
  !turn.children.length && h("div", { class: "result" }, field("Result, as your program would return it", h("textarea", { class: "code", rows: 2, data: { call: each.id }, placeholder: "{}" }))));

/** A dialog with the call as curl, Python and JSON. */
export function program(body, session) {
  const pre = h("pre", { class: "snippet", tabindex: 0 });
  const call = programOf(body);
  const forms = { curl: () => curl(call, session.keys), Python: () => python(call, session.keys), JSON: () => JSON.stringify(call, null, 2) };
  const buttons = Object.entries(forms).map(([name, make]) => h("button", { type: "button", "aria-pressed": "false", onclick: (event) => {
    pre.textContent = make();
    for (const each of buttons) each.setAttribute("aria-pressed", String(each === event.currentTarget));
  } }, name));
  showDialog("This call as a program", h("div", { class: "row" }, h("div", { class: "chips" }, buttons), h("button", { type: "button", onclick: () => copy(pre.textContent) }, "Copy")), pre);
  buttons[0].click();
}

/** A turn that is no answer: the user's, or a tool's result. */
export function saidView(turn, pane, does) {
  if (turn.role === "tool") return h("div", { class: "message" }, h("div", { class: "who" }, "result of a tool"), h("pre", { class: "box-text mono" }, turn.text));
  const answer = turn.children[turn.shown]?.answer;
  const failed = answer && !counts(answer);
  return h("div", { class: failed ? "message user failed" : "message user" }, h("h2", { class: "visually-hidden" }, "You"),
    (turn.images ?? []).map((url) => h("img", { src: url, alt: "The image that you sent" })),
    turn.files?.length > 0 && h("div", { class: "files" }, turn.files.map((each) => h("span", { class: "tag", title: each.text.slice(0, 500) }, `${each.name} · ${bytes(each.text.length)}`))),
    turn.text && h("div", { class: "text", tabindex: turn.text.length > LONG ? 0 : null }, turn.text),
    h("div", { class: "actions" }, versions(turn, pane, does),
      turn.text && action("Copy", ICONS.copy, () => copy(turn.text)),
      action("Edit and send again", ICONS.edit, () => does.edit(turn))));
}

/** The form that edits a turn in its place. */
export function editView(turn, { send, cancel }) {
  const text = h("textarea", { value: turn.text, "aria-label": "Edit your message", rows: Math.min(12, turn.text.split("\n").length + 1) });
  const done = () => { if (text.value.trim() || turn.images?.length || turn.files?.length) send(text.value); };
  text.addEventListener("keydown", (event) => {
    if (event.key === "Escape") { event.stopPropagation(); cancel(); }
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); done(); }
  });
  return h("div", { class: "message user editing" }, text, h("div", { class: "row end" }, h("button", { type: "button", class: "quiet", onclick: cancel }, "Cancel"), h("button", { type: "button", class: "primary", onclick: done }, "Send again")));
}

/** The messages of a conversation, as an export has them. */
export const exported = (turns) => turns.map((turn) => (turn.answer ? { ...messageOf(turn.answer), ...(turn.answer.error && { error: turn.answer.error }), ...(turn.answer.usage && { usage: turn.answer.usage }) } : { role: turn.role, content: turn.text, ...(turn.role === "tool" && { tool_call_id: turn.id }), ...(turn.images?.length && { images: turn.images }), ...(turn.files?.length && { files: turn.files }) }));
