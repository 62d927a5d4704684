// What a reader of the report sees: texts that are cut, that cover each other or that lines cross,
// charts that have to be scrolled, and whiskers that are hidden. Returns the findings, and how many
// texts and whiskers there were. A test runs it as the body of a function.
const wide = document.documentElement.clientWidth;
const found = [];
const box = (r) => ({ left: r.left, right: r.right, top: r.top, bottom: r.bottom });
const crosses = (a, b) =>
  a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1;

const texts = [];
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const node = walker.currentNode, at = node.parentElement, text = node.data.trim().slice(0, 40);
  if (!text || !at.checkVisibility() || at.closest("script, style, select, .skip")) continue;
  const range = document.createRange();
  range.selectNodeContents(node);
  for (const r of range.getClientRects())
    // A line's box is higher than its letters.
    if (r.width > 1) texts.push({ ...box(r), top: r.top + 3, bottom: r.bottom - 3, text, at });
}
texts.forEach((a, i) => {
  // Wide tables of plain figures may be scrolled.
  if ((a.left < 0 || a.right > wide) && !a.at.closest("#table, #race details"))
    found.push(["cut", a.text]);
  for (const b of texts.slice(i + 1)) if (crosses(a, b)) found.push(["overlap", a.text, b.text]);
});
for (const line of document.querySelectorAll("#tree .row > i"))
  for (const a of texts)
    if (a.at.closest("#tree") && crosses(a, box(line.getBoundingClientRect())))
      found.push(["line through", a.text]);
for (const plots of document.querySelectorAll(".plots"))
  if (plots.parentElement.scrollWidth > plots.parentElement.clientWidth)
    found.push(["scrolls", plots.textContent.trim().slice(0, 40)]);

const whiskers = document.querySelectorAll(".whisker");
for (const whisker of whiskers) {
  whisker.scrollIntoView({ block: "center", behavior: "instant" });
  const { left, right, top, bottom } = box(whisker.getBoundingClientRect());
  for (const x of [left + 0.5, (left + right) / 2, right - 0.5])
    if (document.elementFromPoint(x, (top + bottom) / 2) !== whisker)
      found.push(["whisker behind", x, top]);
}
window.scrollTo({ top: 0, behavior: "instant" });
return [found, texts.length, whiskers.length];
