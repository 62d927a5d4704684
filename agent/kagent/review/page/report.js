"use strict";
// Draws what page.py put into the page: diffs, the table of candidates and the dialog.
(() => {
  const $ = (id) => document.getElementById(id);
  let data;
  let sort = { key: "id", down: false };

  const times = (x) => (x == null ? "–" : `${x.toFixed(3)}×`);
  const percent = (x) => (x == null ? "–" : `${Math.round(x * 100)} %`);
  const micro = (us) => (us >= 1000 ? `${(us / 1000).toFixed(3)} ms` : `${us.toFixed(1)} µs`);
  const between = (low, high) =>
    high >= 1000 ? `${(low / 1000).toFixed(3)}–${micro(high)}` : `${low.toFixed(1)}–${micro(high)}`;
  const passed = (c) => c.speed != null;
  const title = (c) => `#${c.id} ${c.name}`;

  // Everything that is not ours to trust becomes text, never markup.
  function element(tag, attributes = {}, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.append(...children.filter((c) => c != null));
    return made;
  }

  const small = () => window.innerWidth <= 690;

  // -- sources and diffs -------------------------------------------------------------------------

  const text = (html) => { const t = document.createElement("template"); t.innerHTML = html; return t.content.textContent; };
  const sourceOf = (c) => c.lines.map((n) => text(data.lines[n]));

  function unified(before, after) {
    const [a, b] = [sourceOf(before), sourceOf(after)];
    const out = [`--- #${before.id}`, `+++ #${after.id}`];
    const around = 3;
    const groups = [];
    for (const edit of after.edits) {
      const last = groups[groups.length - 1];
      if (last && edit[0] - last[last.length - 1][1] <= 2 * around) last.push(edit);
      else groups.push([edit]);
    }
    for (const group of groups) {
      const [first, last] = [group[0], group[group.length - 1]];
      const [i1, j1] = [Math.max(0, first[0] - around), Math.max(0, first[2] - around)];
      const [i2, j2] = [Math.min(a.length, last[1] + around), Math.min(b.length, last[3] + around)];
      out.push(`@@ -${i1 + 1},${i2 - i1} +${j1 + 1},${j2 - j1} @@`);
      let i = i1;
      for (const [e1, e2, f1, f2] of group) {
        for (; i < e1; i++) out.push(` ${a[i]}`);
        for (; i < e2; i++) out.push(`-${a[i]}`);
        for (let j = f1; j < f2; j++) out.push(`+${b[j]}`);
      }
      for (; i < i2; i++) out.push(` ${a[i]}`);
    }
    return out.join("\n");
  }

  function showDiff(at, candidate) {
    const parent = data.candidates[candidate.parents[0]];
    if (!parent || !candidate.edits.length) { at.replaceChildren("The text is the same."); return; }
    at.innerHTML = Diff2Html.html(unified(parent, candidate), {
      drawFileList: false, matching: "lines", outputFormat: small() ? "line-by-line" : "side-by-side",
      colorScheme: matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light",
    });
  }

  function listing(candidate) {
    const list = element("ol", { class: "source", tabindex: "0", "aria-label": `Source of ${title(candidate)}` });
    list.innerHTML = candidate.lines.map((n) => `<li>${data.lines[n] || " "}</li>`).join("");
    return list;
  }

  // -- candidates --------------------------------------------------------------------------------

  function rows() {
    const wanted = $("filter").value, word = $("find").value.toLowerCase();
    const shown = data.candidates.filter((c) =>
      (wanted === "all" || (wanted === "passed" && passed(c)) || (wanted === "rejected" && c.stage) || (wanted === "best" && c.promoted)) &&
      (!word || [c.name, c.hypothesis, c.status, c.operator, c.card, c.model, c.message].some((t) => t && t.toLowerCase().includes(word))));
    const key = (c) => c[sort.key] ?? (typeof data.candidates[0]?.[sort.key] === "string" ? "" : -Infinity);
    shown.sort((a, b) => (key(a) < key(b) ? -1 : key(a) > key(b) ? 1 : a.id - b.id) * (sort.down ? -1 : 1));
    const onPath = new Set(data.path);
    $("table").tBodies[0].replaceChildren(...shown.map((c) => {
      const row = element("tr", { class: onPath.has(c.id) ? "path" : "" },
        element("td", {}, element("button", { class: "link", "data-candidate": c.id }, `#${c.id}`)),
        element("td", {}, c.name), element("td", {}, c.operator),
        element("td", { class: "n" }, times(c.speed)), element("td", { class: "n" }, times(c.gain)),
        element("td", { class: "n" }, percent(c.share)),
        element("td", { class: c.stage ? "bad" : c.promoted ? "good" : "" }, c.promoted ? "new best" : c.outcome));
      row.addEventListener("click", () => open(c.id));
      return row;
    }));
    for (const button of document.querySelectorAll("[data-sort]")) {
      const head = button.closest("th");
      if (button.dataset.sort === sort.key) head.setAttribute("aria-sort", sort.down ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    }
  }

  function table(head, rows) {
    const cell = (tag, v, i) => element(tag, { class: i ? "n" : "" }, v instanceof Node ? v : String(v));
    return element("div", { class: "scroll" }, element("table", {},
      element("thead", {}, element("tr", {}, ...head.map((h, i) => cell("th", h, i)))),
      element("tbody", {}, ...rows.map((r) => element("tr", {}, ...r.map((v, i) => cell("td", v, i)))))));
  }

  let opened = null;
  function open(id) {
    const c = data.candidates[id];
    if (!c) return;
    opened = id;
    $("candidate-title").textContent = title(c);
    const body = $("candidate-body");
    const parents = c.parents.map((p) => element("button", { class: "link", "data-candidate": p }, title(data.candidates[p])));
    const facts = element("p", { class: "dim" }, `${c.operator}`, ...(parents.length ? [" of ", ...parents.flatMap((p, i) => (i ? [" and ", p] : [p]))] : []),
      c.model ? `, by ${c.model}` : null, c.card ? `, technique ${c.card}` : null, `, kernel ${c.kernel}`);
    const parts = [facts, element("p", {}, c.hypothesis)];
    if (c.predicted != null) parts.push(element("p", {}, `Predicted ${times(c.predicted)}, measured ${times(c.gain)}.`));
    if (c.stage) {
      parts.push(element("p", { class: "bad" }, `${c.status} (${c.stage})${c.case ? ` in case ${c.case}` : ""}`), element("pre", { class: "message" }, c.message));
    } else {
      parts.push(element("p", {}, `${times(c.speed)} torch, estimated in the search; ${percent(c.share)} of the roofline; largest error ${percent(c.tolerance)} of its tolerance; held the device ${c.lane_s.toFixed(2)} s${c.screened ? "; stopped early: times are coarse" : ""}.`));
      const head = ["case", "time", "95 % interval", data.matrix ? "TFLOP/s" : "GB/s", "roofline", "× torch"];
      parts.push(table(head, c.timings.map((t) => [
        t.config ? `${t.case} (${t.config})` : t.case, micro(t.us), between(t.low, t.high),
        data.matrix ? t.tflop.toFixed(1) : Math.round(t.gb), percent(t.share), times(t.speed),
      ])));
      if (c.notes.length) parts.push(element("p", {}, `Disturbed while it was timed: ${c.notes.join("; ")}.`));
      if (c.kernels.some((k) => k.language !== "cpp")) parts.push(table(["kernel", "registers", "spilled", "shared memory"],
        c.kernels.map((k) => [k.name, k.registers ?? "–", `${k.spills ?? 0} B`, `${k.shared ?? 0} B`])));
    }
    if (c.remarks?.length) parts.push(element("p", {}, "What the compilers said:"), element("pre", { class: "message" }, c.remarks.join("\n")));
    if (c.loops?.length) parts.push(element("p", {}, "Loops of the machine code, each without the loops in it; most clocks first:"), element("pre", { class: "message" }, c.loops.join("\n")));
    if (c.profile.length) parts.push(element("p", {}, "What its kernels do on the device:"), element("pre", { class: "message" }, c.profile.join("\n")));
    if (c.parents.length) {
      const diff = element("div", { class: "diff" });
      showDiff(diff, c);
      parts.push(element("details", { open: "" }, element("summary", {}, `what changed since #${c.parents[0]}`), diff));
    }
    if (c.lines.length) parts.push(element("details", c.parents.length ? {} : { open: "" }, element("summary", {}, "the whole file"), listing(c)));
    body.replaceChildren(...parts);
    const dialog = $("candidate");
    if (!dialog.open) dialog.showModal();
    dialog.scrollTop = 0;
    $("candidate-title").focus();
  }
  const step = (by) => opened != null && open(Math.max(0, Math.min(data.candidates.length - 1, opened + by)));

  document.addEventListener("click", (event) => {
    const at = event.target.closest?.("[data-candidate]");
    if (at) { event.stopPropagation(); open(Number(at.dataset.candidate)); }
  }, true);
  document.addEventListener("toggle", (event) => {
    const at = event.target.querySelector?.(":scope > [data-diff]");
    if (at && event.target.open && !at.childElementCount) showDiff(at, data.candidates[Number(at.dataset.diff)]);
  }, true);
  document.addEventListener("keydown", (event) => {
    if (!$("candidate").open || event.target.closest?.("ol, input")) return;
    if (event.key === "ArrowLeft") step(-1);
    if (event.key === "ArrowRight") step(1);
  });
  $("before").addEventListener("click", () => step(-1));
  $("after").addEventListener("click", () => step(1));
  $("close").addEventListener("click", () => $("candidate").close());
  $("filter").addEventListener("change", rows);
  $("find").addEventListener("input", rows);
  for (const button of document.querySelectorAll("[data-sort]"))
    button.addEventListener("click", () => {
      const key = button.dataset.sort;
      sort = { key, down: sort.key === key ? !sort.down : !["id", "name", "operator"].includes(key) };
      rows();
    });

  window.addEventListener("beforeprint", () => {
    for (const at of document.querySelectorAll("details")) at.open = true;
  });

  // -- a run that goes on ------------------------------------------------------------------------

  const told = {}; // each part as the server sent it last
  for (const part of document.querySelectorAll("[data-part]")) told[part.id] = part.innerHTML;

  async function news() {
    try {
      const seq = (await (await fetch("seq", { cache: "no-store" })).text()).trim();
      if (seq === document.body.dataset.live) return;
      const page = new DOMParser().parseFromString(await (await fetch("./", { cache: "no-store" })).text(), "text/html");
      for (const part of document.querySelectorAll("[data-part]")) {
        const fresh = page.getElementById(part.id), html = fresh.innerHTML;
        if (html === told[part.id]) continue; // what a reader opened there stays open
        told[part.id] = html;
        part.replaceChildren(...fresh.childNodes);
      }
      await unpack(page);
      document.body.dataset.live = seq;
    } catch { /* the server has gone: what is shown stays */ }
  }

  async function unpack(page) {
    const bytes = Uint8Array.from(atob(page.getElementById("data").textContent), (c) => c.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    data = await new Response(stream).json();
    rows();
    document.body.dataset.drawn = data.candidates.length;
  }

  unpack(document);
  if ("live" in document.body.dataset) setInterval(news, 2000);
})();
