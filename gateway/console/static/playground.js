// The playground: conversations with one model, or with two models or settings side by side.

import { answerView, editView, exported, program, saidView } from "./answer.js";
import { cancel, newAnswer, run } from "./chat.js";
import { allTurns, branch, copyTurns, follow, kept, newConversation, parentOf, path, titleOf } from "./conversations.js";
import { drawConversations } from "./conversation_list.js";
import { confirmed, field, h, icon, ICONS, put, showDialog, toast } from "./dom.js";
import { examplesFor, samplePicture } from "./examples.js";
import { feed, loadingOf } from "./feed.js";
import { readFile, save } from "./files.js";
import { bytes } from "./format.js";
import { bodyOf, counts, EXAMPLE_SCHEMA, EXAMPLE_TOOLS, FieldError, fieldOf, newSettings, setOf } from "./request.js";
import { settingsForm } from "./settings.js";
import { hideTip } from "./tokens.js";

const CURRENT = "console.conversation";
const SIDES = ["Left", "Right"];
const FRAME_MS = 40;

// These outlive the view: an answer goes on while another view or another conversation is shown.
let conversation = null;
let heads = [];
const running = new Map(); // answer → {stop, conversation}
let redraw = () => {};
let changedList = () => {};
const attached = new Map(); // a conversation's id → the files of the message that is not sent yet

const draftOf = (id) => `console.draft.${id}`;

const fresh = () => newConversation([newSettings(), newSettings()]);

// --- kept in the browser ------------------------------------------------------------------------

const waits = new Map();
let cost = 0;

/** Store a conversation soon, the later the longer that takes; one without turns is not stored. */
function keep(of = conversation, ms = Math.max(300, cost * 20)) {
  if (!of.panes.some((pane) => pane.root.children.length)) return;
  if (waits.has(of.id) && ms) return;
  clearTimeout(waits.get(of.id));
  waits.set(of.id, setTimeout(() => {
    waits.delete(of.id);
    write(of);
  }, ms));
}

async function write(of) {
  const began = performance.now();
  const writing = kept.write(of);
  cost = performance.now() - began;
  try { await writing; } catch (error) { toast(`The chat could not be stored: ${error.message}`, true); return; }
  heads = await kept.list();
  changedList();
}

addEventListener("pagehide", () => { if (conversation && waits.has(conversation.id)) write(conversation); });

async function opened(id) {
  const found = [...running.values()].find((each) => each.conversation.id === id)?.conversation ?? (conversation?.id === id ? conversation : await kept.read(id));
  if (!found) return null;
  for (const pane of found.panes) pane.settings = { ...newSettings(), ...pane.settings };
  // After a reload answers go on where they were.
  for (const { answer } of allTurns(found)) if (answer && !answer.done && !running.has(answer)) go(answer, found);
  return found;
}

function show(found) {
  conversation = found;
  try { sessionStorage.setItem(CURRENT, found.id); } catch { /* a reload begins anew */ }
}

// --- calls --------------------------------------------------------------------------------------

function go(answer, of) {
  const stop = new AbortController();
  running.set(answer, { stop, conversation: of });
  run(answer, () => { redraw(answer); keep(of); }, stop.signal).finally(() => {
    running.delete(answer);
    answer.done = true;
    redraw(answer, true);
    keep(of, 0);
  });
}

function stopAll(of) {
  for (const [answer, each] of running) {
    if (each.conversation !== of) continue;
    each.stop.abort();
    answer.finish ||= "stopped";
    cancel(answer).catch(() => {});
  }
}

const shownPanes = () => conversation.panes.slice(0, conversation.compare ? 2 : 1);
const busy = () => [...running.values()].some((each) => each.conversation === conversation);

// --- the view -----------------------------------------------------------------------------------

export async function render(root, context) {
  if (!conversation) {
    heads = await kept.list();
    let last = null;
    try { last = sessionStorage.getItem(CURRENT); } catch { /* as above */ }
    // One without turns is not stored; its draft is.
    show((last && (await opened(last))) || Object.assign(fresh(), last && { id: last }));
    if (context.signal.aborted) return;
  }
  new Playground(root, context);
}

class Playground {
  constructor(root, context) {
    this.context = context;
    this.views = new Map();
    this.dirty = new Set();
    this.problems = new WeakMap();
    this.tab = 0;
    this.editing = null;
    this.#build(root);
    redraw = (answer, ended) => this.#answered(answer, ended);
    changedList = () => this.list.draw(heads, conversation.id);
    const { signal } = context;
    signal.addEventListener("abort", () => { redraw = changedList = () => {}; hideTip(); this.list.close(); });
    document.addEventListener("keydown", (event) => this.#key(event), { signal });
    document.addEventListener("palette", (event) => event.detail.push(...this.#commands()), { signal });
    // Another tab may have gone on with this conversation.
    document.addEventListener("visibilitychange", () => { if (!document.hidden) this.#reread(); }, { signal });
    this.drawAll();
    feed.on(() => this.#await(), signal);
    this.#await();
  }

  /** Close the box while the model loads, and open it by itself. */
  #await() {
    const why = this.context.session.starting ? "The gateway is starting" : loadingOf(feed.latest?.status, this.#model(conversation.panes[0]).id);
    const loading = this.context.session.starting && feed.latest?.status?.lanes.map((lane) => loadingOf(feed.latest.status, lane.model)).find(Boolean);
    this.loading = loading || why;
    const opens = this.text.disabled && !this.loading;
    this.text.disabled = this.attach.disabled = Boolean(this.loading);
    this.send.disabled = Boolean(this.loading) && !busy();
    this.text.placeholder = this.loading || "Ask something";
    const state = this.panes.querySelector(".starter .loading");
    if (state && state.textContent !== this.loading) state.textContent = this.loading;
    for (const each of this.panes.querySelectorAll(".starter .example")) each.disabled = Boolean(this.loading);
    if (opens && document.activeElement === document.body) this.text.focus();
  }

  #build(root) {
    const button = (name, path, onclick, more = {}) => h("button", { type: "button", title: name, onclick, ...more }, icon(path), h("span", null, name));
    this.title = h("h1", { class: "ellipsis" });
    this.panes = h("div", { class: "panes" });
    this.settings = h("aside", { class: "settings", "aria-label": "Settings of the call" });
    this.text = h("textarea", { rows: 1, "aria-label": "Your message", placeholder: "Ask something" });
    this.thumbs = h("div", { class: "thumbs", hidden: true });
    this.given = h("p", { class: "small muted given" });
    this.refused = h("p", { class: "small error refused", role: "alert" });
    this.send = h("button", { type: "button", class: "primary" }, "Send");
    this.file = h("input", { type: "file", multiple: true, hidden: true, "aria-label": "Images or text files" });
    this.attach = h("button", { type: "button", class: "quiet icon", onclick: () => this.file.click() }, icon(ICONS.attach));
    this.hint = h("span", { class: "small muted ellipsis hint" });
    this.toEnd = h("button", { type: "button", class: "icon to-end", title: "To the end", "aria-label": "To the end", hidden: true, onclick: () => this.#scroll(true) }, icon(ICONS.end));
    this.box = h("div", { class: "box" }, this.given, this.thumbs, this.refused, this.text, h("div", { class: "row nowrap" }, this.attach, this.file, this.hint, h("span", { class: "spacer" }), this.send));
    this.compare = button("Side by side", ICONS.split, () => this.#compare());
    this.sheet = button("Settings", ICONS.settings, () => this.#showSheet(!this.settings.classList.contains("shown")), { class: "only-narrow", "aria-expanded": "false" });
    this.list = drawConversations({
      open: (id) => this.#open(id), fresh: () => this.#fresh(), about: (id) => this.#about(id),
      imported: (messages, settings) => this.#imported(messages, settings), removeAll: () => this.#removeAll(),
    });
    const element = h("div", { class: "play" },
      h("header", null, button("Chats", ICONS.list, () => this.list.toggle(), { class: "only-phone" }), this.title, h("span", { class: "spacer" }), this.compare,
        button("Get code", ICONS.code, () => this.#code()), button("New chat", ICONS.fresh, () => this.#fresh()), this.sheet),
      this.panes, h("div", { class: "composer" }, this.toEnd, this.box), this.settings);
    put(root, element);
    put(document.getElementById("side-view"), this.list.element);
    this.#showDraft();
    this.text.addEventListener("input", () => this.#keepDraft());
    this.text.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); if (!busy()) this.#act(); }
      const said = path(shownPanes()[0]).findLast((turn) => turn.role === "user");
      if (event.key === "ArrowUp" && !this.text.value && said && !busy()) { event.preventDefault(); this.#edit(said); }
    });
    this.text.addEventListener("paste", (event) => { if (event.clipboardData.files.length) { event.preventDefault(); this.#add(event.clipboardData.files); } });
    element.addEventListener("dragover", (event) => { if (event.dataTransfer.types.includes("Files")) { event.preventDefault(); this.box.classList.add("drop"); } });
    element.addEventListener("dragleave", (event) => { if (!element.contains(event.relatedTarget)) this.box.classList.remove("drop"); });
    element.addEventListener("drop", (event) => { if (event.dataTransfer.files.length) { event.preventDefault(); this.box.classList.remove("drop"); this.#add(event.dataTransfer.files); } });
    this.file.addEventListener("change", () => { this.#add([...this.file.files]); this.file.value = ""; });
    this.send.addEventListener("click", () => this.#act());
    this.settings.addEventListener("keydown", (event) => { if (event.key === "Escape" && this.settings.classList.contains("shown")) { event.stopPropagation(); this.#showSheet(false); this.sheet.focus(); } });
  }

  // --- what is not sent yet, of each chat ---

  get attached() {
    if (!attached.has(conversation.id)) attached.set(conversation.id, []);
    return attached.get(conversation.id);
  }

  #showDraft() {
    this.text.value = sessionStorage.getItem(draftOf(conversation.id)) ?? "";
    this.refused.textContent = "";
    this.#grow();
  }

  #keepDraft() {
    this.#grow();
    if (this.text.value) sessionStorage.setItem(draftOf(conversation.id), this.text.value);
    else sessionStorage.removeItem(draftOf(conversation.id));
  }

  #forget(id) {
    attached.delete(id);
    sessionStorage.removeItem(draftOf(id));
  }

  // --- what is served ---

  #model(pane) {
    const { session, models } = this.context;
    const id = pane.settings.model || session.default_model;
    const card = models.find((each) => each.id === id);
    return { id, ...session.models.find((each) => each.id === (card?.parent ?? id)) };
  }

  #takesImages() { return shownPanes().every((pane) => this.#model(pane).images); }

  // --- drawing ---

  drawAll() {
    this.views.clear();
    hideTip();
    const does = {
      session: this.context.session,
      nameOf: (answer) => (answer.imported ? "imported" : answer.body.model || this.context.session.default_model || "assistant"),
      keep: () => keep(),
      changed: () => { keep(); this.drawAll(); },
      edit: (turn) => this.#edit(turn),
      regenerate: (turn) => this.#regenerate(turn),
      branch: (turn) => this.#branch(turn),
      sendResults: (turn, calls) => this.#sendResults(turn, calls),
    };
    put(this.panes, shownPanes().map((pane, index) => this.#pane(pane, index, does)));
    this.#drawSettings();
    this.compare.setAttribute("aria-pressed", String(conversation.compare));
    this.refresh();
    this.#await();
    changedList();
    this.#scroll(true);
  }

  #pane(pane, index, does) {
    const inner = h("div", { class: "inner" });
    const element = h("section", { class: "pane", tabindex: 0, "aria-label": conversation.compare ? SIDES[index] : "Conversation" }, inner);
    element.stuck = true;
    element.addEventListener("scroll", () => { element.stuck = element.scrollHeight - element.scrollTop - element.clientHeight < 60; this.#showEnd(); }, { passive: true });
    if (conversation.compare) inner.append(h("div", { class: "pane-head" }, h("span", { class: "tag accent" }, SIDES[index]), h("span", null, does.nameOf({ body: pane.settings })), h("span", null, `temperature ${pane.settings.temperature || "1"}`)));
    const turns = path(pane);
    if (!turns.length) inner.append(index === 0 ? this.#starter(pane) : h("p", { class: "muted" }, "The same message goes to both sides; the settings are each side's own."));
    for (const turn of turns) {
      if (turn.answer) {
        const view = answerView(turn, pane, does);
        this.views.set(turn.answer, view.draw);
        inner.append(view.element);
      } else if (this.editing === turn) {
        const form = editView(turn, { send: (text) => this.#resend(turn, text), cancel: () => { this.editing = null; this.drawAll(); } });
        inner.append(form);
        queueMicrotask(() => { form.scrollIntoView({ block: "nearest" }); form.querySelector("textarea").focus(); });
      } else inner.append(saidView(turn, pane, does));
    }
    return element;
  }

  #starter(pane) {
    const model = this.#model(pane);
    if (model.chat === false) return h("div", { class: "starter" }, h("h2", null, "This model takes no conversations"), h("p", { class: "muted" }, `${model.id} has no chat template; call v1/completions, or choose another model in the settings.`));
    const touch = matchMedia("(hover: none)").matches;
    return h("div", { class: "starter" },
      h("div", null, h("h2", null, model.id ? `Talk to ${model.id}` : "Talk to the model"), h("p", { class: "loading", role: "status" }), h("p", { class: "muted" }, `“Tokens” under an answer shows its tokens; ${touch ? "tap one" : "point at one, or use the arrow keys,"} to see what else it could have been.`)),
      h("div", { class: "row" }, (this.context.session.starting ? [] : examplesFor(model)).map(([prompt, more, picture]) => {
        const url = picture && samplePicture();
        return h("button", { type: "button", class: "example", onclick: () => {
          for (const each of shownPanes()) Object.assign(each.settings, more);
          if (url) this.attached.push({ url, name: "shapes.png" });
          this.#submit(prompt);
        } }, url && h("img", { src: url, alt: "A sample picture:" }), prompt);
      })));
  }

  #drawSettings() {
    const pane = conversation.panes[conversation.compare ? this.tab : 0];
    const problems = this.#problemsOf(pane);
    const redrawing = ["format", "model", "logprobs"];
    const changed = (name) => {
      if (name === "format" && pane.settings.format === "json_schema") pane.settings.schema ||= EXAMPLE_SCHEMA;
      keep();
      this.refresh();
      if (!redrawing.includes(name)) return;
      const focused = document.activeElement?.dataset.setting;
      if (name === "model") this.drawAll();
      else this.#drawSettings();
      if (focused) this.settings.querySelector(`[data-setting=${focused}]`)?.focus();
    };
    const tabs = conversation.compare && h("div", { class: "chips", role: "group", "aria-label": "Side" }, SIDES.map((name, index) => h("button", { type: "button", "aria-pressed": String(index === this.tab), onclick: () => { this.tab = index; this.#drawSettings(); } }, name)));
    put(this.settings, h("div", { class: "row" }, h("h2", null, "Settings"), h("span", { class: "spacer" }), tabs, h("button", { type: "button", class: "quiet icon only-narrow", "aria-label": "Close the settings", onclick: () => { this.#showSheet(false); this.sheet.focus(); } }, icon(ICONS.close))),
      settingsForm(pane.settings, problems, { models: this.context.models, byDefault: this.context.session.default_model }, changed));
  }

  #problemsOf(pane) {
    if (!this.problems.has(pane)) this.problems.set(pane, {});
    return this.problems.get(pane);
  }

  /** Show each error at the field that it is of. */
  #problem(pane, problems) {
    Object.assign(this.#problemsOf(pane), problems);
    if (conversation.compare) this.tab = conversation.panes.indexOf(pane);
    this.#drawSettings();
    this.#showSheet(true);
    const control = this.settings.querySelector("[aria-invalid=true]");
    control?.focus({ preventScroll: true });
    control?.closest(".field").scrollIntoView({ block: "center" });
  }

  refresh() {
    const working = busy();
    this.title.textContent = path(conversation.panes[0]).length ? titleOf(conversation) : "Playground";
    this.send.textContent = working ? "Stop" : "Send";
    this.send.title = working ? "Stop (Esc)" : "Send (Enter)";
    this.send.classList.toggle("primary", !working);
    const images = this.#takesImages();
    const what = images ? "Add images or text files" : "Add text files";
    this.attach.title = what;
    this.attach.setAttribute("aria-label", what);
    this.hint.textContent = working ? "Esc stops" : conversation.compare ? "Goes to both sides" : `${this.#model(conversation.panes[0]).id || "the default model"} · Enter sends, Shift+Enter breaks the line, Ctrl+K has all commands`;
    const given = [...new Set(shownPanes().flatMap((pane) => setOf(pane.settings)))];
    put(this.given, given.length > 0 && [given.join(" · "), h("button", { type: "button", class: "quiet small", onclick: () => this.#reset() }, "Reset")]);
    this.thumbs.hidden = !this.attached.length;
    put(this.thumbs, this.attached.map((each, index) => h("div", { class: "thumb" },
      each.url ? h("img", { src: each.url, alt: each.name }) : h("span", { class: "tag" }, `${each.name} · ${bytes(each.text.length)}`),
      h("button", { type: "button", "aria-label": `Remove ${each.name}`, onclick: () => { this.attached.splice(index, 1); this.refresh(); } }, "×"))));
  }

  #reset() {
    for (const pane of shownPanes()) Object.assign(pane.settings, { system: "", max_tokens: "", stop: "" });
    keep();
    this.drawAll();
    this.text.focus();
  }

  /** Draw what has come of an answer, at most once a frame, and less often where drawing takes long. */
  #answered(answer, ended) {
    if (ended) {
      const pane = conversation.panes.find((each) => path(each).some((turn) => turn.answer === answer));
      if (pane && answer.error && !counts(answer)) { this.drawAll(); const name = fieldOf(answer.param); if (name) this.#problem(pane, { [name]: answer.error }); }
      this.refresh();
    }
    if (!this.views.has(answer)) return;
    this.dirty.add(answer);
    if (this.frame) return;
    this.frame = setTimeout(() => requestAnimationFrame(() => {
      const began = performance.now();
      for (const each of this.dirty) this.views.get(each)?.();
      this.dirty.clear();
      this.#scroll(false);
      this.wait = Math.min(500, 4 * (performance.now() - began));
      this.frame = 0;
    }), Math.max(FRAME_MS, this.wait ?? 0));
  }

  #scroll(always) {
    for (const each of this.panes.children) if (always || each.stuck) { each.scrollTop = each.scrollHeight; each.stuck = true; }
    this.#showEnd();
  }

  #showEnd() { this.toEnd.hidden = [...this.panes.children].every((each) => each.stuck); }

  #grow() {
    this.text.style.height = "auto";
    this.text.style.height = `${this.text.scrollHeight}px`;
  }

  #showSheet(shown) {
    this.settings.classList.toggle("shown", shown);
    this.sheet.setAttribute("aria-expanded", String(shown));
    if (shown) this.settings.querySelector("button, select, input")?.focus();
  }

  // --- actions ---

  /** Do what makes calls; an error of a setting is shown at its field, before anything has changed. */
  #attempt(pane, work) {
    try { return work(); } catch (error) {
      if (!(error instanceof FieldError)) throw error;
      this.#problem(pane, error.problems);
      return undefined;
    }
  }

  #call(pane, before) {
    const turns = path(pane);
    return this.#attempt(pane, () => bodyOf(pane.settings, [...turns.slice(0, turns.indexOf(before) + 1)]));
  }

  /** Add an answer after a turn, and begin its call. */
  #start(pane, parent, body) {
    const turn = follow(parent, { role: "answer", answer: newAnswer(body) });
    go(turn.answer, conversation);
    conversation.updated = Date.now();
    keep(conversation, 0);
  }

  #submit(prompt) {
    if (busy()) return;
    const turn = { role: "user", text: prompt, images: this.attached.filter((each) => each.url).map((each) => each.url), files: this.attached.filter((each) => !each.url) };
    const panes = shownPanes();
    const bodies = panes.map((pane) => this.#attempt(pane, () => bodyOf(pane.settings, [...path(pane), turn])));
    if (bodies.some((each) => !each)) return;
    panes.forEach((pane, index) => this.#start(pane, follow(path(pane).at(-1) ?? pane.root, turn), bodies[index]));
    attached.delete(conversation.id);
    this.refused.textContent = "";
    this.text.value = "";
    this.#keepDraft();
    this.drawAll();
  }

  #act() {
    if (busy()) stopAll(conversation);
    else if (this.text.value.trim() || this.attached.length) this.#submit(this.text.value);
  }

  #paneOf(turn) { return conversation.panes.find((pane) => path(pane).includes(turn)); }

  #edit(turn) {
    if (busy()) return;
    this.editing = turn;
    this.drawAll();
  }

  #resend(turn, text) {
    const pane = this.#paneOf(turn);
    const parent = parentOf(pane, turn);
    const turns = path(pane);
    const body = this.#attempt(pane, () => bodyOf(pane.settings, [...turns.slice(0, turns.indexOf(turn)), { ...turn, text }]));
    if (!body) return;
    this.editing = null;
    const { images, files } = turn;
    this.#start(pane, follow(parent, { role: "user", text, images, files }), body);
    this.drawAll();
  }

  #regenerate(turn) {
    if (busy()) return;
    const pane = this.#paneOf(turn);
    const parent = parentOf(pane, turn);
    const body = this.#call(pane, parent);
    if (!body) return;
    this.#start(pane, parent, body);
    this.drawAll();
  }

  #sendResults(turn, calls) {
    const pane = this.#paneOf(turn);
    let end = turn;
    const results = [...calls.querySelectorAll("textarea")].map((each) => ({ role: "tool", id: each.dataset.call, text: each.value || "{}" }));
    const body = this.#attempt(pane, () => bodyOf(pane.settings, [...path(pane), ...results]));
    if (!body) return;
    for (const each of results) end = follow(end, each);
    this.#start(pane, end, body);
    this.drawAll();
  }

  #branch(turn) {
    show(branch(conversation, this.#paneOf(turn), turn));
    keep(conversation, 0);
    this.#showDraft();
    this.drawAll();
    toast("This is the branch; the chat that it comes from is in the list");
    this.text.focus();
  }

  /** Show one side or two; an empty right side begins with what was said on the left one. */
  #compare() {
    conversation.compare = !conversation.compare;
    const [left, right] = conversation.panes;
    if (conversation.compare && !path(right).length) copyTurns(left, right.root);
    keep();
    this.drawAll();
  }

  #fresh() {
    const own = ({ tools, ...rest }) => ({ ...rest, tools: tools === EXAMPLE_TOOLS ? "" : tools });
    show(newConversation(conversation.panes.map((each) => own(each.settings))));
    this.editing = null;
    this.list.close();
    this.#showDraft();
    this.drawAll();
    this.text.focus();
  }

  async #open(id) {
    const found = await opened(id);
    if (!found) { toast("This chat is no longer kept", true); heads = await kept.list(); changedList(); return; }
    show(found);
    this.editing = null;
    this.list.close();
    this.#showDraft();
    this.drawAll();
  }

  async #reread() {
    heads = await kept.list();
    const head = heads.find((each) => each.id === conversation.id);
    if (head && head.updated > conversation.updated && !busy() && !this.editing) { const found = await kept.read(conversation.id); if (found) { show(found); this.drawAll(); } }
    changedList();
  }

  #code() {
    const pane = shownPanes()[0];
    const draft = this.text.value || (path(pane).length ? "" : "Hello");
    const body = this.#attempt(pane, () => bodyOf(pane.settings, [...path(pane), ...(draft ? [{ role: "user", text: draft }] : [])]));
    if (body) program(body, this.context.session);
  }

  /** A dialog about a conversation: its title, exports, and its end. */
  async #about(id) {
    const found = await opened(id);
    if (!found) return;
    const title = h("input", { value: titleOf(found), maxlength: 200 });
    const pane = found.panes[0];
    const dialog = showDialog("Chat",
      field("Title", title),
      h("div", { class: "row" },
        h("button", { type: "button", onclick: () => save(`${titleOf(found).replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 40)}.json`, { title: titleOf(found), exported: new Date().toISOString(), settings: pane.settings, messages: exported(path(pane)) }) }, "Export as JSON"),
        h("button", { type: "button", onclick: () => { dialog.close(); const body = this.#attempt(pane, () => bodyOf(pane.settings, path(pane))); if (body) program(body, this.context.session); } }, "As a request"),
        h("span", { class: "spacer" }),
        h("button", { type: "button", class: "danger", onclick: async () => { dialog.close(); await this.#remove(found); } }, "Delete")));
    title.addEventListener("change", () => { found.title = title.value.trim(); keep(found, 0); this.refresh(); });
    title.addEventListener("keydown", (event) => { if (event.key === "Enter") { title.blur(); dialog.close(); } });
  }

  async #remove(found) {
    if (!(await confirmed("Delete this chat?", `“${titleOf(found)}” is kept in this browser only.`, "Delete"))) return;
    stopAll(found);
    clearTimeout(waits.get(found.id));
    await kept.remove(found.id);
    this.#forget(found.id);
    heads = await kept.list();
    if (found.id === conversation.id) this.#fresh();
    else changedList();
  }

  async #removeAll() {
    if (!(await confirmed("Delete all chats?", `${heads.length} are kept in this browser only.`, "Delete all"))) return;
    for (const { conversation: each } of [...running.values()]) stopAll(each);
    for (const { id } of heads) { clearTimeout(waits.get(id)); this.#forget(id); await kept.remove(id); }
    heads = [];
    this.#fresh();
  }

  #imported(messages, settings) {
    const made = newConversation([{ ...newSettings(), ...settings }, newSettings()]);
    let end = made.panes[0].root;
    for (const each of messages) end = follow(end, each);
    show(made);
    keep(made, 0);
    this.#showDraft();
    this.drawAll();
  }

  async #add(files) {
    const problems = [];
    for (const each of files) {
      const found = await readFile(each, this.#takesImages());
      if (found.problem) problems.push(found.problem);
      else this.attached.push(found);
    }
    this.refused.textContent = problems.join("; ");
    this.refresh();
    this.text.focus();
  }

  // --- keyboard ---

  #key(event) {
    if (document.querySelector("dialog[open]")) return;
    const typing = /^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName);
    if (event.key === "Escape" && busy()) stopAll(conversation);
    else if ((event.ctrlKey || event.metaKey) && event.shiftKey && event.key.toLowerCase() === "o") { event.preventDefault(); this.#fresh(); }
    else if (event.key === "/" && !typing && !event.ctrlKey && !event.metaKey) { event.preventDefault(); this.text.focus(); }
  }

  #commands() {
    const { models } = this.context;
    const last = path(shownPanes()[0]).findLast((turn) => turn.answer);
    return [
      { name: "New chat", keys: "Ctrl+Shift+O", run: () => this.#fresh() },
      busy() && { name: "Stop the answer", keys: "Esc", run: () => stopAll(conversation) },
      !busy() && last && { name: "Regenerate the answer", run: () => this.#regenerate(last) },
      { name: "Write a message", keys: "/", run: () => this.text.focus() },
      { name: "Search the chats", run: () => this.list.focus() },
      { name: "Code of this chat: curl, Python, JSON", run: () => this.#code() },
      last && { name: "Rename, export or delete this chat", run: () => this.#about(conversation.id) },
      { name: conversation.compare ? "One side" : "Side by side", run: () => this.#compare() },
      ...models.map((each) => ({ name: `Model: ${each.id}`, run: () => { for (const pane of shownPanes()) pane.settings.model = each.id; keep(); this.drawAll(); } })),
      ...heads.slice(0, 200).map((each) => ({ name: `Chat: ${each.title}`, run: () => this.#open(each.id) })),
    ].filter(Boolean);
  }
}
