// Before the first paint, so that no page flashes in the other theme. A classic script for that.
// `data-theme` is what is shown, `data-chosen` what was chosen: empty for the system's theme.
(() => {
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const show = () => {
    root.dataset.theme = root.dataset.chosen || (dark.matches ? "dark" : "light");
    document.dispatchEvent(new Event("theme"));
  };
  let chosen = null;
  try { chosen = localStorage.getItem("console.theme"); } catch { /* no storage: the system's */ }
  root.dataset.chosen = chosen === "light" || chosen === "dark" ? chosen : "";
  show();
  dark.addEventListener("change", show);
  document.addEventListener("choose-theme", show);
})();
