// Code with colours: comments, texts, numbers and words of most languages. Lines that are complete stay as they are.

import { h } from "./dom.js";

const WORDS = "abstract|and|as|assert|async|await|auto|bool|boolean|break|case|catch|char|class|const|continue|def|default|del|delete|do|double|elif|else|end|enum|except|export|extends|false|False|final|finally|float|fn|for|foreach|from|func|function|global|go|if|impl|implements|import|in|include|instanceof|int|interface|is|lambda|let|long|match|mod|mut|namespace|new|nil|None|nonlocal|not|null|of|or|package|pass|private|protected|pub|public|raise|return|self|short|static|string|struct|super|switch|then|this|throw|throws|trait|true|True|try|type|typedef|typeof|union|unsigned|use|using|var|void|where|while|with|yield|echo|fi|done|esac|SELECT|FROM|WHERE|JOIN|ON|INSERT|INTO|VALUES|UPDATE|SET|DELETE|CREATE|TABLE|GROUP|ORDER|BY|AND|OR|NOT|NULL|LIMIT";
const KINDS = [
  ["#[^\\n]*", "py python sh bash shell zsh console yaml yml toml ini rb ruby r dockerfile makefile make perl conf"],
  ["--[^\\n]*", "sql lua haskell hs"],
  ["<!--[^]*?(?:-->|$)", "html xml svg vue"],
  ["\\/\\/[^\\n]*|\\/\\*[^]*?(?:\\*\\/|$)", ""],
];
const PLAIN = ["", "text", "txt", "plain", "plaintext", "markdown", "md"];
const NAMES = ["comment", "string", "number", "word"];

const patternOf = (language) => {
  const [comment] = KINDS.find(([, names]) => names.split(" ").includes(language)) ?? KINDS.at(-1);
  return new RegExp(`(${comment})|("""[^]*?(?:"""|$)|"(?:[^"\\\\\\n]|\\\\.)*"?|'(?:[^'\\\\\\n]|\\\\.)*'|\`[^\`]*(?:\`|$))|\\b(\\d[\\w.]*)|\\b(${WORDS})\\b`, "g");
};

export class Code {
  constructor(language) {
    this.text = "";
    this.done = 0;
    this.tail = h("span");
    this.element = h("code", null, this.tail);
    this.pattern = PLAIN.includes(language.toLowerCase()) ? null : patternOf(language.toLowerCase());
  }

  update(text) {
    if (!text.startsWith(this.text)) {
      this.element.replaceChildren(this.tail);
      this.done = 0;
    }
    this.text = text;
    const line = text.lastIndexOf("\n") + 1;
    const { parts, end } = this.#parts(this.done, line);
    this.tail.before(...parts);
    this.done = end;
    this.tail.replaceChildren(...this.#parts(end, text.length).parts);
  }

  /** The coloured parts of a range, without what begins in it and reaches over a line's end. */
  #parts(from, to) {
    const parts = [];
    let at = from;
    const text = this.text.slice(0, to);
    if (this.pattern) {
      this.pattern.lastIndex = from;
      for (let found = this.pattern.exec(text); found; found = this.pattern.exec(text)) {
        const end = this.pattern.lastIndex;
        if (end === to && to < this.text.length && found[0].includes("\n")) { to = found.index; break; }
        if (found.index > at) parts.push(text.slice(at, found.index));
        parts.push(h("span", { class: `code-${NAMES[found.slice(1).findIndex((each) => each !== undefined)]}` }, found[0]));
        at = end;
      }
    }
    if (at < to) parts.push(text.slice(at, to));
    return { parts, end: to };
  }
}
