"use strict";
// Draws the two icicles of a step: bars below each other, as wide as their share of the time.
(() => {
  const digits = (ms) => (ms >= 100 ? 0 : ms >= 10 ? 1 : 2);
  const milli = (us) => `${(us / 1000).toFixed(digits(us / 1000))} ms`;
  const percent = (x) => `${(100 * x).toFixed(1)} %`;
  const ROW_REM = 1.8, LEAST = 0.002; // a bar narrower than this share is left out

  function about(node, root) {
    const lost = node.us ? node.headroom / node.us : 0;
    const end = node.rest ? "" : `, ${percent(lost)} of that above the ceilings`;
    return `${node.name}: ${milli(node.us)}, ${percent(node.us / root.us)}${end}`;
  }

  function icicle(at, trail, root) {
    function draw(path) {
      const shown = path[path.length - 1];
      const bars = [];
      let depth = 0;
      function add(node, left, width, row, above) {
        if (width < LEAST) return;
        const bar = document.createElement("button");
        bar.textContent = width > 0.03 ? node.name : "";
        bar.title = about(node, root);
        bar.setAttribute("aria-label", bar.title);
        bar.style.left = `${100 * left}%`;
        bar.style.width = `${100 * width}%`;
        bar.style.top = `${row * ROW_REM}rem`;
        bar.style.setProperty("--loss", node.us ? Math.min(1, node.headroom / node.us) : 0);
        if (node.rest) bar.className = "rest";
        const here = [...above, node];
        bar.addEventListener("click", () => draw(here));
        bars.push(bar);
        depth = Math.max(depth, row);
        let start = left;
        for (const child of node.children) {
          const part = node.us ? (width * child.us) / node.us : 0;
          add(child, start, part, row + 1, here);
          start += part;
        }
      }
      add(shown, 0, 1, 0, path.slice(0, -1));
      at.replaceChildren(...bars);
      at.style.height = `${(depth + 1) * ROW_REM}rem`;
      trail.replaceChildren(
        ...path.map((node, i) => {
          const link = document.createElement("button");
          link.className = "link";
          link.textContent = i + 1 < path.length ? node.name : about(node, root);
          link.addEventListener("click", () => draw(path.slice(0, i + 1)));
          return link;
        }),
      );
    }
    draw([root]);
  }

  async function unpack() {
    const bytes = Uint8Array.from(atob(document.getElementById("data").textContent), (c) => c.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    const data = await new Response(stream).json();
    for (const at of document.querySelectorAll("[data-icicle]")) {
      const name = at.dataset.icicle;
      icicle(at, document.querySelector(`[data-trail="${name}"]`), data[name]);
    }
    document.body.dataset.drawn = "1";
  }
  unpack();
})();
