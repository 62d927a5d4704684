"""OpenEvolve's evaluator. Its evaluator file is one line:

    from kagent.integrations.openevolve import evaluate

A program that the judge refuses is a result with a score of 0 and the judge's words as an artifact,
which OpenEvolve shows to the model.
"""

from __future__ import annotations

from pathlib import Path

from openevolve.evaluation_result import EvaluationResult

from kagent.integrations.judge_client import judge


def evaluate(program_path: str) -> EvaluationResult:
    """Judge a program.

    Args:
        program_path: Its file.

    Raises:
        JudgeError: There is no verdict; see `judge`.
    """
    found = judge(Path(program_path).read_text(encoding="utf-8"))
    times = "\n".join(
        f"{case}: {us:.1f} µs, {found.roofline_shares[case]:.0%} of the roofline"
        for case, us in found.cases_us.items()
    )
    words = {"feedback": found.feedback, "cases": times}
    return EvaluationResult(
        metrics={"combined_score": found.speed_up, "correct": float(found.correct)},
        artifacts={name: text for name, text in words.items() if text},
    )
