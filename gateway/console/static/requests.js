// Requests in flight and done: a list of thousands that draws what is seen, and each one's details.

import { call, json } from "./api.js";
import { copy, h, icon, ICONS, put, toast } from "./dom.js";
import { group, matcher, stateOf, STATES, withState } from "./filter.js";
import { clock, dateTime, duration, number, shortId } from "./format.js";
import { follow, known } from "./known.js";
import { remedies } from "./remedies.js";
import { causes, causeName, stepsOf, waterfall } from "./waterfall.js";

const DOTS = { waiting: "hollow", running: "accent", done: "good", error: "bad", expired: "bad", refused: "bad hollow", cancelled: "warn" };

const ended = (each) => (each.ended_ns || Date.now() * 1e6) - each.arrived_ns;

/** How a request ended: its finish, or its error. */
const ending = (each) => (each.code ? `${each.status || ""} ${each.code}`.trim() : each.finish || each.state);

/** Its tokens; null where they are not known yet, as of a call that is not streamed until it ends. */
const tokensOf = (each) => (each.state === "refused" || (!each.ended_ns && !each.first_ns) ? null : number(each.completion_tokens));

/** The columns of the list: a name, which is the class of its cells too, a title, what they show. */
const COLUMNS = [
  ["at", "arrived", (each) => clock(each.arrived_ns)],
  ["id", "request", (each) => shortId(each.name), (each) => each.name],
  ["tenant", "tenant", (each) => each.tenant || "–", (each) => each.tenant],
  ["model", "model", (each) => each.model || "–", (each) => each.model],
  ["text", "prompt and answer", (each) => [h("b", null, tail(each.prompt) || "–"), h("span", null, each.code ? each.message : each.answer)]],
  ["end", "end", ending, ending],
  ["tokens right", "tokens", (each) => tokensOf(each) ?? "–"],
  ["first right", "first", (each) => (each.first_ns ? duration(each.first_ns - each.arrived_ns) : "–")],
  ["time right", "time", (each) => duration(ended(each))],
  ["cause", "mostly", (each) => (each.cause ? causeName(each.cause) : "–")],
];

function drawRow(each, index, chosen, narrow) {
  const dot = h("span", { class: `dot ${DOTS[each.state]}`, role: "img", "aria-label": each.state, title: each.state });
  const cell = (name, content, title) => h("div", { class: name, role: "gridcell", title: title || undefined }, content);
  const bad = group(each.state) === "failed" || each.state === "refused" ? " error" : "";
  const cells = narrow
    ? [cell("text", COLUMNS[4][2](each)), cell(`end muted${bad}`, [ending(each), each.model, tokensOf(each) && `${tokensOf(each)} tokens`, duration(ended(each))].filter(Boolean).join(" · "))]
    : COLUMNS.map(([name, , show, title]) => cell(name === "end" ? name + bad : name, show(each), title?.(each)));
  return h("div", { class: "list-row", role: "row", id: `row-${each.number}`, "aria-rowindex": index + 2, "aria-selected": String(chosen), data: { index } }, cell("state", dot), cells);
}

/** The last line of a prompt, which is the user's message in a rendered chat, with a mark if others come before it. */
export function tail(prompt) {
  const lines = prompt.split("\n").map((each) => each.trim()).filter((each) => each && !/^(<?\/?think>?|assistant|user|system)$/.test(each));
  return lines.length > 1 ? `… ${lines.at(-1)}` : lines[0] ?? "";
}

export function render(root, { signal, argument, query, session }) {
  let rows = [];
  let chosen = null;
  const narrow = matchMedia("(max-width: 760px)");
  const search = h("input", { type: "search", "aria-label": "Filter", placeholder: "Words, or finish:length time>2s", value: query.get("q") ?? "", spellcheck: "false", autocomplete: "off" });
  const help = h("div", { class: "filters", hidden: true }, EXAMPLES.map(([term, means]) => h("button", { type: "button", class: "quiet", onclick: () => { search.value = `${search.value} ${term}`.trim(); filter(); search.focus(); } }, h("code", null, term), ` ${means}`)));
  const helped = h("button", { type: "button", class: "quiet", "aria-expanded": "false", onclick: () => { help.hidden = !help.hidden; helped.setAttribute("aria-expanded", String(!help.hidden)); } }, "Filters");
  const count = h("span", { class: "muted small num", role: "status" });
  const chips = ["all", ...STATES].map((each) => h("button", { type: "button", data: { state: each }, onclick: () => { search.value = withState(search.value, each); filter(); } }, each));
  const space = h("div", { role: "rowgroup" });
  const list = h("div", { class: "list", role: "grid", tabindex: 0, "aria-label": "Requests; arrow keys choose one, Enter opens it" }, space);
  const head = h("div", { class: "list-head", "aria-hidden": "true" }, h("div"), COLUMNS.map(([name, title]) => h("div", { class: name }, title)));
  const empty = h("div", { class: "empty", role: "status", hidden: true });
  const detail = h("aside", { class: "detail", hidden: true, tabindex: -1, "aria-label": "The request" });
  const view = h("div", { class: "requests" }, h("header", null, h("h1", null, "Requests"), h("div", { class: "search" }, search), helped, h("div", { class: "chips", role: "group", "aria-label": "State" }, chips), count, help), h("div", { class: "rows" }, head, list, empty), detail);

  const height = () => (narrow.matches ? 56 : 36);
  const here = () => `#/requests${!detail.hidden && opened ? `/${encodeURIComponent(opened)}` : ""}${search.value.trim() ? `?q=${encodeURIComponent(search.value.trim())}` : ""}`;
  let opened = "";
  /** Write the state into the address, but not over that of a view to which the page goes now. */
  const note = () => { if (location.hash.startsWith("#/requests") && location.hash !== here()) history.replaceState(null, "", here()); };

  function filter() {
    if (signal.aborted) return;
    const { test, problem } = matcher(search.value);
    const state = stateOf(search.value);
    const found = [...known.values()];
    const counts = Map.groupBy ? Map.groupBy(found, (each) => group(each.state)) : new Map();
    for (const chip of chips) chip.setAttribute("aria-pressed", String(chip.dataset.state === state));
    for (const chip of chips) if (chip.dataset.state !== "all") put(chip, chip.dataset.state, counts.get(chip.dataset.state) && h("small", null, ` ${number(counts.get(chip.dataset.state).length)}`));
    rows = found.filter(test).sort((a, b) => b.number - a.number);
    search.setAttribute("aria-invalid", String(Boolean(problem)));
    note();
    count.textContent = rows.length === known.size ? `${number(known.size)} request${known.size === 1 ? "" : "s"}` : `${number(rows.length)} of ${number(known.size)}`;
    empty.hidden = rows.length > 0;
    list.hidden = !rows.length;
    empty.classList.toggle("error", Boolean(problem));
    empty.textContent = problem || (known.size ? "No request fits the filter." : "No request yet. Send one from the playground; this list has those of this gateway.");
    list.setAttribute("aria-rowcount", rows.length + 1);
    space.style.height = `${rows.length * height()}px`;
    draw();
  }

  const drawn = new Map();
  let frame = 0;
  function draw() {
    frame ||= requestAnimationFrame(() => {
      frame = 0;
      const each = height();
      const first = Math.max(0, Math.floor(list.scrollTop / each) - 6);
      const last = Math.min(rows.length, Math.ceil((list.scrollTop + list.clientHeight) / each) + 6);
      const wanted = new Set();
      // Rows that have not changed keep their elements: a click begins and ends on the same one.
      rows.slice(first, last).forEach((row, place) => {
        const index = first + place;
        const mark = `${row.changed} ${index} ${row.number === chosen} ${narrow.matches}`;
        let shown = drawn.get(row.number);
        if (shown?.mark !== mark) {
          const element = drawRow(row, index, row.number === chosen, narrow.matches);
          element.style.top = `${index * each}px`;
          if (shown) shown.element.replaceWith(element);
          else space.append(element);
          drawn.set(row.number, (shown = { mark, element }));
        }
        wanted.add(row.number);
      });
      for (const [number, { element }] of drawn) if (!wanted.has(number)) { element.remove(); drawn.delete(number); }
      if (drawn.has(chosen)) list.setAttribute("aria-activedescendant", `row-${chosen}`);
      else list.removeAttribute("aria-activedescendant");
    });
  }

  function choose(index, open) {
    const row = rows[Math.max(0, Math.min(rows.length - 1, index))];
    if (!row) return;
    chosen = row.number;
    const top = rows.indexOf(row) * height();
    if (top < list.scrollTop) list.scrollTop = top;
    else if (top + height() > list.scrollTop + list.clientHeight) list.scrollTop = top + height() - list.clientHeight;
    draw();
    if (open || !detail.hidden) show(row.id);
  }

  async function show(id) {
    view.classList.add("open");
    detail.hidden = false;
    opened = id;
    note();
    try {
      const found = await json(`console/requests/${encodeURIComponent(id)}`, { signal });
      put(detail, details(found, close, session, found.request.code && (await remedies())[found.request.code]));
    } catch (error) {
      if (!signal.aborted) put(detail, h("header", null, h("h2", null, "Request"), closeButton(close)), h("div", { class: "banner warn" }, error.message));
    }
    draw();
  }

  function close() {
    detail.hidden = true;
    view.classList.remove("open");
    note();
    list.focus();
    draw();
  }

  list.addEventListener("scroll", draw, { passive: true });
  list.addEventListener("click", ({ target }) => { const row = target.closest(".list-row"); if (row) choose(Number(row.dataset.index), true); });
  list.addEventListener("keydown", (event) => {
    const at = rows.findIndex((each) => each.number === chosen);
    const page = Math.floor(list.clientHeight / height()) - 1;
    const moves = { ArrowDown: at + 1, ArrowUp: at - 1, PageDown: at + page, PageUp: at - page, Home: 0, End: rows.length - 1 };
    if (event.key in moves) { event.preventDefault(); choose(moves[event.key]); }
    else if (event.key === "Enter" && at >= 0) choose(at, true);
    else if (event.key === "Escape" && !detail.hidden) close();
  });
  detail.addEventListener("keydown", (event) => { if (event.key === "Escape") close(); });
  let typing = 0;
  search.addEventListener("input", () => { clearTimeout(typing); typing = setTimeout(filter, 120); });
  const resized = new ResizeObserver(() => filter());
  resized.observe(list);
  signal.addEventListener("abort", () => resized.disconnect());

  put(root, view);
  filter();
  follow(filter, (error) => toast(error.message, true), signal);
  if (argument) {
    const id = argument;
    show(id);
    const row = [...known.values()].find((each) => each.id === id);
    chosen = row?.number ?? null;
  }
}

const EXAMPLES = [
  ["state:failed", "in error or expired"], ["finish:length", "cut by max_tokens"], ["tokens>100", "generated; in>100 of prompts, cached>0"], ["time>2s", "in all; first>200ms, wait>1s"],
  ["code:expired", "an error's code or status"], ["cause:queue", "what took most of the time"], ["tenant:acme", "also model:, id:, prompt:, answer:, message:, client:"], ['"a: b"', "these words"], ["-state:done", "not"],
];

const closeButton = (close) => h("button", { type: "button", class: "quiet icon", "aria-label": "Close", onclick: close }, icon(ICONS.close));

function details(found, close, session, remedy) {
  const { request, detail } = found;
  const running = request.state === "waiting" || request.state === "running";
  const total = (request.ended_ns || Date.now() * 1e6) - request.arrived_ns;
  const kind = { done: "good", error: "bad", expired: "bad", refused: "bad", cancelled: "warn" }[request.state] ?? "accent";
  const usage = detail.usage ?? {};
  const replayed = h("section", { "aria-live": "polite", hidden: true });
  const time = usage.time;
  const facts = [
    ["arrived", dateTime(request.arrived_ns)], ["model", request.model || "–"], ["tenant", request.tenant || "unknown"], request.client && ["from", request.client],
    request.state !== "refused" && ["tokens", `${number(request.prompt_tokens)} in, ${tokensOf(request) ?? "–"} out${request.cached_tokens ? `, ${number(request.cached_tokens)} from the prefix cache` : ""}`],
    request.first_ns && ["first token", `after ${duration(request.first_ns - request.arrived_ns)}`],
    request.versions && ["weights", request.versions[0] === request.versions[1] ? `version ${request.versions[0]}` : `versions ${request.versions[0]} to ${request.versions[1]}`],
    detail.samples?.some((each) => each.drafted) && ["drafted", `${number(detail.samples.reduce((all, each) => all + each.accepted, 0))} of ${number(detail.samples.reduce((all, each) => all + each.drafted, 0))} tokens accepted`],
    usage.billed_ns && ["device time", duration(usage.billed_ns)],
    detail.trace_id && ["trace", h("code", null, detail.trace_id)],
  ].filter(Boolean);
  return [
    h("header", null, h("div", null, h("div", { class: "row" }, h("span", { class: `tag ${kind}` }, request.state), (request.finish || request.status > 0) && h("span", { class: "tag" }, request.finish || `HTTP ${request.status}`))),
      h("div", { class: "row nowrap" },
        running && session.scopes.includes("generate") && h("button", { type: "button", class: "danger", onclick: () => cancelRequest(request.id) }, "Cancel"),
        request.state === "done" && session.scopes.includes("generate") && h("button", { type: "button", class: "quiet", title: "Compute it again, and compare each bit", onclick: (event) => replay(request.id, event.currentTarget, replayed) }, "Replay"),
        h("button", { type: "button", class: "quiet", onclick: () => copy(request.name) }, "Copy id"), closeButton(close))),
    h("p", { class: "mono" }, request.name),
    request.message && h("div", { class: "banner bad" }, h("span", null, h("b", null, request.code), " ", request.message, remedy && h("p", { class: "small" }, h("b", null, "What to do: "), remedy))),
    replayed,
    h("section", null, h("h2", null, `Stages · ${duration(total)}`), waterfall(stepsOf(found))),
    time && h("section", null, h("h2", null, "Where the time went"), causes(time)),
    h("dl", { class: "facts" }, facts.map(([name, value]) => [h("dt", null, name), h("dd", null, value)])),
    (detail.prompt || request.prompt) && h("section", null, h("h2", null, request.status ? "Call" : "Prompt"), h("div", { class: "box-text", tabindex: 0, role: "group", "aria-label": "Prompt" }, detail.prompt || request.prompt)),
    (detail.samples ?? []).map((sample, index) => sampleView(sample, index, detail.samples.length)),
    !detail.samples && !running && request.completion_tokens > 0 && h("p", { class: "muted small" }, "Its texts are no longer kept: they make room for those of newer requests."),
  ];
}

async function cancelRequest(id) {
  try {
    await call("abort_request", { method: "POST", body: { rid: id } });
    toast("Cancelled");
  } catch (error) {
    toast(error.message, true);
  }
}

/** Compute a request again, and show whether all is equal. */
async function replay(id, button, place) {
  button.disabled = true;
  put(place, h("p", { class: "muted small" }, "Computing it again …"));
  place.hidden = false;
  try {
    const found = await json(`v1/replay/${encodeURIComponent(id)}`, { method: "POST" });
    const kind = found.verdict === "equal" ? "good" : "warn";
    put(place, h("div", { class: `banner ${kind}` }, h("span", null, found.summary)), found.reasons.map((each) => h("p", { class: "muted small" }, each)));
  } catch (error) {
    put(place, h("div", { class: "banner bad" }, error.message));
  }
  button.disabled = false;
}

function sampleView(sample, index, several) {
  const title = several > 1 ? `Answer ${index + 1}` : "Answer";
  const spans = sample.weight_versions;
  const many = spans.length > 1;
  const text = h("div", { class: "box-text", tabindex: 0, role: "group", "aria-label": title });
  if (many && sample.tokens_text) {
    spans.forEach(([, start], place) => {
      const end = spans[place + 1]?.[1] ?? sample.tokens_text.length;
      text.append(h("span", { class: `v v${place % 4}` }, sample.tokens_text.slice(start, end).join("")));
    });
  } else text.append(sample.text);
  return h("section", null, h("h2", null, `${title} · ${number(sample.tokens)} tokens · ${sample.finish_reason}`), text,
    many && h("p", { class: "legend" }, spans.map(([version, start], place) => h("span", null, h("i", { class: `i-v${place % 4}` }), `weights ${version} from token ${start}`))),
    sample.tokens_text && sample.tokens_text.length < sample.tokens && h("p", { class: "muted small" }, `The first ${number(sample.tokens_text.length)} tokens.`));
}
