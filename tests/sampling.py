"""Samples of sweeps: tests marked `sampled` that run over every file of a folder, or the like.

A test of a sweep that a sample leaves out runs with `--whole`: in CI each night and before each
release. The sample is always the same, so that whoever broke something is told, and nobody else.
"""

import zlib
from collections import defaultdict

ONE_IN = 5
"""Of the others of a group one in so many is taken, beside its first."""


def left_out(items):
    """Items that a sample leaves out.

    The mark names a parameter: `@pytest.mark.sampled(of="member")`. Its value has a key, an `id` or
    its text: GROUP-NAME. Of each group, and of each kind of machine in it that a value names as
    `runs`, the first is taken, and of the others as many as chance has it, by their keys.
    """
    sweeps = defaultdict(list)
    for item in items:
        mark = item.get_closest_marker("sampled")
        if mark is not None:
            value = item.callspec.params[mark.kwargs["of"]]
            sweeps[item.path, item.originalname].append((value, item))
    found = []
    for sweep in sweeps.values():
        firsts = set({group_of(value): key_of(value) for value, _ in reversed(sweep)}.values())
        keys = [(key_of(value), item) for value, item in sweep]
        found += [item for key, item in keys if key not in firsts and not drawn(key)]
    return found


def group_of(value):
    """The values of which one must be in a sample."""
    return key_of(value).partition("-")[0], getattr(value, "runs", None)


def key_of(value):
    """Key of a parameter's value."""
    return str(getattr(value, "id", value))


def drawn(key):
    """Whether a key is one of the sample's."""
    return zlib.crc32(key.encode()) % ONE_IN == 0
