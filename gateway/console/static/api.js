// Calls to the gateway that has served the page, with the key that it holds for this tab.

const KEY = "console.key";
const BASE = new URL("../", document.baseURI.replace(/\/console$/, "/console/"));

export class ApiError extends Error {
  constructor(status, body, fallback) {
    const error = body?.error ?? {};
    super(error.message ?? fallback);
    this.status = status;
    this.code = error.code ?? "";
    this.param = error.param ?? "";
  }
}

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

export const address = (path) => new URL(path, BASE);

/** As fetch, to a path of the gateway. Raises ApiError for a status of 400 and above. */
export async function call(path, { method = "GET", body, headers = {}, signal } = {}) {
  const sent = { Accept: "application/json", ...headers };
  if (key.get()) sent.Authorization = `Bearer ${key.get()}`;
  if (body !== undefined) sent["Content-Type"] = "application/json";
  const response = await fetch(address(path), {
    method, signal, headers: sent, cache: "no-store", credentials: "omit", redirect: "error",
    body: body === undefined ? undefined : JSON.stringify(body),
  });
  if (response.ok) return response;
  let parsed = null;
  try { parsed = await response.json(); } catch { /* not ours: a proxy's page */ }
  if (response.status === 401) document.dispatchEvent(new CustomEvent("key-needed", { detail: parsed?.error?.message }));
  throw new ApiError(response.status, parsed, `${response.status} ${response.statusText}`);
}

export const json = async (path, options) => (await call(path, options)).json();

/** Yield the events of a stream: {id, name, data}. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      rest += value;
      for (let end = rest.indexOf("\n\n"); end >= 0; end = rest.indexOf("\n\n")) {
        const event = parse(rest.slice(0, end));
        rest = rest.slice(end + 2);
        if (event) yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

export function parse(block) {
  const event = { id: "", name: "", data: null };
  for (const line of block.split("\n")) {
    if (line.startsWith("data: ")) event.data = event.data === null ? line.slice(6) : `${event.data}\n${line.slice(6)}`;
    else if (line.startsWith("id: ")) event.id = line.slice(4);
    else if (line.startsWith("event: ")) event.name = line.slice(7);
  }
  return event.data === null ? null : event;
}

export const pause = (ms, signal) => new Promise((resolve) => {
  const timer = setTimeout(resolve, ms);
  signal?.addEventListener("abort", () => { clearTimeout(timer); resolve(); }, { once: true });
});
