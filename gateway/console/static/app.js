// The frame: views by the address's hash, the theme, the key, and the state of the connection.

import { ApiError, json, key } from "./api.js";
import { h, icon, put, toast } from "./dom.js";
import { feed } from "./feed.js";
import { openPalette } from "./palette.js";

const VIEWS = {
  playground: { title: "Playground", load: () => import("./playground.js") },
  pipeline: { title: "Pipeline", load: () => import("./pipeline.js") },
  requests: { title: "Requests", load: () => import("./requests.js") },
  operations: { title: "Operations", load: () => import("./operations.js") },
};

const main = document.getElementById("main");
const shared = { session: null, models: [] };
/** Stands for the session while the gateway does not answer yet: it loads a model. */
const STARTING = { starting: true, default_model: "", models: [], scopes: [] };
const SOON_MS = 300;
const THEMES = {
  "": { name: "Theme: system", path: "M3 4h14v9H3zM7 16.5h6M10 13v3.5" },
  light: { name: "Theme: light", path: "M10 7a3 3 0 100 6 3 3 0 000-6zM10 2.5v1M10 16.5v1M2.5 10h1M16.5 10h1M4.7 4.7l.7.7M14.6 14.6l.7.7M15.3 4.7l-.7.7M5.4 14.6l-.7.7" },
  dark: { name: "Theme: dark", path: "M16 11.5A6.5 6.5 0 118.5 4a5 5 0 007.5 7.5z" },
};
let chooseTheme = null;
let leave = null;
/** Whether a view could not be shown, as while the gateway is lost; it is tried again when that is back. */
let failed = false;

async function show(moved) {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const [name, ...rest] = path.split("/");
  const view = VIEWS[name] ? name : "playground";
  leave?.abort();
  const left = (leave = new AbortController());
  for (const link of document.querySelectorAll("nav a")) {
    if (link.dataset.view === view) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = `${VIEWS[view].title} · nano-inference`;
  failed = false;
  try {
    const { render } = await VIEWS[view].load();
    // Models and adapters that the operations, or others, have loaded since.
    if (view === "playground" && moved) shared.models = await json("v1/models").then(({ data }) => data, () => shared.models);
    if (left.signal.aborted) return;
    main.dataset.view = view;
    put(document.getElementById("side-view"));
    await render(main, { ...shared, session: shared.session ?? STARTING, signal: left.signal, argument: rest.map(decodeURIComponent).join("/"), query: new URLSearchParams(query), reload: begin });
  } catch (error) {
    failed = true;
    const lost = feed.state === "lost";
    put(main, h("div", { class: "page" }, h("div", { class: "banner bad", role: "alert" }, h("b", null, lost ? "The gateway can't be reached" : "This view failed"), lost ? "The view opens when it is back." : error.message)));
    throw error;
  }
}

async function begin() {
  const early = setTimeout(() => show(false), SOON_MS);
  try {
    const session = await json("console/session");
    shared.models = (await json("v1/models")).data;
    shared.session = session;
  } catch (error) {
    if (error instanceof ApiError && error.status === 401) return;
    put(main, h("div", { class: "page" }, h("div", { class: "banner bad", role: "alert" }, h("b", null, "The gateway can't be reached"), error.message,
      h("button", { type: "button", onclick: begin }, "Try again"))));
    setTimeout(() => { if (!shared.session) begin(); }, 2000);
    return;
  } finally {
    clearTimeout(early);
  }
  document.getElementById("key-button").hidden = !shared.session.keys;
  await show(false);
  // So that each view opens also while the gateway is away.
  for (const { load } of Object.values(VIEWS)) load().catch(() => {});
}

function connection() {
  const element = document.getElementById("live");
  const set = (state, text) => { element.dataset.state = state; if (element.textContent !== text) element.textContent = text; };
  const refresh = () => {
    const status = feed.latest?.status;
    if (feed.state === "refused") set("bad", "Needs a key");
    else if (feed.state === "lost") set("bad", "Lost, trying again");
    else if (feed.state === "connecting" || !feed.latest) set("", "Connecting");
    else if (!status) set("bad", "Bus unreachable");
    else if (!status.ready) set("bad", "Not ready");
    else if (status.progress.status === "stalled") set("bad", "Stalled");
    else set(status.dead_letters ? "warn" : "good", status.in_flight ? "Working" : "Ready");
  };
  feed.addEventListener("state", refresh);
  feed.addEventListener("snapshot", refresh);
  feed.addEventListener("state", () => { if (failed && feed.state === "live") show(false); });
  refresh();
}

function theme() {
  const button = document.getElementById("theme-button");
  const root = document.documentElement;
  chooseTheme = (value) => {
    root.dataset.chosen = value;
    try { value ? localStorage.setItem("console.theme", value) : localStorage.removeItem("console.theme"); } catch { /* not kept */ }
    const { name, path } = THEMES[value];
    put(button, icon(path));
    button.title = name;
    button.setAttribute("aria-label", name);
    document.dispatchEvent(new Event("choose-theme"));
  };
  button.addEventListener("click", () => chooseTheme({ "": "light", light: "dark", dark: "" }[root.dataset.chosen]));
  chooseTheme(root.dataset.chosen);
}

function keys() {
  const dialog = document.getElementById("key-dialog");
  const input = document.getElementById("key-input");
  const open = (why) => {
    document.getElementById("key-text").textContent = "It stays in this tab until you close it, and goes to this gateway alone, as a header.";
    document.getElementById("key-error").textContent = key.get() ? why ?? "" : "";
    if (!dialog.open) dialog.showModal();
  };
  document.addEventListener("key-needed", (event) => open(event.detail));
  document.getElementById("key-button").addEventListener("click", () => open());
  document.getElementById("key-forget").addEventListener("click", () => {
    key.set("");
    location.reload();
  });
  document.getElementById("key-form").addEventListener("submit", () => {
    key.set(input.value.trim());
    input.value = "";
    feed.restart();
    begin();
  });
}

addEventListener("keydown", (event) => {
  if (event.key.toLowerCase() !== "k" || !(event.ctrlKey || event.metaKey) || event.shiftKey || event.altKey) return;
  event.preventDefault();
  openPalette([
    ...Object.entries(VIEWS).map(([name, { title }]) => ({ name: `Go to ${title}`, run: () => { location.hash = `#/${name}`; } })),
    ...Object.entries(THEMES).map(([value, { name }]) => ({ name, run: () => chooseTheme(value) })),
  ]);
});
// A file that is dropped beside the chat must not be opened in its place.
for (const name of ["dragover", "drop"]) {
  addEventListener(name, (event) => {
    if (event.defaultPrevented || !event.dataTransfer?.types.includes("Files")) return;
    event.preventDefault();
    event.dataTransfer.dropEffect = "none";
  });
}
addEventListener("hashchange", () => {
  if (!shared.session) return;
  show(true);
  main.focus({ preventScroll: true });
});
addEventListener("unhandledrejection", (event) => {
  if (event.reason instanceof ApiError || event.reason?.name === "AbortError") {
    event.preventDefault();
    if (event.reason.status && event.reason.status !== 401) toast(event.reason.message, true);
  }
});

theme();
keys();
connection();
feed.start();
begin();
