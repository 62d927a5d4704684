"""Shinka's evaluation program:

    python -m kagent.integrations.shinka --program_path PROGRAM --results_dir FOLDER

It writes metrics.json and correct.json, as Shinka reads them.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from kagent.integrations.judge_client import JudgeError, judge


def main() -> None:
    """Judge a program, and write the two files."""
    parser = argparse.ArgumentParser(prog="python -m kagent.integrations.shinka")
    parser.add_argument("--program_path", type=Path, required=True)
    parser.add_argument("--results_dir", type=Path, required=True)
    options = parser.parse_args()
    try:
        found = judge(options.program_path.read_text(encoding="utf-8"))
    except (JudgeError, OSError, UnicodeDecodeError) as e:
        sys.exit(f"kagent: {e}")  # no verdict: the program is not to blame
    options.results_dir.mkdir(parents=True, exist_ok=True)
    metrics = {
        "combined_score": found.speed_up,
        "public": {"us": found.cases_us, "roofline_shares": found.roofline_shares},
        "private": {},
        "text_feedback": found.feedback,
    }
    correct = {"correct": found.correct, "error": found.feedback or None}
    for name, data in (("metrics", metrics), ("correct", correct)):
        path = options.results_dir / f"{name}.json"
        path.write_text(json.dumps(data), encoding="utf-8")


if __name__ == "__main__":
    main()
