"use strict";
// Draws what page.py put into the page: charts, diffs, the table of candidates and the dialog.
(() => {
  const $ = (id) => document.getElementById(id);
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const charts = {};
  let data;
  let sort = { key: "id", down: false };

  const times = (x) => (x == null ? "–" : `${x.toFixed(3)}×`);
  const percent = (x) => (x == null ? "–" : `${Math.round(x * 100)} %`);
  const micro = (us) => (us >= 1000 ? `${(us / 1000).toFixed(3)} ms` : `${us.toFixed(1)} µs`);
  const passed = (c) => c.speed != null;
  const title = (c) => `#${c.id} ${c.name}`;

  // Everything that is not ours to trust becomes text, never markup.
  function element(tag, attributes = {}, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.append(...children.filter((c) => c != null));
    return made;
  }

  // -- charts ------------------------------------------------------------------------------------

  function draw(id, option, choose) {
    charts[id]?.dispose();
    const at = $(id);
    at.replaceChildren();
    if (option == null) {
      at.style.height = "auto";
      at.append(element("p", { class: "dim" }, "Nothing to draw yet."));
      return;
    }
    at.style.height = option.height ? `${option.height}px` : "";
    const chart = (charts[id] = echarts.init(at, null, { renderer: "svg" }));
    chart.setOption({
      animation: false,
      textStyle: { fontFamily: getComputedStyle(document.body).fontFamily, color: css("--ink") },
      aria: { enabled: true },
      ...option.chart,
    });
    if (choose) chart.on("click", (event) => event.data?.id != null && open(event.data.id));
  }

  const axis = (more) => ({
    nameTextStyle: { color: css("--dim") },
    axisLabel: { color: css("--dim"), ...more.axisLabel },
    axisLine: { lineStyle: { color: css("--line") } },
    splitLine: { lineStyle: { color: css("--line"), opacity: 0.5 } },
    ...Object.fromEntries(Object.entries(more).filter(([key]) => key !== "axisLabel")),
  });
  const tip = (formatter) => ({
    trigger: "item", formatter, confine: true, backgroundColor: css("--panel"),
    borderColor: css("--line"), textStyle: { color: css("--ink") }, renderMode: "richText",
  });
  const legend = () => ({ textStyle: { color: css("--ink") }, type: "scroll", top: 0 });
  const palette = () => [1, 2, 3, 4, 5, 6].map((i) => css(`--c${i}`));

  function bars() {
    const bars = data.bars;
    $("bars-caption").textContent = "";
    if (!bars || !bars.cases.some((c) => c.ratios.length)) return null;
    $("bars-caption").textContent = bars.hidden
      ? "Time of each baseline over the winner's, in the final race on hidden cases, interleaved; whiskers are 95 % intervals. Below 1 the winner loses."
      : "Time of each baseline over the winner's on the visible cases; not interleaved, so whiskers are of the winner's time alone. There was no final race.";
    const names = [...new Set(bars.cases.flatMap((c) => c.ratios.map((r) => r[0])))];
    const cases = bars.cases.map((c) => c.case);
    const find = (c, name) => c.ratios.find((r) => r[0] === name);
    const colors = palette();
    const series = names.flatMap((name, k) => [
      {
        name, type: "bar", itemStyle: { color: colors[k % colors.length] },
        data: bars.cases.map((c) => { const r = find(c, name); return r ? { value: r[1], r } : null; }),
      },
      {
        name, type: "custom", silent: true, tooltip: { show: false }, itemStyle: { color: css("--ink") },
        data: bars.cases.flatMap((c, i) => { const r = find(c, name); return r ? [[i, r[2], r[3]]] : []; }),
        renderItem: (params, api) => {
          const wide = api.size([0, 1])[1] == null ? 0 : api.size([1, 0]);
          const band = Array.isArray(wide) ? (small() ? wide[1] : wide[0]) : wide;
          const slot = (Math.abs(band) * 0.8) / names.length;
          const shift = (k - (names.length - 1) / 2) * slot;
          const point = (v) => api.coord(small() ? [v, api.value(0)] : [api.value(0), v]);
          const [a, b] = [point(api.value(1)), point(api.value(2))];
          const line = (x1, y1, x2, y2) => ({ type: "line", shape: { x1, y1, x2, y2 }, style: { stroke: css("--ink"), lineWidth: 1.2 } });
          return small()
            ? { type: "group", children: [line(a[0], a[1] + shift, b[0], b[1] + shift), line(a[0], a[1] + shift - 3, a[0], a[1] + shift + 3), line(b[0], b[1] + shift - 3, b[0], b[1] + shift + 3)] }
            : { type: "group", children: [line(a[0] + shift, a[1], b[0] + shift, b[1]), line(a[0] + shift - 3, a[1], a[0] + shift + 3, a[1]), line(b[0] + shift - 3, b[1], b[0] + shift + 3, b[1])] };
        },
        encode: small() ? { x: [1, 2], y: 0 } : { x: 0, y: [1, 2] },
      },
    ]);
    series[0].markLine = {
      silent: true, symbol: "none", label: { show: false }, lineStyle: { color: css("--bad"), type: "dashed" },
      data: [small() ? { xAxis: 1 } : { yAxis: 1 }],
    };
    for (const s of series.filter((s) => s.type === "bar")) Object.assign(s, { barCategoryGap: "20%", barGap: "0%" });
    const category = axis({ type: "category", data: cases, axisLabel: { interval: 0, width: small() ? 96 : 180, overflow: "break", lineHeight: 14 }, inverse: small() });
    const value = axis({ type: "value", name: small() ? "" : "× baseline", min: 0 });
    return {
      height: small() ? 90 + cases.length * (names.length * 16 + 24) : undefined,
      chart: {
        legend: { ...legend(), data: names },
        grid: { left: 8, right: 24, top: 46, bottom: 8, containLabel: true },
        xAxis: small() ? value : category, yAxis: small() ? category : value,
        tooltip: tip((p) => (p.data?.r ? `${p.data.r[0]}, ${p.name}\n${p.data.r[1].toFixed(3)}×  (${p.data.r[2].toFixed(3)}–${p.data.r[3].toFixed(3)})` : "")),
        series,
      },
    };
  }

  function fitness() {
    const all = data.candidates;
    if (!all.length) return null;
    const languages = [...new Set(all.filter(passed).map((c) => c.language))];
    const colors = palette();
    const best = [];
    for (const c of all) if (c.promoted) best.push([c.id, c.speed]);
    if (best.length) best.push([all.length - 1, best[best.length - 1][1]]);
    const low = Math.min(1, ...all.filter(passed).map((c) => c.speed));
    const stages = ["parse", "build", "check", "measure"];
    const rejected = all.filter((c) => c.stage);
    return {
      chart: {
        legend: legend(),
        grid: [{ left: 8, right: 16, top: 46, bottom: rejected.length ? 130 : 8, containLabel: true }, { left: 8, right: 16, height: 78, bottom: 24, containLabel: true, show: false }],
        tooltip: tip((p) => p.data?.name ?? ""),
        xAxis: [axis({ type: "value", gridIndex: 0, min: 0, max: all.length - 1, minInterval: 1, name: rejected.length ? "" : "candidate", nameLocation: "middle", nameGap: 24 }),
          axis({ type: "value", gridIndex: 1, min: 0, max: all.length - 1, minInterval: 1, name: "candidate", nameLocation: "middle", nameGap: 22, show: rejected.length > 0 })],
        yAxis: [axis({ type: "value", gridIndex: 0, name: "× torch", min: Math.floor(low * 10) / 10 }),
          axis({ type: "category", gridIndex: 1, data: stages, inverse: true, show: rejected.length > 0 })],
        series: [
          ...languages.map((language, k) => ({
            name: language === "cpp" ? "C++" : language, type: "scatter", symbolSize: 9, itemStyle: { color: colors[k] },
            data: all.filter((c) => passed(c) && c.language === language).map((c) => ({ value: [c.id, c.speed], id: c.id, symbol: c.promoted ? "diamond" : "circle", symbolSize: c.promoted ? 14 : 9, name: `${title(c)}, ${c.operator}\n${times(c.speed)} torch` })),
          })),
          { name: "best so far", type: "line", step: "end", showSymbol: false, data: best, lineStyle: { color: css("--c3"), width: 2 }, itemStyle: { color: css("--c3") } },
          ...(rejected.length ? [{ name: "rejected", type: "scatter", xAxisIndex: 1, yAxisIndex: 1, symbol: "rect", symbolSize: [4, 12], itemStyle: { color: css("--bad") }, data: rejected.map((c) => ({ value: [c.id, c.stage], id: c.id, name: `${title(c)}, ${c.operator}\n${c.status}` })) }] : []),
        ],
      },
    };
  }

  function tree() {
    if (!data.candidates.length) return null;
    const onPath = new Set(data.path);
    const nodes = data.candidates.map((c) => ({
      id: c.id, name: `#${c.id}`, children: [], value: c.speed,
      symbolSize: onPath.has(c.id) ? 13 : 9,
      itemStyle: { color: c.stage ? css("--bad") : onPath.has(c.id) ? css("--c1") : css("--back"), borderColor: c.stage ? css("--bad") : css("--c1"), borderWidth: 1.5 },
      label: { color: css("--ink"), fontWeight: onPath.has(c.id) ? "bold" : "normal" },
      lineStyle: onPath.has(c.id) ? { color: css("--c1"), width: 2.5 } : { color: css("--line"), width: 1 },
    }));
    const roots = [];
    for (const c of data.candidates) {
      if (c.parents.length && nodes[c.parents[0]]) nodes[c.parents[0]].children.push(nodes[c.id]);
      else roots.push(nodes[c.id]);
    }
    const leaves = (node) => (node.children.length ? node.children.reduce((n, c) => n + leaves(c), 0) : 1);
    const height = Math.max(260, roots.reduce((n, r) => n + leaves(r), 0) * 20 + 40);
    const find = (id) => data.candidates[id];
    return {
      height,
      chart: {
        tooltip: tip((p) => { const c = find(p.data.id); return c ? `${title(c)}\n${c.operator}${c.speed ? `, ${times(c.speed)} torch` : `, ${c.status}`}` : "the task's seeds"; }),
        series: [{
          type: "tree", data: [{ name: "seeds", children: roots, symbolSize: 6, itemStyle: { color: css("--dim") }, label: { color: css("--dim") } }],
          left: 44, right: 60, top: 10, bottom: 10, symbol: "circle", expandAndCollapse: false, initialTreeDepth: -1, edgeShape: "polyline", edgeForkPosition: "40%",
          label: { position: "right", fontSize: 11, distance: 4 }, roam: false,
        }],
      },
    };
  }

  function roof() {
    const r = data.roofline;
    if (!r) return null;
    const memory = r.copy_gb_per_s / 1000; // TB/s: TFLOP/s per FLOP/byte
    const cases = r.cases.filter((c) => c.tflops > 0 && c.gbytes > 0);
    if (!cases.length) return null;
    const intensity = (c) => c.tflops * 1000 / c.gbytes;
    const xs = cases.map(intensity);
    const peaks = Object.entries(r.tflop_per_s);
    const from = Math.min(...xs) / 4, to = Math.max(...xs, ...peaks.map(([, t]) => t / memory)) * 2;
    const colors = palette();
    const byCase = Object.fromEntries(cases.map((c) => [c.case, c]));
    const rate = (us, c) => (c.tflops * 1e6) / us; // TFLOP over µs
    const mine = data.candidates.flatMap((c) => (c.timings ?? []).filter((t) => byCase[t.case]).map((t) => ({ value: [intensity(byCase[t.case]), t.tflop], id: c.id, name: `${title(c)}, ${t.case}\n${micro(t.us)}, ${percent(t.share)} of the roofline` })));
    const winners = mine.filter((m) => m.id === data.winner);
    const theirs = cases.flatMap((c) => Object.entries(c.baselines).map(([name, us]) => ({ value: [intensity(c), rate(us, c)], name: `${name}, ${c.case}\n${micro(us)}` })));
    const best = Math.max(...peaks.map(([, t]) => t));
    const edge = best / memory;
    return {
      chart: {
        legend: legend(),
        grid: { left: 8, right: 30, top: 46, bottom: 30, containLabel: true },
        tooltip: tip((p) => p.data?.name ?? ""),
        xAxis: axis({ type: "log", name: "FLOP per byte", nameLocation: "middle", nameGap: 26, min: from, max: to, axisLabel: { formatter: (v) => Number(v.toPrecision(2)) } }),
        yAxis: axis({ type: "log", name: "TFLOP/s", axisLabel: { formatter: (v) => Number(v.toPrecision(2)) } }),
        series: [
          { name: `copy, ${Math.round(r.copy_gb_per_s)} GB/s`, type: "line", showSymbol: false, silent: true, data: [[from, from * memory], [edge, best]], lineStyle: { color: css("--ink"), width: 2 }, itemStyle: { color: css("--ink") } },
          ...peaks.map(([name, t], k) => ({ name: `${name}, ${t < 10 ? t.toFixed(2) : Math.round(t)} TFLOP/s`, type: "line", showSymbol: false, silent: true, data: [[t / memory, t], [to, t]], lineStyle: { color: colors[(k + 3) % colors.length], type: "dashed" }, itemStyle: { color: colors[(k + 3) % colors.length] } })),
          { name: "candidates", type: "scatter", symbolSize: 7, itemStyle: { color: css("--c1"), opacity: 0.55 }, data: mine },
          { name: "torch", type: "scatter", symbol: "triangle", symbolSize: 10, itemStyle: { color: css("--c2") }, data: theirs },
          { name: "winner", type: "scatter", symbol: "diamond", symbolSize: 14, itemStyle: { color: css("--c3") }, data: winners },
        ],
      },
    };
  }

  function worth() {
    const all = data.ablation.filter((c) => c.low != null && c.high != null);
    if (!all.length) return null;
    const color = (c) => css(c.low > 1 ? "--good" : c.high < 1 ? "--bad" : "--c6");
    const name = (c) => (c.step == null ? c.label : `#${c.step}`);
    return {
      height: 70 + all.length * 34,
      chart: {
        grid: { left: 8, right: 24, top: 8, bottom: 30, containLabel: true },
        tooltip: tip((p) => (p.data?.c ? `${p.data.c.label}\n${p.data.c.ratio.toFixed(3)}×  (${p.data.c.low.toFixed(3)}–${p.data.c.high.toFixed(3)})` : "")),
        xAxis: axis({ type: "value", name: "× worth", nameLocation: "middle", nameGap: 24, min: (v) => Math.min(0.98, Math.floor(v.min * 50) / 50), scale: true }),
        yAxis: axis({ type: "category", inverse: true, data: all.map(name), axisLabel: { width: small() ? 110 : 320, overflow: "truncate" } }),
        series: [
          { type: "custom", silent: true, data: all.map((c, i) => [i, c.low, c.high]), encode: { x: [1, 2], y: 0 },
            renderItem: (params, api) => {
              const [a, b] = [1, 2].map((k) => api.coord([api.value(k), api.value(0)]));
              const line = (x1, y1, x2, y2) => ({ type: "line", shape: { x1, y1, x2, y2 }, style: { stroke: color(all[params.dataIndex]), lineWidth: 2 } });
              return { type: "group", children: [line(a[0], a[1], b[0], b[1]), line(a[0], a[1] - 5, a[0], a[1] + 5), line(b[0], b[1] - 5, b[0], b[1] + 5)] };
            } },
          { type: "scatter", symbolSize: 11, data: all.map((c, i) => ({ value: [c.ratio, i], c, id: c.step, itemStyle: { color: color(c) } })),
            markLine: { silent: true, symbol: "none", label: { show: false }, lineStyle: { color: css("--dim"), type: "dashed" }, data: [{ xAxis: 1 }] } },
        ],
      },
    };
  }

  const small = () => window.innerWidth < 640;

  function drawAll() {
    draw("bars", bars());
    draw("fitness", fitness(), true);
    draw("tree", tree(), true);
    draw("roof", roof(), true);
    if ($("worth")) draw("worth", worth(), true);
  }

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
      parts.push(element("p", {}, `${times(c.speed)} torch, ${percent(c.share)} of the roofline; largest error ${percent(c.tolerance)} of its tolerance; held the device ${c.lane_s.toFixed(2)} s${c.screened ? "; stopped early: times are coarse" : ""}.`));
      const head = ["case", "time", "95 % interval", data.matrix ? "TFLOP/s" : "GB/s", "roofline", "torch", "× torch"];
      parts.push(table(head, c.timings.map((t) => [
        t.config ? `${t.case} (${t.config})` : t.case, micro(t.us), `${micro(t.low)} – ${micro(t.high)}`,
        data.matrix ? t.tflop.toFixed(1) : Math.round(t.gb), percent(t.share), t.torch ? micro(t.torch) : "–",
        element("span", { class: t.torch && t.torch < t.low ? "bad" : "" }, times(t.torch ? t.torch / t.us : null)),
      ])));
      if (c.kernels.some((k) => k.language !== "cpp")) parts.push(table(["kernel", "registers", "spilled", "shared memory"],
        c.kernels.map((k) => [k.name, k.registers ?? "–", `${k.spills ?? 0} B`, `${k.shared ?? 0} B`])));
    }
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

  let wide = window.innerWidth;
  window.addEventListener("resize", () => {
    if (window.innerWidth === wide) return;
    wide = window.innerWidth;
    drawAll();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  window.addEventListener("beforeprint", () => {
    document.documentElement.classList.add("print");
    for (const at of document.querySelectorAll("details")) at.open = true;
    drawAll();
  });
  window.addEventListener("afterprint", () => { document.documentElement.classList.remove("print"); drawAll(); });

  // -- a run that goes on ------------------------------------------------------------------------

  async function news() {
    try {
      const seq = (await (await fetch("seq", { cache: "no-store" })).text()).trim();
      if (seq === document.body.dataset.live) return;
      const page = new DOMParser().parseFromString(await (await fetch("./", { cache: "no-store" })).text(), "text/html");
      for (const part of document.querySelectorAll("[data-part]")) {
        const fresh = page.getElementById(part.id);
        if (part.id === "result") {
          const chart = $("bars");
          fresh.querySelector("#bars").replaceWith(chart);
        }
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
    drawAll();
    rows();
    document.body.dataset.drawn = data.candidates.length;
  }

  unpack(document);
  if ("live" in document.body.dataset) setInterval(news, 2000);
})();
