"""Examples in docstrings, to be run."""

import inspect
import re
import textwrap


def examples(thing):
    """The code of an object's `Example:` section: what stands below its sentences, indented."""
    doc = inspect.getdoc(thing)
    (section,) = re.findall(r"^Example:\n((?:(?: {4}.*)?(?:\n|$))+)", doc, flags=re.MULTILINE)
    blocks = re.findall(r"(?:^ {8}.*(?:\n|$)|^\n)+", section, flags=re.MULTILINE)
    return [textwrap.dedent(block) for block in blocks if block.strip()]


def run_examples(thing, **names):
    """Run all examples of an object, one after the other, as if written in its own module."""
    found = examples(thing)
    assert found
    names = {**vars(inspect.getmodule(thing)), **names}
    for code in found:
        exec(compile(code, thing.__qualname__, "exec"), names)
