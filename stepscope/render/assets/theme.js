// Runs before the first paint: the reader's choice of theme, if there is one.
(() => {
  try {
    const chosen = localStorage.getItem("stepscope-theme");
    if (chosen === "dark" || chosen === "light") document.documentElement.dataset.theme = chosen;
  } catch { /* storage may be forbidden for a local file */ }
  document.documentElement.classList.add("js");
})();
