"""Ways in which people write host code: each file of the corpus says what becomes of it.

entry: name(argument: dtype[sizes], ...) -> dtype[sizes], ...
ops: what the plan holds, in order            (traced)
check: an expression over plan and config     (traced, optional)
refused: STATUS: part of the message          (refused; at the line that is marked HERE, if one is)
target:, allow:, mutates:, configs:           (optional)
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from warm_tracer import tensor, tracer  # noqa: F401 - a fixture

CORPUS = sorted((Path(__file__).parent / "corpus").glob("*.py"))


def parse(source):
    fields = {}
    for line in source.split('"""')[1].splitlines()[1:]:
        key, _, value = line.partition(": ")
        fields.setdefault(key, []).append(value.strip())
    entry, arguments, results = re.fullmatch(
        r"(\w+)\((.*)\) -> (.*)", fields.pop("entry")[0]
    ).groups()
    return fields, entry, specs(arguments), specs(results)


def specs(text):
    found = re.findall(r"(?:(\w+): )?(\w+)\[([\d,]*)\]", text)
    return [
        tensor(name or f"result{i}", [int(n) for n in sizes.split(",") if n], dtype)
        for i, (name, dtype, sizes) in enumerate(found)
    ]


def test_the_corpus_is_large_and_balanced():
    refused = [p for p in CORPUS if "\nrefused: " in p.read_text()]
    assert len(CORPUS) >= 40
    assert min(len(refused), len(CORPUS) - len(refused)) >= 20


@pytest.mark.sampled(one_in=16)
@pytest.mark.parametrize("path", CORPUS, ids=lambda p: p.stem)
def test_idiom(path, tracer):  # noqa: F811
    source = path.read_text()
    fields, entry, arguments, results = parse(source)
    answer = tracer.trace(
        source,
        entry,
        arguments,
        results,
        target=fields.get("target", ["sm_90a"])[0],
        allow=fields.get("allow", [""])[0].split(),
        mutates=fields.get("mutates", [""])[0].split(),
    )
    if "refused" in fields:
        status, _, part = fields["refused"][0].partition(": ")
        assert answer.status == status, answer.message
        assert part in answer.message
        marked = [i for i, line in enumerate(source.splitlines(), 1) if "# HERE" in line]
        if marked:
            assert f"line {marked[0]}: " in answer.message
        return
    assert answer.plan is not None, answer.message
    kinds = [type(op).__name__.lower() for op in answer.plan.ops]
    assert " ".join(kinds) == fields["ops"][0]
    for condition in fields.get("check", []):
        assert eval(condition, {"plan": answer.plan, "config": answer.config}), condition
    assert answer.configs == int(fields.get("configs", ["1"])[0])
    shapes = [(o.shape, o.dtype) for o in answer.plan.outputs]
    assert shapes == [(r.shape, r.dtype) for r in results]
