// Markdown as elements: each token of markdown-it becomes one of a fixed set of elements, or a text node.
//
// No text becomes HTML: tags are shown as they are written, links lead to the web or to nowhere, and images
// are links, so that an answer loads nothing. A text that grows changes only the blocks that have changed.

import "./markdown-it.umd.min.js";
import { copy, h } from "./dom.js";
import { formulaOf, isDisplay } from "./formula.js";
import { Code } from "./highlight.js";

const parser = globalThis.markdownit({ html: false, linkify: true, breaks: true });
parser.linkify.set({ fuzzyLink: false, fuzzyEmail: false });
// In a formula a stroke is no emphasis, a bracket no escape, and a line that begins with a minus no list.
parser.inline.ruler.before("escape", "formula", formula);
parser.block.ruler.before("fence", "formula", formulaBlock, { alt: ["paragraph", "reference", "blockquote", "list"] });

// A footnote's text is no address of a link: both its marks stay as they are written.
const paragraph = parser.block.ruler.getRules("").at(-1);
parser.block.ruler.before("reference", "footnote", (state, from, until) => /^\[\^[^\]]+\]:/.test(state.src.slice(state.bMarks[from] + state.tShift[from], state.eMarks[from])) && paragraph(state, from, until));

const CONTAINERS = { bullet_list_open: "ul", ordered_list_open: "ol", list_item_open: "li", blockquote_open: "blockquote", table_open: "table", thead_open: "thead", tbody_open: "tbody", tr_open: "tr" };
const HEADINGS = { h1: "h3", h2: "h4", h3: "h5" };
const PROTOCOLS = new Set(["http:", "https:", "mailto:"]);
const FORMULA = /\\\((?:[^\\]|\\(?!\))){1,2000}\\\)|\\\[(?:[^\\]|\\(?!\])){1,2000}\\\]|\$\$[^$]{1,2000}\$\$|\$(?!\s|\d[^$\n^_\\=]*\$)[^$\n]{0,200}[^$\s\\]\$(?!\d)/y;

function formula(state, silent) {
  const first = state.src[state.pos];
  if (first !== "$" && first !== "\\") return false;
  FORMULA.lastIndex = state.pos;
  const [found] = FORMULA.exec(state.src) ?? [];
  if (!found) return false;
  if (!silent) state.push("formula", "", 0).content = found;
  state.pos += found.length;
  return true;
}

const FORMULA_LINES = 60;

/** Lines from one that begins with $$ or \\[ to one that ends with its pair. */
function formulaBlock(state, from, until, silent) {
  const line = (at) => state.src.slice(state.bMarks[at] + state.tShift[at], state.eMarks[at]).trimEnd();
  const end = { "$$": "$$", "\\[": "\\]" }[line(from).slice(0, 2)];
  if (!end || state.sCount[from] - state.blkIndent >= 4) return false;
  let text = "";
  for (let at = from; at < Math.min(until, from + FORMULA_LINES); at++) {
    text += `${at > from ? "\n" : ""}${line(at)}`;
    if (text.length < 5 || !text.endsWith(end)) continue;
    if (text.slice(2, -2).includes(end)) return false;
    if (!silent) {
      state.line = at + 1;
      Object.assign(state.push("formula_block", "", 0), { content: text, map: [from, state.line] });
    }
    return true;
  }
  return false;
}

/** A formula as MathML, or as it is written; a wide one scrolls. */
function formulaView(written) {
  const found = formulaOf(written);
  if (!found) return h("code", { class: "formula" }, written);
  return isDisplay(written) || written.length > 40 ? h("span", { class: "formula", tabindex: 0, role: "group", "aria-label": "Formula" }, found) : found;
}

/** The address of a link if it leads to the web, else "". */
function web(href) {
  try { return PROTOCOLS.has(new URL(href).protocol) ? href : ""; } catch { return ""; }
}

const link = (href, ...children) => (web(href) ? h("a", { href, title: href, target: "_blank", rel: "noopener noreferrer nofollow" }, children) : h("span", { title: "No link to the web" }, children));

function inline(element, content, env) {
  const open = [element];
  for (const token of parser.parseInline(content, env)[0].children) {
    const top = open.at(-1);
    if (token.nesting > 0) {
      const child = token.type === "link_open" ? link(token.attrGet("href") ?? "") : h({ strong: "strong", em: "em", s: "s" }[token.tag] ?? "span");
      top.append(child);
      open.push(child);
    } else if (token.nesting < 0) open.pop();
    else if (token.type === "softbreak" || token.type === "hardbreak") top.append(h("br"));
    else if (token.type === "code_inline") top.append(h("code", null, token.content));
    else if (token.type === "formula") top.append(formulaView(token.content));
    else if (token.type === "image") top.append(link(token.attrGet("src") ?? "", `Image: ${token.content || token.attrGet("src")}`));
    else top.append(token.content);
  }
  return element;
}

const TODO = /^\[([ xX])\] /;
const todo = (content) => content.replace(TODO, (_, done) => (done === " " ? "☐ " : "☑ "));

/** Split tokens into those of each child. */
function split(tokens) {
  const found = [];
  let depth = 0;
  let from = 0;
  for (let at = 0; at < tokens.length; at++) {
    depth += tokens[at].nesting;
    if (depth) continue;
    found.push(tokens.slice(from, at + 1));
    from = at + 1;
  }
  return found;
}

const keyOf = (group, env) => group.map((each) => `${each.type}${each.tag}${each.hidden}${each.info}${each.attrs}${each.content}`).join("\n") + env.defined;

function update(parent, drawn, tokens, env) {
  const groups = split(tokens);
  groups.forEach((group, index) => {
    const key = keyOf(group, env);
    const old = drawn[index];
    if (old?.key === key) return;
    if (old && grown(old, group, env)) { old.key = key; return; }
    const fresh = make(group, env);
    fresh.key = key;
    if (old) old.outer.replaceWith(fresh.outer);
    else parent.append(fresh.outer);
    drawn[index] = fresh;
  });
  for (const each of drawn.splice(groups.length)) each.outer.remove();
}

/** Change a drawn block to this one, if both are alike. */
function grown(old, group, env) {
  const [first] = group;
  if (old.type !== first.type || old.attrs !== String(first.attrs) || old.info !== first.info) return false;
  if (old.children) update(old.element, old.children, group.slice(1, -1), env);
  else if (old.code) old.code.update(codeOf(first));
  else return false;
  return true;
}

function make(group, env) {
  const [first] = group;
  const block = { type: first.type, attrs: String(first.attrs), info: first.info };
  const tag = CONTAINERS[first.type];
  if (tag) {
    block.children = [];
    block.outer = block.element = h(tag, { start: first.attrGet("start") });
    if (tag === "table") block.outer = h("div", { class: "table", tabindex: 0, role: "group", "aria-label": "Table" }, block.element);
    update(block.element, block.children, group.slice(1, -1), env);
  } else if (first.type === "fence" || first.type === "code_block") {
    const language = first.info.trim().split(/\s+/)[0];
    block.code = new Code(language);
    block.code.update(codeOf(first));
    block.outer = codeBlock(language, block.code);
  } else if (first.type === "hr") block.outer = h("hr");
  else if (first.type === "formula_block") block.outer = h("p", null, formulaView(first.content));
  else {
    const align = /text-align:(\w+)/.exec(first.attrGet("style") ?? "")?.[1];
    const name = { heading_open: HEADINGS[first.tag] ?? "h6", paragraph_open: first.hidden ? "span" : "p", th_open: "th", td_open: "td" }[first.type] ?? "div";
    const task = first.level > 1 && TODO.test(group[1]?.content);
    block.outer = h(name, { class: task && "task", style: align && { "text-align": align } });
    for (const each of group) if (each.type === "inline") inline(block.outer, task ? todo(each.content) : each.content, env);
  }
  return block;
}

const codeOf = (token) => token.content.replace(/\n$/, "");

function codeBlock(language, code) {
  return h("figure", { class: "code" },
    h("figcaption", null, h("span", null, language || "text"), h("button", { type: "button", class: "quiet", onclick: () => copy(code.text) }, "Copy")),
    h("pre", { tabindex: 0, "aria-label": "Code" }, code.element));
}

/** A text in Markdown that grows. */
export class Markdown {
  constructor(label) {
    this.element = h("div", { class: "text md", "aria-label": label });
    this.drawn = [];
    this.shown = null;
  }

  update(text, streaming) {
    this.element.classList.toggle("streaming", streaming);
    if (text === this.shown) return;
    this.shown = text;
    const env = {};
    const tokens = [];
    // Blocks alone; the text within is read where a block has changed.
    parser.block.parse(text.replace(/\r\n?/g, "\n").replaceAll("\0", "\ufffd"), parser, env, tokens);
    env.defined = env.references ? JSON.stringify(env.references) : "";
    update(this.element, this.drawn, tokens, env);
  }
}
