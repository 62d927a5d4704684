"""What bars.py does without a GPU: it binds variants of files, and reads its records as bars."""

import bars
import pytest
import torch
from kagent.tasks import find_task
from kagent_sandbox.judge.timing.baselines import baseline_call


@pytest.fixture
def call():
    task = find_task("softmax")
    return task, baseline_call(task, task.cpu.bench[0], "", bars.SEED)


def test_a_variant_is_a_file_with_constants_of_its_own(call, tmp_path):
    task, inputs = call
    file = tmp_path / "half.py"
    file.write_text("FACTOR = 0.5\n\n\ndef softmax(x):\n    return x * FACTOR\n")
    cpu = torch.device("cpu")
    plain, other = (
        bars.variant_call(task, text, inputs, cpu) for text in (str(file), f"{file}:FACTOR=-2.0")
    )
    x = plain.keywords["x"]
    assert torch.equal(x, other.keywords["x"])
    assert torch.equal(plain(), x * 0.5)
    assert torch.equal(other(), x * -2.0)
    with pytest.raises(ValueError, match=r"half\.py has no constant 'NOPE'"):
        bars.variant_call(task, f"{file}:NOPE=1", inputs, cpu)


@pytest.mark.parametrize(
    ("seed_us", "reached"),
    [
        ((100.0, 100.1, 100.2), "yes"),
        ((103.0, 104.0, 103.1), "open"),
        ((110.0, 111.0, 112.0), "no"),
    ],
)
def test_a_bar_is_reached_if_the_whole_interval_is_above_it(seed_us, reached):
    rounds = {"cuda_packed": list(seed_us) * 3, bars.COPY: [100.0] * 9}
    record = {
        "task": "softmax",
        "case": "bf16_8x8",
        "seeds": ["cuda_packed"],
        "us": {name: [sorted(us)[4], min(us), max(us)] for name, us in rounds.items()},
        "rounds": rounds,
        "extra_mib": {"cuda_packed": 0.0},
    }
    (line,) = [r for r in bars.table([record]).splitlines() if r.startswith("| softmax | copy")]
    assert line.endswith(f"| {reached} |")
