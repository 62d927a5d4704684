"""From answers to drafts: what they are called."""

import dataclasses

import pytest
from kagent.llm.drafts import draft_of
from kagent.llm.reply import Answer
from kagent.runs.ask import Ask, Setting
from kagent.runs.lineage import Candidate, Lineage, Operator, Origin, Proposal
from kagent.tasks import find_task, seeds_of
from synthetic_lineages import passed

SOFTMAX = find_task("softmax")
SOURCES = {s.name: s.source() for s in seeds_of(SOFTMAX)}
BOTH = SOURCES["triton_rows"] + SOURCES["cuda_cluster"]


def brief(name, operator):
    proposal = Proposal(0, (), Operator.SEED, name, SOURCES["triton_rows"], "")
    parent = Candidate(proposal, passed({"c": 9.0}))
    setting = Setting(SOFTMAX, "gpu", "sm_90a", 50, 0, 4, tuple(Operator))
    return Ask(setting, 0, Lineage([parent]), operator, parent, (parent,), 0.0)


@pytest.mark.parametrize(
    ("parent", "operator", "card", "source", "name"),
    [
        ("triton_online", Operator.CROSSOVER, "", SOURCES["cuda_cluster"], "cuda_online"),
        ("triton_online", Operator.REPAIR, "waves", SOURCES["triton_rows"], "triton_online"),
        ("cuda_cluster", Operator.TUNE, "", SOURCES["cuda_cluster"], "cuda_cluster"),
        ("cuda_cluster", Operator.CROSSOVER, "", BOTH, "triton_cluster"),
        ("triton_x+cuda_y", Operator.CROSSOVER, "", SOURCES["cuda_cluster"], "triton_x+cuda_y"),
        ("mine", Operator.CROSSOVER, "", SOURCES["cuda_cluster"], "mine"),
        ("triton_rows", Operator.STRUCTURE, "cluster_rows", BOTH, "triton_cluster_rows"),
        (
            *("triton_rows", Operator.REWRITE, "persistent", SOURCES["cuda_cluster"]),
            "cuda_persistent",
        ),
    ],
)
def test_an_answer_is_called_by_its_own_language(parent, operator, card, source, name):
    answer = Answer("an idea", 1.1, source)
    draft = draft_of(brief(parent, operator), answer, Origin("m", card))
    assert (draft.name, draft.predicted, draft.parents) == (name, 1.1, (0,))
    again = dataclasses.replace(answer, source=source + "# again\n")
    assert draft_of(brief(parent, operator), again, Origin("m", card)).name == name
