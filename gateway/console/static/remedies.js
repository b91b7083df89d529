// Cause and remedy of each error's code, as in docs/errors.md; read when the first one is shown.

import { address } from "./api.js";

let reading = null;

/** Return the remedies by code. */
export function remedies() {
  reading ??= fetch(address("console/static/errors.json"), { credentials: "omit" }).then((response) => response.json()).catch((error) => { reading = null; throw error; });
  return reading;
}
