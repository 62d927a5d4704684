"""Samples of sweeps: tests marked `sampled` that run over every file of a folder, or the like.

A test that a sample leaves out runs with `--whole`: in CI each night and before each release. So
do those marked `nightly`: they take long, other tests look at most of the same daily, and what they
alone look at changes rarely. The sample is always the same, so that whoever broke something is
told, and nobody else.
"""

import math
import zlib
from collections import defaultdict

from hypothesis import settings


def left_out(items):
    """Items that a sample leaves out, and those marked `nightly`.

    `@pytest.mark.sampled(one_in=4)` takes a fourth of a test's items, at least one. Which is chance
    that is always the same, and other tests of the same parameters take others.

    With `of="entry"` too, items stay together whose values of that parameter have equal keys: an
    `id`, or their text. With `each=True` a key is GROUP-NAME, and the fourth is taken of each
    group, at least one.
    """
    groups = defaultdict(lambda: defaultdict(list))
    for item in items:
        mark = item.get_closest_marker("sampled")
        if mark is None:
            continue
        if (of := mark.kwargs.get("of")) is None:
            key, group = item.name, ""
        else:
            key = key_of(item.callspec.params[of])
            group = key.partition("-")[0] if mark.kwargs.get("each") else ""
        groups[item.path, item.originalname, group, mark.kwargs["one_in"]][key].append(item)
    found = [item for item in items if item.get_closest_marker("nightly")]
    for (*_, one_in), by_key in groups.items():
        for key in sorted(by_key, key=chance_of)[math.ceil(len(by_key) / one_in) :]:
            found += by_key[key]
    return found


def key_of(value):
    """Key of a parameter's value."""
    return str(getattr(value, "id", value))


def chance_of(key):
    """A number that looks random, and is always the same."""
    return zlib.crc32(key.encode())


def examples(most):
    """Examples of a property that has `most` with `--whole`: without, it has fewer, as all have."""
    return math.ceil(most * settings.default.max_examples / 100)
