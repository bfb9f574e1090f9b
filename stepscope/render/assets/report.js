// What the page adds to plain HTML: live charts with one zoom, themes, keys, filter, sorting. Nothing leaves the page.
(() => {
  "use strict";
  const root = document.documentElement;
  const byId = (id) => document.getElementById(id);
  const all = (query, within = document) => [...within.querySelectorAll(query)];
  const read = (id) => JSON.parse(byId(id).textContent);
  const dark = read("theme-colours");
  const charts = read("chart-data");
  const drawn = new Map(); // anchor -> the element that plotly drew into

  // ---- theme -------------------------------------------------------------------------------------------------------
  const system = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme || (system.matches ? "dark" : "light")) === "dark";

  // Plotly has no style sheet: the figures hold the light theme's colours, exchanged one for one.
  const themed = (value) => {
    if (typeof value === "string") return isDark() && Object.hasOwn(dark, value) ? dark[value] : value;
    if (Array.isArray(value)) return value.map(themed);
    if (value && typeof value === "object") return Object.fromEntries(Object.entries(value).map(([k, v]) => [k, themed(v)]));
    return value;
  };

  const switchTheme = () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    try { localStorage.setItem("stepscope-theme", root.dataset.theme); } catch { /* not allowed here */ }
    redraw();
  };

  // ---- charts ------------------------------------------------------------------------------------------------------
  const config = { displayModeBar: false, responsive: true, doubleClick: false };
  let zooming = false;
  let range = null; // the micro-steps in view in every chart, null for each chart's own

  const layoutOf = (anchor) => {
    const layout = themed(charts[anchor].layout);
    layout.dragmode = innerWidth < 700 ? false : "zoom";
    layout.hoverlabel = { bgcolor: isDark() ? "#1c2127" : "#ffffff" };
    layout.hovermode = shares(anchor) ? "x unified" : "closest";
    const was = drawn.get(anchor);
    if (was) layout.yaxis.type = was.layout.yaxis.type;
    if (range && shares(anchor)) layout.xaxis.range = range.slice();
    return layout;
  };
  const shares = (anchor) => charts[anchor].layout.xaxis.type !== "category";

  const draw = (anchor) => {
    const figure = byId(anchor);
    const live = figure.querySelector(".live");
    live.hidden = false;
    return Plotly.newPlot(live, themed(charts[anchor].data), layoutOf(anchor), config).then(() => {
      figure.querySelector(".static").hidden = true;
      drawn.set(anchor, live);
      live.on("plotly_relayout", (change) => shares(anchor) && follow(change));
      live.on("plotly_doubleclick", () => zoom(null));
      offerLog(figure, anchor, live);
    }).catch((error) => { live.hidden = true; console.warn(`chart ${anchor} stays a picture:`, error); });
  };

  const follow = (change) => {
    if (!zooming && change["xaxis.range[0]"] !== undefined) zoom([change["xaxis.range[0]"], change["xaxis.range[1]"]]);
  };

  const zoom = (to) => {
    zooming = true;
    range = to;
    byId("unzoom").hidden = to === null;
    const moves = [...drawn].filter(([anchor]) => shares(anchor)).map(([anchor, live]) => {
      const update = { "xaxis.range": (to || charts[anchor].layout.xaxis.range).slice() };
      if (to === null) update["yaxis.autorange"] = true;
      return Plotly.relayout(live, update);
    });
    return Promise.all(moves).then(() => { zooming = false; });
  };

  const redraw = () => drawn.forEach((live, anchor) => Plotly.react(live, themed(charts[anchor].data), layoutOf(anchor), config));

  const offerLog = (figure, anchor, live) => {
    if (!shares(anchor)) return;
    const button = document.createElement("button");
    button.type = "button";
    button.className = "log";
    const say = () => {
      const log = live.layout.yaxis.type === "log";
      button.textContent = log ? "linear" : "logarithmic";
    };
    button.addEventListener("click", () => {
      const type = live.layout.yaxis.type === "log" ? "linear" : "log";
      Plotly.relayout(live, { "yaxis.type": type, "yaxis.autorange": true }).then(say);
    });
    say();
    figure.querySelector(".unit").append(" ", button);
  };

  // Charts are drawn one after the other when they come near the window; until then their picture stands there.
  let queue = Promise.resolve();
  const drawNearby = () => {
    const observer = new IntersectionObserver((entries) => entries.filter((e) => e.isIntersecting).forEach((entry) => {
      observer.unobserve(entry.target);
      queue = queue.then(() => draw(entry.target.id));
    }), { rootMargin: "600px 0px" });
    Object.keys(charts).forEach((anchor) => {
      byId(anchor).querySelector(".plot").style.minHeight = `${charts[anchor].layout.height}px`;
      observer.observe(byId(anchor));
    });
  };

  // ---- places ------------------------------------------------------------------------------------------------------
  const go = () => {
    const hash = decodeURIComponent(location.hash.slice(1));
    const step = /^step-(\d+)$/.exec(hash);
    const target = byId(hash);
    for (let outer = target?.closest("details"); outer; outer = outer.parentElement.closest("details")) outer.open = true;
    if (step) zoom(around(+step[1], +step[1]));
    else if (target?.dataset.first) zoom(around(+target.dataset.first, +target.dataset.last));
    if (step && !target) byId("overview").scrollIntoView();
  };
  const around = (first, last) => {
    const room = Math.max(6, Math.round((last - first) / 5));
    return [Math.max(0.5, first - room), last + room];
  };

  const findings = () => all("article.finding").filter((f) => !f.hidden);
  let current = -1;
  const turn = (by) => {
    const shown = findings();
    if (!shown.length) return;
    const here = shown.indexOf(byId(location.hash.slice(1)));
    current = Math.min(shown.length - 1, Math.max(0, (here < 0 ? (by > 0 ? -1 : shown.length) : here) + by));
    location.hash = shown[current].id;
    shown[current].focus({ preventScroll: true });
    shown[current].scrollIntoView();
  };

  // ---- filter ------------------------------------------------------------------------------------------------------
  const filter = () => {
    const words = byId("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
    const off = new Set(all(".toggle[aria-pressed=false]").map((b) => b.dataset.severity));
    all("[data-filter]").forEach((item) => {
      const text = item.textContent.toLowerCase();
      item.hidden = off.has(item.dataset.severity) || !words.every((word) => text.includes(word));
    });
  };

  // ---- sorting -----------------------------------------------------------------------------------------------------
  const key = (cell) => {
    const text = (cell.dataset.value ?? cell.textContent).replace(/\u202f/g, "").trim();
    if (text === "" || text === "–") return null;
    const value = text === "infinity" ? Infinity : Number(text);
    return Number.isNaN(value) ? text : value;
  };
  const compare = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b)));

  const sortable = (table) => all("thead th", table).forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      all("thead th", table).forEach((h) => h.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const rows = [...table.tBodies[0].rows].map((row) => [key(row.cells[column]), row]);
      rows.sort(([a], [b]) => (a === null) - (b === null) || (a === null ? 0 : (down ? -1 : 1) * compare(a, b)));
      table.tBodies[0].append(...rows.map(([, row]) => row));
    });
  });

  // ---- wiring ------------------------------------------------------------------------------------------------------
  const help = byId("help");
  const keys = {
    j: () => turn(1),
    k: () => turn(-1),
    f: () => byId("filter").focus(),
    t: switchTheme,
    a: () => zoom(null),
    "?": () => (help.open ? help.close() : help.showModal()),
  };
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName)) {
      if (event.key === "Escape") event.target.blur();
      return;
    }
    if (!Object.hasOwn(keys, event.key)) return;
    event.preventDefault();
    keys[event.key]();
  });
  all(".tools, .severities").forEach((part) => { part.hidden = false; });
  all("table.sortable").forEach(sortable);
  byId("filter").addEventListener("input", filter);
  all(".toggle").forEach((button) => button.addEventListener("click", () => {
    button.setAttribute("aria-pressed", String(button.getAttribute("aria-pressed") !== "true"));
    filter();
  }));
  byId("theme").addEventListener("click", switchTheme);
  byId("unzoom").addEventListener("click", () => zoom(null));
  byId("help-open").addEventListener("click", keys["?"]);
  system.addEventListener("change", redraw);
  addEventListener("hashchange", go);
  if (typeof Plotly === "undefined") root.dataset.charts = "static";
  else drawNearby();
  go();
  if (!root.dataset.charts) root.dataset.charts = "live";
})();
