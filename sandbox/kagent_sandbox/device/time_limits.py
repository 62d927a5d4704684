"""Time limits of a judge, after which a candidate counts as hung: the usual ones, or a share of
them where many are expected to hang (`kagent selftest`). One for the whole process: a judge has one
device.
"""

from __future__ import annotations

scale: float = 1.0


def bounded(usual_s: float) -> float:
    """Seconds that a candidate has for what it usually has `usual_s` for."""
    return scale * usual_s
