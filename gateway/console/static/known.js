// The requests that this tab knows, for all views: fetched as they change, and kept while another view is shown.

import { json } from "./api.js";
import { feed } from "./feed.js";

const MOST = 10_000;

/** By number. */
export const known = new Map();
let next = 0;
let [loading, read] = [null, false];

async function fetchChanges(signal) {
  for (let more = true; more && !signal.aborted;) {
    const page = await json(`console/requests?after=${next}`, { signal });
    // The gateway was restarted, and counts anew.
    if (!page.more && page.next < next) { known.clear(); next = 0; read = false; continue; }
    for (const each of page.requests) {
      each.words = `${each.name} ${each.id} ${each.tenant} ${each.model} ${each.state} ${each.finish} ${each.code} ${each.prompt} ${each.answer} ${each.message}`.toLowerCase();
      known.set(each.number, each);
    }
    ({ next, more } = page);
    read = true;
  }
  if (known.size > MOST) for (const each of [...known.keys()].sort((a, b) => a - b).slice(0, known.size - MOST)) known.delete(each);
}

/** Fetch what has changed whenever the feed says that something has, one fetch at a time, and call a function after each. */
export function follow(changed, failed, signal) {
  feed.on((snapshot) => {
    if (loading || (snapshot.gateway.requests === next && read)) return;
    loading = fetchChanges(signal).then(changed).catch((error) => { if (!signal.aborted) failed(error); }).finally(() => { loading = null; });
  }, signal);
}
