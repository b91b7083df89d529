// Operations: models and adapters, batches, dead letters, errors with what to do, keys and limits.

import { call, json } from "./api.js";
import { confirmed, copy, field, h, put, showDialog, toast } from "./dom.js";
import { bytes, clock, count, dateTime, duration, number } from "./format.js";
import { feed } from "./feed.js";
import { follow, known } from "./known.js";
import { remedies } from "./remedies.js";

const panel = (title, note, actions, ...content) => h("section", { class: "panel", "aria-label": title }, h("header", null, h("h2", null, title), note && h("span", { class: "muted small" }, note), h("span", { class: "spacer" }), actions), content);
/** A table; where the page is narrow, each row is a card whose cells have their column's name. */
function table(heads, rows) {
  for (const row of rows) [...row.children].forEach((cell, index) => { cell.dataset.label = heads[index].replace("#", ""); cell.setAttribute("role", "cell"); });
  for (const row of rows) row.setAttribute("role", "row");
  return h("div", { class: "scroll-x", tabindex: 0, role: "group", "aria-label": "Table" }, h("table", { role: "table" }, h("thead", null, h("tr", { role: "row" }, heads.map((each) => h("th", { scope: "col", role: "columnheader", class: each.startsWith("#") ? "num" : undefined }, each ? each.replace("#", "") : h("span", { class: "visually-hidden" }, "Actions"))))), h("tbody", { role: "rowgroup" }, rows)));
}
const empty = (text) => h("p", { class: "empty" }, text);

/** A button that works once at a time, and shows for how long. */
function doing(label, work, more = {}) {
  const button = h("button", { type: "button", ...more, onclick: async () => {
    const began = Date.now();
    button.disabled = true;
    const timer = setInterval(() => { button.textContent = `${label} · ${Math.round((Date.now() - began) / 1000)} s`; }, 500);
    try { await work(); } catch (error) { toast(error.message, true); } finally {
      clearInterval(timer);
      button.disabled = false;
      button.textContent = label;
    }
  } }, label);
  return button;
}

// --- models -----------------------------------------------------------------------------------

const KINDS = { ready: "good", loading: "accent", draining: "warn", failed: "bad", unloaded: "" };

/** Which share of a model's weights its slowest executor has loaded; undefined if none says. */
function loadedShare(status, model) {
  const shares = (status?.lanes ?? []).filter((lane) => lane.model === model).flatMap((lane) => Object.values(lane.stages)).map((stage) => stage.load.loaded).filter((share) => share !== undefined);
  return shares.length ? Math.min(...shares) : undefined;
}

/** The last part of a folder's path, which says enough in a table. */
const lastPart = (path) => (path ?? "").replace(/\/+$/, "").split("/").at(-1);

function modelRow(each, session, again) {
  const may = session.several_models && session.scopes.includes("admin");
  const at = `admin/models/${encodeURIComponent(each.id)}`;
  const progress = each.state === "loading" && h("progress", { "aria-label": `${each.id} is loading`, data: { model: each.id } });
  return h("tr", null,
    h("td", null, h("b", null, each.id), each.default && h("span", { class: "muted small" }, " default"), lastPart(each.path) !== each.id && h("div", { class: "muted small ellipsis", title: each.path }, lastPart(each.path))),
    h("td", null, h("span", { class: `tag ${KINDS[each.state] ?? ""}` }, each.state), each.reason && h("div", { class: "small error" }, each.reason), progress),
    h("td", { class: "num" }, each.parameters ? count(each.parameters) : "–"), h("td", { class: "num" }, each.weight_bytes ? bytes(each.weight_bytes) : "–"), h("td", { class: "num" }, each.kv_bytes ? bytes(each.kv_bytes) : "–"),
    h("td", { class: "num" }, each.load_ns ? duration(each.load_ns) : "–"), h("td", { class: "num" }, number(each.in_flight)),
    h("td", null, may && h("div", { class: "row end" }, each.state === "ready" || each.state === "draining"
      ? doing("Unload", async () => { if (await confirmed(`Unload ${each.id}?`, "It answers the requests that it has, and takes no more.", "Unload")) { await call(`${at}/unload`, { method: "POST", body: {} }); await again(); } }, { class: "danger" })
      : doing("Load", async () => { await call(`${at}/load`, { method: "POST", body: {} }); toast(`${each.id} is loaded`); await again(); }))));
}

function models(session, signal) {
  const body = h("div", null, empty("Reading …"));
  const admin = session.scopes.includes("admin");
  async function draw() {
    const found = admin ? (await json("admin/models", { signal })).data : (await json("v1/models", { signal })).data.filter((each) => !each.parent).map((each) => ({ id: each.id, path: each.root, state: each.state ?? "ready", in_flight: 0 }));
    put(body, table(["Model", "State", "#Parameters", "#Weights", "#KV", "#Loaded in", "#In flight", ""], found.map((each) => modelRow(each, session, draw))));
  }
  draw().catch((error) => { if (!signal.aborted) put(body, empty(error.message)); });
  // States change by themselves, and are part of each snapshot; so is how far a model is loaded.
  let seen = "";
  feed.on(({ status }) => {
    for (const bar of body.querySelectorAll("progress")) {
      const share = loadedShare(status, bar.dataset.model);
      if (share === undefined) bar.removeAttribute("value");
      else bar.value = share;
    }
    const now = JSON.stringify(status?.models ?? {});
    if (seen && now !== seen) draw().catch(() => {});
    seen = now;
  }, signal);
  const add = session.several_models && admin && h("button", { type: "button", onclick: () => addModel(draw) }, "Add a model");
  return panel("Models", session.several_models ? "" : "one model, the same while the server runs", add, body);
}

function addModel(again) {
  const id = h("input", { required: true, spellcheck: "false" });
  const path = h("input", { required: true, spellcheck: "false" });
  const dialog = showDialog("Add a model", field("Id, the name that requests give", id), field("Folder, or name of a bundled model", path),
    h("div", { class: "row" }, doing("Add and load", async () => {
      await call("admin/models", { method: "POST", body: { id: id.value.trim(), path: path.value.trim() } });
      toast(`${id.value.trim()} is loaded`);
      dialog.close();
      await again();
    }, { class: "primary" })));
}

function adapters(session, signal) {
  const body = h("div", null, empty("Reading …"));
  const may = session.scopes.includes("weights");
  async function draw() {
    const found = (await json("v1/models", { signal })).data.filter((each) => each.parent);
    put(body, found.length ? table(["Adapter", "Model", "Folder", ""], found.map((each) => h("tr", null, h("td", null, h("b", null, each.id)), h("td", null, each.parent), h("td", { class: "muted small" }, each.root || "–"),
      h("td", null, may && h("div", { class: "row end" }, doing("Unload", async () => { await call(own(each.parent, "unload"), { method: "POST", body: { lora_name: each.id } }); await draw(); }, { class: "danger" })))))) : empty(feed.latest?.status === null ? "Unknown while the bus can't be reached." : "No LoRA adapter is loaded."));
  }
  let reached = null;
  feed.on(({ status }) => { if (reached !== null && reached !== Boolean(status)) draw().catch(() => {}); reached = Boolean(status); }, signal);
  const own = (model, what) => `${session.several_models ? `models/${encodeURIComponent(model)}/` : ""}v1/${what}_lora_adapter`;
  draw().catch((error) => { if (!signal.aborted) put(body, empty(error.message)); });
  const load = () => {
    const [id, folder, model] = [0, 1, 2].map(() => h("input", { spellcheck: "false", required: true }));
    const dialog = showDialog("Load an adapter", field("Id, the name that requests give as their model", id), field("Folder, as the executors see it", folder), session.several_models && field("Model", model),
      h("div", { class: "row" }, doing("Load", async () => {
        await call(own(model.value.trim(), "load"), { method: "POST", body: { lora_name: id.value.trim(), lora_path: folder.value.trim() } });
        dialog.close();
        await draw();
      }, { class: "primary" })));
  };
  return panel("Adapters", "", may && h("button", { type: "button", onclick: load }, "Load an adapter"), body);
}

// --- batches ----------------------------------------------------------------------------------

const BATCH_KINDS = { in_progress: "accent", validating: "accent", cancelling: "warn" };
const UNSEEN_S = 10;

function batchRow(each, at_ms) {
  const ended = each.completed + each.failed;
  const unseen_s = at_ms / 1000 - each.seen_s;
  const said = each.total ? `${number(ended)} of ${number(each.total)}` : "being checked";
  return h("tr", null,
    h("td", null, h("span", { class: "mono", style: { overflowWrap: "anywhere" } }, each.id), h("div", { class: "muted small" }, each.endpoint)), h("td", null, each.tenant),
    h("td", null, h("span", { class: `tag ${BATCH_KINDS[each.status] ?? ""}` }, each.status.replace("_", " ")), unseen_s > UNSEEN_S && h("div", { class: "small error" }, `no gateway has run it for ${duration(unseen_s * 1e9)}`)),
    h("td", { class: "num" }, h("progress", { "aria-label": `${each.id}: ${said} lines`, max: each.total || 1, value: ended }), h("div", { class: "small" }, said)),
    h("td", { class: "num" }, number(each.failed)), h("td", { class: "num" }, each.lines_per_s.toFixed(1)), h("td", { class: "num nowrap" }, duration(Math.max(0, at_ms / 1000 - each.created_s) * 1e9)));
}

function batches(signal) {
  const body = h("div", null, empty("Reading …"));
  const note = h("span", null);
  let drawn = "";
  feed.on(({ status, at_ms }) => {
    if (!status) return;
    const more = status.open_batches - status.batches.length;
    note.textContent = status.open_batches ? `${number(status.open_batches)} open${more > 0 ? `, of which ${number(more)} are not shown` : ""}` : "";
    const now = JSON.stringify(status.batches);
    if (now === drawn || body.contains(document.activeElement)) return;
    drawn = now;
    put(body, status.batches.length ? table(["Batch", "Tenant", "Status", "#Lines", "#Failed", "#Lines/s", "#Age"], status.batches.map((each) => batchRow(each, at_ms))) : empty("No batch is open."));
  }, signal);
  return panel("Batches", note, null, body);
}

// --- dead letters -----------------------------------------------------------------------------

function letters(session, signal) {
  if (!session.scopes.includes("admin")) return null;
  const body = h("div", null, empty("Reading …"));
  async function draw() {
    const found = (await json("admin/dead_letters", { signal })).data;
    put(body, found.length ? table(["Given up", "Request", "Error", "#Deaths", ""], found.map((each) => h("tr", null,
      h("td", { class: "nowrap" }, dateTime(each.died_ns)),
      h("td", null, h("span", { class: "mono" }, each.request_id || each.id), h("div", { class: "muted small" }, `${each.tenant}${each.model ? `, ${each.model}` : ""}`), each.prompt && h("div", { class: "small" }, each.prompt.slice(0, 200))),
      h("td", null, h("span", { class: "tag bad" }, each.error.code), h("div", { class: "small muted" }, each.error.message)), h("td", { class: "num" }, each.deaths),
      h("td", null, h("div", { class: "row end" },
        doing("Try again", async () => { const { request_id: id } = await json(`admin/dead_letters/${encodeURIComponent(each.id)}/retry`, { method: "POST", body: {} }); toast(`Published again as ${id}`); await draw(); }),
        doing("Drop", async () => { if (await confirmed("Drop this letter?", "The request is then lost for good.", "Drop")) { await call(`admin/dead_letters/${encodeURIComponent(each.id)}`, { method: "DELETE" }); await draw(); } }, { class: "danger" })))))) : empty("None. A request whose lane fails each time is answered with an error, and kept here."));
  }
  draw().catch((error) => { if (!signal.aborted) put(body, empty(error.message)); });
  let seen = null;
  feed.on(({ status }) => { if (seen !== null && status && status.dead_letters !== seen) draw().catch(() => {}); seen = status?.dead_letters ?? seen; }, signal);
  return panel("Dead letters", "", null, body);
}

// --- errors -----------------------------------------------------------------------------------

/** Errors of requests by code: how many, the last message, what to do. */
export function errorsOf(requests) {
  const found = new Map();
  for (const each of requests) {
    if (!each.code) continue;
    const of = found.get(each.code) ?? { code: each.code, number: 0, last: each };
    of.number += 1;
    if (each.ended_ns >= of.last.ended_ns) of.last = each;
    found.set(each.code, of);
  }
  return [...found.values()].sort((a, b) => b.last.ended_ns - a.last.ended_ns);
}

function errors(signal) {
  const body = h("div", null, empty("Reading …"));
  async function draw() {
    const found = errorsOf(known.values());
    const texts = await remedies();
    put(body, found.length ? table(["Code", "#Requests", "Last", "What it said", "What to do"], found.map(({ code, number: times, last }) => h("tr", null,
      h("td", null, h("a", { class: "tag bad", href: `#/requests?q=code:${code}` }, code)), h("td", { class: "num" }, number(times)), h("td", { class: "nowrap" }, h("a", { href: `#/requests/${encodeURIComponent(last.id)}` }, clock(last.ended_ns))),
      h("td", { class: "small" }, last.message), h("td", { class: "small muted" }, texts[code] ?? "")))) : empty("No request of this gateway has failed, and no call was refused."));
  }
  const failed = (error) => { if (!signal.aborted) put(body, empty(error.message)); };
  let drawn = "";
  follow(() => {
    const now = JSON.stringify(errorsOf(known.values()).map(({ code, number: times }) => [code, times]));
    // Not while someone points at a row.
    if (now === drawn || (drawn && body.matches(":hover, :focus-within"))) return;
    drawn = now;
    draw().catch(failed);
  }, failed, signal);
  if (known.size) draw().catch(failed);
  return panel("Errors", "of the last requests and refused calls of this gateway", null, body);
}

// --- keys and limits --------------------------------------------------------------------------

const limitsOf = (limits) => ["requests_per_minute", "tokens_per_minute", "max_in_flight"].filter((name) => limits?.[name]).map((name) => `${number(limits[name])} ${{ requests_per_minute: "requests/min", tokens_per_minute: "tokens/min", max_in_flight: "at once" }[name]}`).join(", ") || "none";

const limitInputs = (limits = {}) => {
  const inputs = Object.fromEntries(["requests_per_minute", "tokens_per_minute", "max_in_flight"].map((name) => [name, h("input", { inputmode: "numeric", value: limits[name] ?? "", placeholder: "no limit" })]));
  const read = () => Object.fromEntries(Object.entries(inputs).filter(([, input]) => input.value.trim()).map(([name, input]) => [name, Number(input.value)]));
  return [[field("Requests a minute", inputs.requests_per_minute), field("Tokens a minute", inputs.tokens_per_minute), field("Calls at once", inputs.max_in_flight)], read];
};

function keys(session, signal) {
  if (!session.scopes.includes("admin")) return null;
  if (!session.policy) return panel("Keys and limits", "", null, empty("This gateway has no keys: every caller that reaches it may do everything. The setting policy.backend turns them on; see docs/policy.md."));
  const body = h("div", null, empty("Reading …"));
  async function draw() {
    const [{ data: found }, tenants] = await Promise.all([json("admin/keys", { signal }), json("admin/tenants", { signal })]);
    put(body, table(["Key", "Tenant", "May", "Limits", "Until", ""], found.map((each) => h("tr", null,
      h("td", null, h("b", null, each.name), h("div", { class: "mono muted" }, each.id)), h("td", null, each.tenant), h("td", null, h("div", { class: "row" }, each.scopes.map((scope) => h("span", { class: "tag" }, scope)))), h("td", { class: "small" }, limitsOf(each.limits)),
      h("td", { class: "small nowrap" }, each.expires_ns ? dateTime(each.expires_ns) : "for ever"),
      h("td", null, h("div", { class: "row end" }, h("button", { type: "button", onclick: () => changeKey(each, draw) }, "Limits"), doing("Revoke", async () => { if (await confirmed(`Revoke ${each.name}?`, "Its calls are refused within a second.", "Revoke")) { await call(`admin/keys/${encodeURIComponent(each.id)}`, { method: "DELETE" }); await draw(); } }, { class: "danger" })))))),
      tenantTable(tenants, draw));
  }
  draw().catch((error) => { if (!signal.aborted) put(body, empty(error.message)); });
  return panel("Keys and limits", "", h("div", { class: "row" }, h("button", { type: "button", onclick: () => changeTenant("", {}, draw) }, "Limit a tenant"), h("button", { type: "button", onclick: () => newKey(draw) }, "New key")), body);
}

function tenantTable(tenants, draw) {
  const entries = Object.entries(tenants);
  if (!entries.length) return null;
  return table(["Tenant", "Weight", "Limits", ""], entries.map(([name, each]) => h("tr", null, h("td", null, h("b", null, name)), h("td", null, each.weight ?? "default"), h("td", { class: "small" }, limitsOf(each.limits)),
    h("td", null, h("div", { class: "row end" }, h("button", { type: "button", onclick: () => changeTenant(name, each, draw) }, "Change"))))));
}

function changeKey(each, again) {
  const [inputs, read] = limitInputs(each.limits);
  const dialog = showDialog(`Limits of ${each.name}`, inputs, h("div", { class: "row" }, doing("Save", async () => {
    await call(`admin/keys/${encodeURIComponent(each.id)}`, { method: "PATCH", body: { limits: read() } });
    dialog.close();
    await again();
  }, { class: "primary" })));
}

function changeTenant(name, each, again) {
  const named = h("input", { value: name, disabled: Boolean(name), spellcheck: "false" });
  const weight = h("input", { value: each.weight ?? "", placeholder: "default", inputmode: "decimal" });
  const [inputs, read] = limitInputs(each.limits);
  const dialog = showDialog("A tenant's limits", field("Tenant", named), field("Weight, its share where tenants compete", weight), inputs, h("div", { class: "row" }, doing("Save", async () => {
    const body = { ...(weight.value.trim() ? { weight: Number(weight.value) } : {}), limits: read() };
    await call(`admin/tenants/${encodeURIComponent(named.value.trim())}`, { method: "PUT", body });
    dialog.close();
    await again();
  }, { class: "primary" })));
}

function newKey(again) {
  const name = h("input", { required: true, spellcheck: "false" });
  const tenant = h("input", { placeholder: "as the name", spellcheck: "false" });
  const scopes = ["read", "generate", "weights", "admin"].map((scope) => h("label", { class: "check" }, h("input", { type: "checkbox", value: scope, checked: scope === "generate" }), scope));
  const [inputs, read] = limitInputs();
  const shown = h("div", { class: "stack" });
  showDialog("New key", field("Name", name), field("Tenant", tenant), h("fieldset", { class: "row" }, h("legend", { class: "small muted" }, "May"), scopes), inputs, h("div", { class: "row" }, doing("Create", async () => {
    const chosen = scopes.map((each) => each.querySelector("input")).filter((each) => each.checked).map((each) => each.value);
    const body = { name: name.value.trim(), scopes: chosen, limits: read(), ...(tenant.value.trim() ? { tenant: tenant.value.trim() } : {}) };
    const made = await json("admin/keys", { method: "POST", body });
    put(shown, h("p", null, "This is the only time that the key is shown:"), h("pre", { class: "snippet" }, made.key), h("div", { class: "row" }, h("button", { type: "button", onclick: () => copy(made.key) }, "Copy")));
    await again();
  }, { class: "primary" })), shown);
}

export function render(root, { session, signal }) {
  put(root, h("div", { class: "page" }, h("header", null, h("h1", null, "Operations"), h("span", { class: "spacer" }), h("span", { class: "muted small" }, `nano-inference ${session.version}`)),
    models(session, signal), adapters(session, signal), batches(signal), letters(session, signal), errors(signal), keys(session, signal)));
}
