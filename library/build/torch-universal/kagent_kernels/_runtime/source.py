"""A kernel's source: all that decides what it compiles to, but for the target."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Source:
    """Kernels with equal records are one kernel."""

    language: str  # "cuda", "cpp"
    name: str
    text: str
    options: tuple[str, ...] = ()
    defines: tuple[tuple[str, object], ...] = ()

    def key(self, target: str) -> str:
        """Hash of it and the target ("cpu", "sm_90a"): names its binaries wherever they are."""
        parts = [self.language, self.name, self.text, self.options, self.defines, target]
        return hashlib.sha256(json.dumps(parts, default=repr).encode()).hexdigest()

    def record(self) -> dict[str, object]:
        """Return the source as JSON."""
        return {
            "language": self.language,
            "name": self.name,
            "text": self.text,
            "options": list(self.options),
            "defines": [list(d) for d in self.defines],
        }

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Source:
        """Make a source from the result of `record`."""
        return cls(
            record["language"],
            record["name"],
            record["text"],
            tuple(record["options"]),
            tuple((name, value) for name, value in record["defines"]),
        )
