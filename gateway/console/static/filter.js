// The language of the list's filter: words, name:value, and numbers such as tokens>100.

export const STATES = ["in flight", "done", "failed", "refused", "cancelled"];

const GROUPS = { waiting: "in flight", running: "in flight", done: "done", error: "failed", expired: "failed", refused: "refused", cancelled: "cancelled" };

/** The state of a request as the list counts it. */
export const group = (state) => GROUPS[state];

const TERM = /(?:^|\s+)state[:=](\S+)/gi;

/** The state that a search asks for, as in STATES; "all" without one, "" for another term. */
export function stateOf(search) {
  const terms = [...search.matchAll(TERM)].map(([, state]) => state.toLowerCase().replace("-", " "));
  return terms.length ? STATES.find((each) => terms.length === 1 && each === terms[0]) ?? "" : "all";
}

/** A search with this state in place of its own. */
export const withState = (search, state) => `${search.replace(TERM, "").trim()} ${state === "all" ? "" : `state:${state.replace(" ", "-")}`}`.trim();

const NS = { ns: 1, "µs": 1e3, us: 1e3, ms: 1e6, s: 1e9, min: 6e10, h: 3.6e12 };

/** Filters by a part of a text. */
export const TEXTS = {
  state: (each) => `${each.state} ${group(each.state)}`.replace("in flight", "in-flight"),
  tenant: (each) => each.tenant, model: (each) => each.model, id: (each) => `${each.name} ${each.id}`,
  finish: (each) => each.finish, code: (each) => `${each.code} ${each.status || ""}`, cause: (each) => each.cause,
  prompt: (each) => each.prompt, answer: (each) => each.answer, message: (each) => each.message, client: (each) => each.client,
};

const since = (each, at) => (at ? at - each.arrived_ns : undefined);

/** Filters by a number; those in nanoseconds take units. A request without the number fits none. */
export const NUMBERS = {
  tokens: (each) => each.completion_tokens, in: (each) => each.prompt_tokens, cached: (each) => each.cached_tokens, samples: (each) => each.samples,
  status: (each) => each.status || undefined, weights: (each) => each.versions?.[1],
  time: (each) => (each.ended_ns || Date.now() * 1e6) - each.arrived_ns, first: (each) => since(each, each.first_ns), wait: (each) => since(each, each.began_ns),
};
const TIMES = ["time", "first", "wait"];

const COMPARE = { ">": (a, b) => a > b, "<": (a, b) => a < b, ">=": (a, b) => a >= b, "<=": (a, b) => a <= b, "=": (a, b) => a === b, ":": (a, b) => a === b };

const listed = (names) => `${names.slice(0, -1).join(", ")} and ${names.at(-1)}`;

class Unknown extends Error {}

function numberOf(name, text) {
  const [, digits, unit] = /^([0-9]+(?:\.[0-9]+)?)([a-zµ]*)$/.exec(text) ?? [];
  const timed = TIMES.includes(name);
  if (digits === undefined || (unit && !(timed && NS[unit]))) throw new Unknown(`${name} takes a number${timed ? " with a unit, such as 200ms or 2s" : ""}: ${text ? `“${text}” is none` : "it is missing"}`);
  return Number(digits) * (timed ? NS[unit || "ms"] : 1);
}

/** Return the test of one term. */
function testOf(term) {
  const [, quoted] = /^"([^"]*)"?$/.exec(term) ?? [];
  const [, name, sign, value] = (quoted === undefined && /^([a-z_]+)(>=|<=|>|<|=|:)(.*)$/.exec(term)) || [];
  if (!name) {
    const text = quoted ?? term;
    return (each) => each.words.includes(text);
  }
  if (NUMBERS[name]) {
    const [read, compare, than] = [NUMBERS[name], COMPARE[sign], numberOf(name, value)];
    return (each) => { const found = read(each); return found !== undefined && compare(found, than); };
  }
  if (!TEXTS[name]) throw new Unknown(`There is no filter “${name}”. Texts: ${listed(Object.keys(TEXTS))}; numbers: ${listed(Object.keys(NUMBERS))}. For these words in a text, write "${term}"`);
  if (sign !== ":" && sign !== "=") throw new Unknown(`${name} is a text: write ${name}:${value || "…"}`);
  const text = value.replace(/^"|"$/g, "");
  if (name === "state" && text && !Object.entries(GROUPS).some(([state, of]) => `${state} ${of.replace(" ", "-")}`.includes(text))) throw new Unknown(`There is no state “${text}”. States: ${listed([...new Set(Object.entries(GROUPS).flat())].map((each) => each.replace(" ", "-")))}`);
  return (each) => TEXTS[name](each).toLowerCase().includes(text);
}

/** Return {test, problem} of a search: what fits, and what about it is wrong, or "". A minus before a term means that it does not fit. */
export function matcher(search) {
  const tests = [];
  let problem = "";
  for (const term of search.toLowerCase().match(/-?(?:[a-z_]+[:=<>]+)?"[^"]*"?|\S+/g) ?? []) {
    const not = term.length > 1 && term.startsWith("-");
    try {
      const test = testOf(not ? term.slice(1) : term);
      tests.push(not ? (each) => !test(each) : test);
    } catch (error) {
      if (!(error instanceof Unknown)) throw error;
      problem ||= error.message;
    }
  }
  return { problem, test: problem ? () => false : (each) => tests.every((test) => test(each)) };
}
