"""Output of `kagent profile`."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from kagent.prompting.hardware import Hardware
from kagent.prompting.profiles import in_words
from kagent.runs.profiles import Profile
from kagent.text import human_bytes


def profile_view(profile: Profile, name: str, hardware: Hardware) -> RenderableType:
    """Launch by launch, in words."""
    head = Text(f"#{profile.candidate} {name} on {profile.case}, {profile.device}\n", "bold")
    if profile.why_static:
        text = f"static facts only, without counters: {profile.why_static}\n"
        head.append(text, "default yellow")
    parts = [head]
    for k in profile.kernels:
        grid, block = ("×".join(map(str, sizes)) for sizes in (k.grid, k.block))
        title = Text(f"{k.kernel}", "bold")
        title.append(
            f"  grid {grid}, block {block}, {k.registers} registers, "
            f"{human_bytes(k.shared_bytes)} of shared memory\n",
            "dim",
        )
        for line in in_words(k, hardware):
            title.append(f"  {line}\n", "default")
        parts.append(title)
    return Group(*parts)
