// Tools that programs of Node offer.
import { readFileSync, writeFileSync } from "node:fs";

export function writeFile({ path, content }) {
  writeFileSync(path, content);
  return "written";
}

export function readFile({ path }) {
  return readFileSync(path, "utf8");
}
