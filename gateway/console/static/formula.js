// Formulas in LaTeX as MathML elements: the commands that models write. One that has another command is null, and is
// shown as it is written. No text becomes HTML, and no attribute but a title is a text's own.

import { math } from "./dom.js";

const MOST_DEEP = 40;
const table = (words) => Object.fromEntries(words.match(/\S+ \S+/g).map((each) => each.split(" ")));

const LETTERS = table(`alpha α beta β gamma γ delta δ epsilon ϵ varepsilon ε zeta ζ eta η theta θ vartheta ϑ kappa κ lambda λ mu μ nu ν xi ξ
pi π rho ρ sigma σ tau τ phi ϕ varphi φ chi χ psi ψ omega ω ell ℓ hbar ℏ partial ∂`);
const UPRIGHT = table(`Gamma Γ Delta Δ Theta Θ Lambda Λ Xi Ξ Pi Π Sigma Σ Phi Φ Psi Ψ Omega Ω infty ∞ nabla ∇ emptyset ∅ varnothing ∅
Re ℜ Im ℑ bot ⊥ top ⊤ angle ∠ ldots … dots … cdots ⋯ vdots ⋮ ddots ⋱ prime ′ $ $ % % # # _ _`);
const SIGNS = table(`cdot · times × div ÷ pm ± mp ∓ ast ∗ circ ∘ bullet • oplus ⊕ otimes ⊗ odot ⊙ setminus ∖ cup ∪ cap ∩ wedge ∧ land ∧ vee ∨
lor ∨ neg ¬ lnot ¬ le ≤ leq ≤ ge ≥ geq ≥ ll ≪ gg ≫ ne ≠ neq ≠ equiv ≡ approx ≈ sim ∼ simeq ≃ cong ≅ propto ∝ in ∈ notin ∉ subset ⊂
subseteq ⊆ supset ⊃ supseteq ⊇ forall ∀ exists ∃ therefore ∴ to → rightarrow → leftarrow ← leftrightarrow ↔ Rightarrow ⇒ Leftarrow ⇐
Leftrightarrow ⇔ implies ⟹ iff ⟺ mapsto ↦ longrightarrow ⟶ uparrow ↑ downarrow ↓ rightleftharpoons ⇌ mid ∣ parallel ∥ perp ⊥ vdash ⊢
int ∫ iint ∬ oint ∮ & &`);
const LARGE = table("sum ∑ prod ∏ bigcup ⋃ bigcap ⋂ bigoplus ⨁ bigotimes ⨂");
const FENCES = table("lbrace { rbrace } { { } } langle ⟨ rangle ⟩ lfloor ⌊ rfloor ⌋ lceil ⌈ rceil ⌉ vert | Vert ‖ | ‖ lvert | rvert | lVert ‖ rVert ‖");
const ACCENTS = table("hat ^ widehat ^ bar ¯ overline ‾ tilde ~ widetilde ~ vec → dot ˙ ddot ¨ overbrace ⏞");
const UNDER = table("underline _ underbrace ⏟");
const SPACES = { ",": 0.17, ":": 0.22, ";": 0.28, "!": 0, " ": 0.25, quad: 1, qquad: 2 };
const NAMED = /^(a?(sin|cos|tan)h?|arc(sin|cos|tan)|cot|sec|csc|log|ln|exp|dim|ker|deg|arg|(arg)?(max|min)|lim(sup|inf)?|sup|inf|det|gcd|Pr)$/;
const STACKED = /^(lim|sup$|inf$|det|gcd|Pr|.*(max|min)$|(under|over)brace|operatorname)/;
const IGNORED = /^((display|text)style|(no)?limits|nonumber|notag|hline)$/;
const BOLD = /^(mathbf|boldsymbol|bm|textbf)$/;
const ALPHABETS = { mathbb: 0x1d538, mathcal: 0x1d49c, mathscr: 0x1d49c };
// Letters that Unicode had before its alphabets.
const EARLIER = table("𝔺 ℂ 𝔿 ℍ 𝕅 ℕ 𝕇 ℙ 𝕈 ℚ 𝕉 ℝ 𝕑 ℤ 𝒝 ℬ 𝒠 ℰ 𝒡 ℱ 𝒣 ℋ 𝒤 ℐ 𝒧 ℒ 𝒨 ℳ 𝒭 ℛ");
const FENCED = { pmatrix: "()", bmatrix: "[]", Bmatrix: "{}", vmatrix: "||", Vmatrix: "‖‖", cases: "{" };
const TABLES = /^([pbBvV]?matrix|cases|array|(align(ed)?|split|gather(ed)?|equation)\*?)$/;

const TOKENS = /\\[a-zA-Z]+|\\[^]|\d+(?:[.,]\d+)*|\s+|[^]/gu;

const mo = (text, more) => math("mo", more, text);
const fence = (text) => mo(text, { stretchy: "false" });
const grows = (text) => mo(text, { stretchy: "true" });
const unknown = (what) => { throw new SyntaxError(what); };

class Reader {
  constructor(source, display) {
    this.tokens = source.match(TOKENS) ?? [];
    this.at = this.deep = 0;
    this.display = display;
  }

  peek() {
    while (/^\s/.test(this.tokens[this.at] ?? "")) this.at += 1;
    return this.tokens[this.at];
  }

  next() { const token = this.peek(); this.at += 1; return token; }

  /** Whether the next token is this one, which is then read. */
  skip(token) { const found = this.peek() === token; if (found) this.at += 1; return found; }

  /** The text of a group, as it is written. */
  raw() {
    if (!this.skip("{")) unknown();
    const end = this.tokens.indexOf("}", this.at);
    const found = this.tokens.slice(this.at, end);
    if (end < 0 || found.includes("{")) unknown();
    this.at = end + 1;
    return found.map((each) => each.replace(/^\\([^a-zA-Z])$/, "$1")).join("");
  }

  /** Elements up to one of these tokens, which is read. */
  row(...ends) {
    if (++this.deep > MOST_DEEP) unknown();
    const found = [];
    while (!ends.includes(this.peek())) found.push(this.scripted());
    this.deep -= 1;
    this.end = this.next();
    return math("mrow", null, found);
  }

  /** An argument: a group, or else one command, letter or digit. */
  group() {
    if (this.skip("{")) return this.row("}");
    const token = this.peek() ?? "";
    if (/^\d./.test(token)) this.tokens.splice(this.at, 1, token[0], ...token.slice(1).match(TOKENS));
    return this.one();
  }

  /** A group in which limits stand beside their sign. */
  small() {
    const { display } = this;
    this.display = false;
    const found = this.group();
    this.display = display;
    return found;
  }

  named(text) { return mo(text, { lspace: "0.17em", rspace: /^(\(|\\left)$/.test(this.peek()) ? "0" : "0.17em", movablelimits: "false" }); }

  scripted() {
    const name = this.peek()?.slice(1);
    const stacked = this.display && (name in LARGE || STACKED.test(name));
    const base = this.one();
    let [low, high, primes] = [null, null, ""];
    for (;;) {
      if (this.skip("'")) primes += "′";
      else if (this.skip("\\limits")) continue;
      else if (!low && this.skip("_")) low = this.small();
      else if (!high && this.skip("^")) high = this.small();
      else break;
    }
    if (primes) high = math("mrow", null, mo(primes), high);
    if (!low && !high) return base;
    const [under, over] = stacked ? ["under", "over"] : ["sub", "sup"];
    return math(`m${low ? under : ""}${high ? over : ""}`, null, base, low, high);
  }

  one() {
    const token = this.next();
    if (token === undefined || /^(\}|[\^_&#]|\\(right|end|\\))$/.test(token)) unknown(token);
    if (token === "{") return this.row("}");
    if (token === "~") return math("mspace", { width: "0.25em" });
    if (/^\d/.test(token)) return math("mn", null, token);
    if (/^\\./.test(token)) return this.command(token.slice(1));
    if (/\p{L}/u.test(token)) return math(/\w/.test(token) ? "mi" : "mtext", null, token);
    return "()[]|".includes(token) ? fence(token) : mo({ "-": "−", "*": "∗" }[token] ?? token);
  }

  command(name) {
    if (name in LETTERS) return math("mi", null, LETTERS[name]);
    if (name in UPRIGHT) return math("mi", { mathvariant: "normal" }, UPRIGHT[name]);
    if (name in SIGNS) return mo(SIGNS[name]);
    if (name in LARGE) return mo(LARGE[name], { movablelimits: "false" });
    if (name in FENCES) return fence(FENCES[name]);
    if (name in SPACES) return math("mspace", { width: `${SPACES[name]}em` });
    if (name in ACCENTS) return math("mover", { accent: "true" }, this.group(), mo(ACCENTS[name], { stretchy: String(/^(wide|over)/.test(name)) }));
    if (name in UNDER) return math("munder", null, this.group(), mo(UNDER[name]));
    if (name in ALPHABETS) return this.letters(ALPHABETS[name]);
    if (BOLD.test(name)) return math("mrow", { class: name === "mathbf" ? "bold upright" : "bold" }, name === "textbf" ? math("mtext", null, this.raw()) : this.group());
    if (NAMED.test(name)) return this.named(name.replace(/^(lim|arg)(?=.)/, "$1\u2009"));
    if (IGNORED.test(name)) return math("mrow");
    if (/^[Bb]igg?[lrm]?$/.test(name)) {
      const size = `${(name[0] === "B" ? 1.8 : 1.2) + (name[3] === "g" ? 1.2 : 0)}em`;
      return mo(this.delimiter(), { minsize: size, maxsize: size });
    }
    switch (name) {
      case "frac": case "dfrac": case "tfrac": return math("mfrac", null, this.small(), this.small());
      case "binom": return math("mrow", null, mo("("), math("mfrac", { linethickness: "0" }, this.group(), this.group()), mo(")"));
      case "sqrt": return this.skip("[") ? this.root(this.row("]")) : math("msqrt", null, this.group());
      case "text": case "textrm": case "textit": case "mathsf": case "mathtt": return this.text("mtext");
      case "mathrm": return this.text("mi");
      case "operatorname": this.skip("*"); return this.named(this.raw());
      case "left": return this.between();
      case "middle": return mo(this.delimiter());
      case "overset": case "stackrel": return this.over(this.group(), "mover");
      case "underset": return this.over(this.group(), "munder");
      case "xrightarrow": return math("mover", null, mo("→"), this.group());
      case "boxed": return math("mrow", { class: "boxed" }, this.group());
      case "bmod": return this.named("mod");
      case "pmod": return math("mrow", null, fence("("), this.named("mod"), this.group(), fence(")"));
      case "not": return this.not(this.one());
      case "tag": return math("mtext", null, `\u2003(${this.raw()})`);
      case "begin": return this.environment(this.raw());
      default: return unknown(name);
    }
  }

  root(degree) { return math("mroot", null, this.group(), degree); }
  over(what, tag) { return math(tag, null, this.group(), what); }
  not(what) { what.append("\u0338"); return what; }

  text(tag) {
    const text = this.raw();
    if (/[\\$]/.test(text)) unknown(text);
    return math(tag, { mathvariant: tag === "mi" && "normal" }, text.replace(/^\s|\s$/g, "\u00a0"));
  }

  letters(from) {
    const text = this.peek() === "{" ? this.raw() : this.next() ?? "";
    if (!/^[A-Z]+$/.test(text)) unknown(text);
    const made = [...text].map((each) => String.fromCodePoint(from + each.charCodeAt(0) - 65));
    return math("mi", { mathvariant: "normal" }, made.map((each) => EARLIER[each] ?? each).join(""));
  }

  delimiter() {
    const token = this.next() ?? "";
    return FENCES[token.slice(1)] ?? { "<": "⟨", ">": "⟩", ".": "" }[token] ?? (/^[()[\]|/]$/.test(token) ? token : unknown(token));
  }

  between() {
    const open = this.delimiter();
    const inner = this.row("\\right");
    const end = this.delimiter();
    return math("mrow", null, open && grows(open), inner, end && grows(end));
  }

  environment(name) {
    if (!TABLES.test(name)) unknown(name);
    if (name === "array") this.raw();
    const rows = [[]];
    do {
      rows.at(-1).push(math("mtd", null, this.row("&", "\\\\", "\\end")));
      if (this.end === "\\\\" && this.peek() !== "\\end") rows.push([]);
    } while (this.end === "&" || (this.end === "\\\\" && !this.skip("\\end")));
    if (this.raw() !== name) unknown(name);
    const kind = /matrix|array/.test(name) ? "matrix" : name === "cases" ? name : "aligned";
    const [open, end] = FENCED[name] ?? "";
    return math("mrow", null, open && grows(open), math("mtable", { class: kind }, rows.map((each) => math("mtr", null, each))), end && grows(end));
  }
}

export const isDisplay = (written) => /^(\$\$|\\\[)/.test(written);

/** The MathML of a formula with its marks; null if some of it is unknown. */
export function formulaOf(written) {
  const display = isDisplay(written);
  const marks = display || written[0] === "\\" ? 2 : 1;
  try {
    const row = new Reader(written.slice(marks, -marks), display).row(undefined);
    return math("math", { display: display ? "block" : "inline", title: written }, row);
  } catch (error) {
    if (error instanceof SyntaxError) return null;
    throw error;
  }
}
