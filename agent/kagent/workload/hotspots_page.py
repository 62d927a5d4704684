"""The icicle of a step: one HTML file with everything in it, which asks no network for anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kagent.review.page import STYLE, embedded, policy, template
from kagent.workload.hotspots import Hotspot, Hotspots
from kagent.workload.hotspots_view import millis

_HERE = Path(__file__).parent / "page"
_REST = "outside of operations"


def render(found: Hotspots) -> str:
    """Render the page of a script's hotspots."""
    script = (_HERE / "hotspots.js").read_text(encoding="utf-8")
    styles = [STYLE.read_text(encoding="utf-8"), (_HERE / "hotspots.css").read_text("utf-8")]
    return template("hotspots.html.j2", _HERE).render(
        found=found,
        millis=millis,
        rest_us=max(0.0, found.step_us - found.ops_us),
        script=script,
        styles=styles,
        policy=policy([script], live=False),
        data=embedded({"modules": modules_tree(found), "kernels": kernels_tree(found)}),
    )


def modules_tree(found: Hotspots) -> dict[str, Any]:
    """Top-down: the step, the modules that a region is in, the region. µs in every node."""
    root = _node("step")
    for region in found.regions:
        for module, us in region.modules.items():
            share = us / region.us if region.us else 0.0
            path = [region.phase, *_parts(module)]
            _add(root, path, region, us, region.headroom_us * share)
    rest_us = found.step_us - found.ops_us
    if rest_us > 0:
        root["us"] += rest_us
        root["children"][_REST] = {**_node(_REST), "us": rest_us, "rest": True}
    return _listed(root)


def kernels_tree(found: Hotspots) -> dict[str, Any]:
    """Bottom-up: what runs, and below it where it is called from. µs in every node."""
    root = _node("all operations")
    for region in found.regions:
        for module, us in region.modules.items():
            share = us / region.us if region.us else 0.0
            path = [region.kind, region.title, *_parts(module)[::-1]]
            _add(root, path, None, us, region.headroom_us * share)
    return _listed(root)


def _parts(module: str) -> list[str]:
    """GPT.blocks.*.norm -> GPT, blocks.*, norm."""
    parts: list[str] = []
    for part in module.split("."):
        if part == "*" and parts:
            parts[-1] += ".*"
        else:
            parts.append(part)
    return parts


def _node(name: str) -> dict[str, Any]:
    return {"name": name, "us": 0.0, "headroom": 0.0, "children": {}}


def _add(
    root: dict[str, Any], path: list[str], region: Hotspot | None, us: float, headroom_us: float
) -> None:
    node = root
    steps = [*path, f"{region.title} #{region.number}"] if region is not None else path
    for name in (None, *steps):
        if name is not None:
            node = node["children"].setdefault(name, _node(name))
        node["us"] += us
        node["headroom"] += headroom_us


def _listed(node: dict[str, Any]) -> dict[str, Any]:
    """Children as a list, the longest first."""
    children = sorted(node["children"].values(), key=lambda c: -c["us"])
    rounded = {k: round(node[k], 1) for k in ("us", "headroom")}
    return {**node, **rounded, "children": [_listed(c) for c in children if c["us"] > 0]}
