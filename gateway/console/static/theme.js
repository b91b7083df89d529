// Before the first paint, so that no page flashes in the other theme. A classic script for that.
(() => {
  let theme = null;
  try { theme = localStorage.getItem("console.theme"); } catch { /* no storage: the system's */ }
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
})();
