"""Spin time of OpenMP's threads before they sleep: the same for candidates and for baselines."""

from __future__ import annotations

from collections.abc import Mapping

WAITING: Mapping[str, str] = {"GOMP_SPINCOUNT": "10000"}
"""About 0.2 ms, as environment of a process that loads libgomp.

Threads that never spin are woken on the core that their parallel region runs on, and halve its
speed. Those that spin for the default, several ms, keep the cores from the process whose turn it
is, and on a busy host from the very thread that they wait for.
"""
