// The tokens of an answer, each with its probability and its alternatives.

import { h, put } from "./dom.js";

const FEW = 8;

/** Assign parts of a text to its tokens: [{text, token}], and what no token covers at the end.
 *  Marks and stop tokens are in no text; a character of several tokens belongs to the first. */
export function align(text, tokens) {
  const parts = [];
  let at = 0;
  for (let index = 0; index < tokens.length; index++) {
    const token = tokens[index];
    if (token.t && text.startsWith(token.t, at)) {
      parts.push({ text: token.t, token });
      at += token.t.length;
    } else if (token.t.includes("\ufffd")) {
      const next = tokens.slice(index + 1, index + 1 + FEW).find((each) => each.t && !each.t.includes("\ufffd"));
      const end = next ? text.indexOf(next.t, at) : text.length;
      const length = end >= at && end - at <= FEW ? end - at : 0;
      parts.push({ text: text.slice(at, at + length), token });
      at += length;
    } else parts.push({ text: "", token, mark: true });
  }
  return { parts, rest: text.slice(at) };
}

const sureness = (logprob) => { const p = Math.exp(logprob); return p > 0.9 ? "" : p > 0.5 ? "sure-2" : p > 0.15 ? "sure-1" : "sure-0"; };

const share = (logprob) => { const p = Math.exp(logprob) * 100; return p >= 0.1 ? `${p.toFixed(1)}%` : "< 0.1%"; };

const visible = (text) => JSON.stringify(text).slice(1, -1).replaceAll('\\"', '"').replace(/^ +| +$/g, (spaces) => "␣".repeat(spaces.length));

const tip = h("div", { class: "tip", role: "status", hidden: true });

function showTip(span, token) {
  const rows = token.a.some(([text]) => text === token.t) ? token.a : [...token.a, [token.t, token.p]];
  put(tip,
    h("div", { class: "row small muted" }, h("span", null, `logprob ${token.p.toFixed(3)}`), token.v !== undefined && h("span", null, `weights ${token.v}`)),
    rows.map(([text, logprob]) => h("div", { class: text === token.t ? "alt chosen" : "alt" },
      h("span", { class: "ellipsis" }, visible(text) || "(empty)"),
      h("span", { class: "bar" }, h("i", { style: { width: `${Math.exp(logprob) * 100}%` } })),
      h("span", { class: "num" }, share(logprob)))));
  if (!tip.isConnected) document.body.append(tip);
  tip.hidden = false;
  const box = span.getBoundingClientRect();
  const height = tip.offsetHeight;
  const top = box.bottom + 6 + height > innerHeight ? box.top - height - 6 : box.bottom + 6;
  tip.style.left = `${Math.max(8, Math.min(innerWidth - 256, box.left))}px`;
  tip.style.top = `${Math.max(8, top)}px`;
}

export const hideTip = () => { tip.hidden = true; };
document.addEventListener("pointerdown", ({ target }) => { if (!target.closest(".tokens")) hideTip(); });

/** A text that grows, drawn by its tokens where their logprobs are known. */
export class TokenText {
  constructor(label) {
    this.element = h("div", { class: "text tokens", "aria-label": label });
    this.drawn = [];
    this.here = -1;
    this.element.addEventListener("pointerover", ({ target }) => this.#point(target));
    // A finger that is lifted leaves too, but what it has tapped stays.
    this.element.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") hideTip(); });
    this.element.addEventListener("keydown", (event) => this.#key(event));
    this.element.addEventListener("blur", () => { this.#mark(-1); hideTip(); });
  }

  update(text, tokens, streaming) {
    const { parts, rest } = align(text, tokens);
    if (!streaming || parts.length < this.drawn.length) { this.drawn = []; this.element.replaceChildren(); }
    this.rest?.remove();
    for (const part of parts.slice(this.drawn.length)) {
      const span = part.mark ? h("span", { class: "visually-hidden" }) : h("span", { class: sureness(part.token.p) || undefined }, part.text);
      this.drawn.push({ ...part, span });
      this.element.append(span);
    }
    this.rest = document.createTextNode(rest);
    this.element.append(this.rest);
    if (streaming) this.element.append((this.cursor ??= h("span", { class: "cursor", "aria-hidden": "true" })));
    else {
      this.cursor?.remove();
      const some = this.drawn.some((each) => each.text);
      if (some) {
        this.element.tabIndex = 0;
        this.element.setAttribute("role", "group");
        this.element.setAttribute("aria-description", "Arrow keys go through the tokens and their alternatives");
      }
    }
  }

  #point(target) {
    const found = this.drawn.find((each) => each.span === target);
    if (found) showTip(found.span, found.token);
    else hideTip();
  }

  #key(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 }[event.key];
    if (event.key === "Escape") { this.#mark(-1); hideTip(); }
    if (!step) return;
    event.preventDefault();
    const shown = this.drawn.filter((each) => each.text);
    this.#mark(Math.max(0, Math.min(shown.length - 1, this.here + step)), shown);
  }

  #mark(index, shown = this.drawn.filter((each) => each.text)) {
    shown[this.here]?.span.classList.remove("here");
    this.here = index;
    const found = shown[index];
    if (!found) return;
    found.span.classList.add("here");
    found.span.scrollIntoView({ block: "nearest" });
    showTip(found.span, found.token);
  }
}
