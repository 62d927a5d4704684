"""The best seeds against bars: a copy of the same bytes, torch, cuDNN, FlexAttention, experts.

    python benchmarks/bars.py [--task NAME ...] [--configs K] [--rounds R] [--out FILE]
    python benchmarks/bars.py --task NAME --sizes bfloat16,M=2670,N=16168 [--sizes ...]
    python benchmarks/bars.py --task NAME --also FILE[:NAME=VALUE,...] [--also ...]
    python benchmarks/bars.py --read FILE

One process on one GPU, by the judge's clock, without its checks: of each case, all seeds and all
baselines run in turns, from a cold L2. A seed whose results differ from eager's by more than 2 % of
their size is called wrong. Prints each case as it is done, and at the end the bars; each case is
one line of JSON in --out. `--read` prints the bars of such a file. `--sizes` takes the place of the
benchmark cases. `--also` races a further file beside the seeds, with constants of its module set.
"""

from __future__ import annotations

import argparse
import ast
import functools
import gc
import importlib.metadata
import json
import math
import platform
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from kagent.tasks import Seed, find_task, seeds_of
from kagent_sandbox.data.case import Case
from kagent_sandbox.data.task import Task
from kagent_sandbox.device.baseline_calls import BaselineCall, all_names, make_call, make_inputs
from kagent_sandbox.importing import import_file
from kagent_sandbox.judge.timing.baselines import baseline_call
from kagent_sandbox.judge.timing.estimates import Interval, median_interval

COPY = "copy of the bytes"
BF16 = "bf16 linear"
TORCHS = ("eager", "compile", "compile max-autotune")
ROUNDS = 9
ROUND_US = 25_000.0  # of one kernel in one round: from 2 samples of long kernels to 8 of short ones
MOST_DIFFERENCE = 0.02
SEED = 20


@dataclass(frozen=True)
class Bar:
    """Ratio that the fastest right seed should reach in each case of a task.

    `against`: a name, "torch" for the fastest of eager and torch.compile, or "all" for the fastest
    baseline of any kind. `extra_mib`: most memory beside the results.
    """

    task: str
    against: str
    least: float
    dream: float = math.nan
    cases: str = ""  # part of their names; empty: every one
    extra_mib: float = math.inf


BARS = (
    Bar("softmax", COPY, 0.97, 0.99, "bf16"),
    Bar("cross_entropy", COPY, 0.93, 0.97, "131072"),
    Bar("attention", "sdpa cuDNN", 1.0, 1.05),
    Bar("attention", "all", 1.0, 1.05),
    Bar("attention_backward", "cuDNN", 0.95, 1.05),
    Bar("attention_train", "cuDNN", 0.95, 1.05),
    Bar("linear_cross_entropy", "compile", 1.0, cases="128256", extra_mib=512),
    Bar("linear_cross_entropy", "compile", 1 / 1.15, cases="128256", extra_mib=128),
    Bar("gelu", COPY, 0.95, 0.98),
    Bar("gelu_backward", COPY, 0.95, 0.98),
    Bar("softmax_backward", COPY, 0.95, 0.98),
    Bar("rms_norm_backward", COPY, 0.95, 0.98),
    Bar("rms_norm", COPY, 0.95, 0.98),
    Bar("int8_linear", BF16, 1.5, cases="_1x"),
    Bar("int8_linear", COPY, 0.9, 1.0),
    Bar("fp8_linear", "scaled_mm", 1.0),
    Bar("adamw", COPY, 0.95, 0.98),
    Bar("adamw_tensors", COPY, 0.95, 0.98),
)
LIMITED = {bar.task for bar in BARS if math.isfinite(bar.extra_mib)}


def bf16_linear(
    x: torch.Tensor, weight: torch.Tensor, **_: object
) -> functools.partial[torch.Tensor]:
    """The product with weights that are in bfloat16 already, as a model without them has them."""
    x, weight = (t.to(torch.bfloat16) for t in (x, weight))
    return functools.partial(torch.nn.functional.linear, x, weight)


def copy_of(size: float, device: torch.device) -> functools.partial[torch.Tensor]:
    """A copy that reads and writes `size` bytes in all."""
    source, target = (
        torch.zeros(round(size / 16), dtype=torch.int64, device=device) for _ in range(2)
    )
    return functools.partial(target.copy_, source)


def variant_call(
    task: Task, text: str, call: BaselineCall, device: torch.device
) -> functools.partial[object]:
    """The kernel of a file, "FILE[:NAME=VALUE,...]", bound to inputs, with its constants set."""
    from kagent_sandbox.builder.configs import pin_config

    file, _, given = text.partition(":")
    module = import_file(Path(file), f"bars_{abs(hash(text))}")
    items = (item.partition("=") for item in filter(None, given.split(",")))
    config = {name: ast.literal_eval(value) for name, _, value in items}
    for name in config:
        if not hasattr(module, name):
            raise ValueError(f"{file} has no constant {name!r}")
    pin_config(module, config)
    return functools.partial(getattr(module, task.entry), **_inputs(task, call, device))


def _inputs(task: Task, call: BaselineCall, device: torch.device) -> dict[str, Any]:
    """A kernel's arguments, by name."""
    reference = import_file(Path(call.reference), f"reference_of_{task.name}")
    return make_inputs(call, device, reference)


def seed_calls(
    task: Task, seed: Seed, call: BaselineCall, device: torch.device, configs: int
) -> Iterable[tuple[str, Callable[[], object]]]:
    """A seed bound to inputs, once per configuration: what differs from the default, and a call."""
    from kagent_sandbox.builder.configs import enumerate_configs, pin_config

    arguments = _inputs(task, call, device)
    whole = import_file(seed.path, f"bars_{seed.name}")
    every = enumerate_configs(whole, configs)
    for i, config in enumerate(every):
        module = import_file(seed.path, f"bars_{seed.name}_{i}") if i else whole
        pin_config(module, config)
        other = ", ".join(f"{n} {v}" for n, v in config.items() if v != every[0][n])
        yield other, functools.partial(getattr(module, task.entry), **arguments)


def results_of(task: Task, function: Any) -> list[torch.Tensor]:
    """What a bound function returns, or else has written to its arguments, which are copies."""
    written = [a.name for a in task.arguments if a.writes]
    if not written:
        found = function()
        return list(found) if isinstance(found, tuple) else [found]
    copies = {n: function.keywords[n].clone() for n in written}
    function.func(**{**function.keywords, **copies})
    return list(copies.values())


def difference(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Largest distance of two results, over the size of the expected one."""
    worst = 0.0
    for one, other in zip(found, expected, strict=True):
        if one.shape != other.shape:
            return math.inf
        size = float(torch.linalg.vector_norm(other, dtype=torch.float32))
        apart = float(torch.linalg.vector_norm(one.float() - other.float()))
        worst = max(worst, apart / max(size, 1e-30)) if math.isfinite(apart) else math.inf
    return worst


class Contenders:
    """Contenders of one case, what was measured of each, and why others are missing."""

    def __init__(self, task: Task, case: Case, clock: Any, options: argparse.Namespace) -> None:
        self.task, self.case, self.clock, self.options = task, case, clock, options
        self.works: dict[str, Any] = {}
        self.functions: dict[str, Callable[[], object]] = {}
        self.failed: dict[str, str] = {}
        self.seeds: list[str] = []
        self.extra_mib: dict[str, float] = {}
        self.call = baseline_call(task, case, "", SEED)

    def prepare(self) -> None:
        """Make every contender ready to be timed."""
        device = self.clock.device
        modes = [m for m in self.options.modes.split(",") if m]
        names = all_names(self.call.reference, modes)
        with torch.cuda.stream(self.clock.stream):
            eager = make_call(self._named("eager"), device)
            expected = results_of(self.task, eager)
        returned = not any(a.writes for a in self.task.arguments)
        results_bytes = sum(t.nbytes for t in expected) if returned else 0
        for name in names:
            self._try(name, lambda name=name: [make_call(self._named(name), device)])
        if self.task.name in ("int8_linear", "fp8_linear"):
            self._try(BF16, lambda: [bf16_linear(**eager.keywords)])
        self._try(COPY, lambda: [copy_of(self.task.min_bytes(self.case), device)])
        for seed in seeds_of(self.task):
            if seed.language == "cpp" or seed.name in self.options.without.split(","):
                continue
            configs = self.options.configs
            calls = functools.partial(seed_calls, self.task, seed, self.call, device, configs)
            if self.task.name in LIMITED:  # the fastest configuration may take too much memory
                for config, function in calls():
                    name = f"{seed.name} {config}" if config else seed.name
                    self._try(name, lambda function=function: [function], expected)
                    self._took(name, results_bytes)
            else:
                self._try(seed.name, lambda calls=calls: [f for _, f in calls()], expected)
                self._took(seed.name, results_bytes)

        for text in self.options.also:
            variant = functools.partial(variant_call, self.task, text, self.call, device)
            self._try(text, lambda variant=variant: [variant()], expected)
            self._took(text, results_bytes)

    def _took(self, name: str, results_bytes: int) -> None:
        """Count a kernel that runs among the seeds."""
        if name in self.works:
            self.seeds.append(name)
            self.extra_mib[name] = (self.works[name].peak_bytes - results_bytes) / 2**20

    def _named(self, name: str) -> BaselineCall:
        return baseline_call(self.task, self.case, name, SEED)

    def _try(
        self,
        name: str,
        calls: Callable[[], Iterable[Callable[[], object]]],
        expected: list[torch.Tensor] | None = None,
    ) -> None:
        """Keep the fastest of a contender's calls, or the reason why none of them runs."""
        best_us = math.inf
        with torch.cuda.stream(self.clock.stream):
            try:
                for function in calls():
                    best_us = self._take(name, function, expected, best_us)
            except Exception as e:  # noqa: BLE001 - an expert that refuses the case is left out
                self.failed[name] = f"{type(e).__name__}: {str(e)[:300]}"
        if name in self.works:
            self.failed.pop(name, None)

    def _take(
        self,
        name: str,
        function: Callable[[], object],
        expected: list[torch.Tensor] | None,
        best_us: float,
    ) -> float:
        """Keep a call if it is right, and faster than `best_us`; the least time of both."""
        from kagent_sandbox.device.cuda.baselines import ready

        try:
            apart = difference(results_of(self.task, function), expected) if expected else 0.0
            found = ready(function, self.clock)
            us = self.clock.median_us([found.work], 5)
        except Exception as e:  # noqa: BLE001 - the next configuration may run
            self.failed[name] = f"{type(e).__name__}: {str(e)[:300]}"
            return best_us
        if apart > MOST_DIFFERENCE:
            self.failed[name] = f"wrong: {apart:.2%} from eager's results"
        if apart > MOST_DIFFERENCE or us >= best_us:
            found.close()
            return best_us
        if name in self.works:
            self.works[name].close()
        self.works[name], self.functions[name] = found, function
        return us

    def measure(self) -> dict[str, Any]:
        """Time all contenders in turns; one record."""
        rounds: dict[str, list[float]] = {n: [] for n in self.works}
        samples: dict[str, list[float]] = {n: [] for n in self.works}
        first = {n: self.clock.median_us([w.work], 3) for n, w in self.works.items()}
        for i in range(self.options.rounds):
            names = list(self.works)
            for name in names if i % 2 else reversed(names):
                count = max(2, min(8, round(ROUND_US / first[name])))
                took = self.clock.samples([self.works[name].work], count)
                samples[name] += took
                rounds[name].append(statistics.median(took))
        us = {n: _plain(median_interval(s)) for n, s in samples.items()}
        seed = min(self.seeds, key=lambda n: us[n][0], default=None)
        found: dict[str, Any] = {
            "task": self.task.name,
            "case": self.case.name,
            "where": where(),
            "seeds": self.seeds,
            "configs": self.options.configs,
            "us": us,
            "rounds": rounds,
            "captured": {n: w.captured for n, w in self.works.items()},
            "extra_mib": self.extra_mib,
            "failed": self.failed,
        }
        if seed is not None and not self.options.no_do_bench:
            from triton.testing import do_bench

            ms = do_bench(self.functions[seed], warmup=10, rep=60, return_mode="median")
            found["do_bench_us"] = {seed: 1e3 * ms}
        return found

    def close(self) -> None:
        """Free everything."""
        self.clock.sync("before the next case")
        for work in self.works.values():
            work.close()
        self.works.clear()
        self.functions.clear()
        gc.collect()
        torch.cuda.empty_cache()


def _plain(interval: Interval) -> list[float]:
    return [interval.value, interval.low, interval.high]


def where() -> str:
    """The card, versions and date."""
    versions = ", ".join(f"{n} {importlib.metadata.version(n)}" for n in ("torch", "triton"))
    card = torch.cuda.get_device_name()
    return f"{card}, {versions}, Python {platform.python_version()}, {time.strftime('%Y-%m-%d')}"


def ratio(record: dict[str, Any], seed: str, other: str) -> Interval:
    """How many times as fast as another contender a seed is, with its 95 % interval by rounds."""
    pairs = zip(record["rounds"][other], record["rounds"][seed], strict=True)
    return median_interval([theirs / own for theirs, own in pairs])


def fastest(record: dict[str, Any], names: Iterable[str]) -> str | None:
    """Name of the fastest of those that ran."""
    return min(
        (n for n in names if n in record["us"]), key=lambda n: record["us"][n][0], default=None
    )


def opponent(record: dict[str, Any], against: str) -> str | None:
    """Name of the baseline that a bar means."""
    if against == "torch":
        return fastest(record, TORCHS)
    if against == "all":
        return fastest(record, (n for n in record["us"] if n not in (*record["seeds"], COPY)))
    return against if against in record["us"] else None


def show(record: dict[str, Any]) -> str:
    """One case: all contenders by time, with seeds' shares of a copy and of the fastest."""
    lines = [f"{record['task']} {record['case']}"]
    for name, (value, low, high) in sorted(record["us"].items(), key=lambda item: item[1][0]):
        line = f"  {value:10.2f} µs ({low:.2f}–{high:.2f})  {name}"
        if name in record["seeds"]:
            others = [o for o in (COPY, opponent(record, "torch"), opponent(record, "all")) if o]
            for other in dict.fromkeys(others):
                if other in record["us"]:
                    line += f"  {ratio(record, name, other).value:.3f} × {other}"
            line += f"  [seed, {record['extra_mib'][name]:.0f} MiB extra]"
        if name in record.get("do_bench_us", {}):
            line += f"  do_bench {record['do_bench_us'][name]:.2f}"
        lines.append(line)
    lines += [f"  {name} failed: {why}" for name, why in record["failed"].items()]
    return "\n".join(lines)


def table(records: list[dict[str, Any]]) -> str:
    """The bars as Markdown: the worst case, and the geometric mean of all."""
    tried = " or ".join(str(n) for n in sorted({r["configs"] for r in records if "configs" in r}))
    best = f"best of {tried} configurations of each seed" if tried else "best of the seeds"
    lines = [f"| task | against | bar | worst case (95 %), {best} | geometric mean | reached |"]
    lines.append("|---|---|---|---|---|---|")
    for bar in BARS:
        found: list[tuple[Interval, str]] = []
        for record in records:
            if record["task"] != bar.task or bar.cases not in record["case"]:
                continue
            small = [s for s in record["seeds"] if record["extra_mib"][s] <= bar.extra_mib]
            seed, other = fastest(record, small), opponent(record, bar.against)
            if seed is not None and other is not None:
                text = f"{record['case']}, {seed}, {record['us'][seed][0]:.1f} µs"
                found.append((ratio(record, seed, other), text))
        limit = f" with ≤ {bar.extra_mib:.0f} MiB" if math.isfinite(bar.extra_mib) else ""
        start = f"| {bar.task}{limit} | {bar.against} | {bar.least:.2f}"
        start += "" if math.isnan(bar.dream) else f", dream {bar.dream:.2f}"
        if not found:
            lines.append(f"{start} | not measured | | |")
            continue
        worst, text = min(found, key=lambda item: item[0].value)
        mean = math.exp(statistics.fmean(math.log(r.value) for r, _ in found))
        reached = "yes" if worst.low >= bar.least else "no" if worst.high < bar.least else "open"
        lines.append(
            f"{start} | {worst.value:.3f} ({worst.low:.3f}–{worst.high:.3f}): {text} "
            f"| {mean:.3f} | {reached} |"
        )
    return "\n".join(lines)


def _sized(task: Task, sizes: Iterable[str]) -> list[Case]:
    """Cases with other sizes than the first of the benchmark's."""
    found = []
    for text in sizes:
        dtype, *dims = text.split(",")
        given = {name: int(size) for name, size in (d.split("=") for d in dims)}
        known = {"name": text, "dtype": dtype, **given}
        found.append(task.cases("gpu").bench[0].model_copy(update=known))
    return found


def main() -> None:
    tasks = tuple(dict.fromkeys(bar.task for bar in BARS))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", action="append", choices=tasks)
    parser.add_argument("--case", default="", help="part of the names of cases")
    parser.add_argument("--sizes", action="append", help="dtype,DIM=SIZE,... of a case of its own")
    parser.add_argument("--configs", type=int, default=1, help="of each seed; the fastest counts")
    parser.add_argument("--modes", default="compile", help="of torch.compile, with commas")
    parser.add_argument("--without", default="", help="names of seeds to leave out, with commas")
    parser.add_argument("--also", action="append", default=[], help="FILE[:NAME=VALUE,...]")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="more narrow the intervals")
    parser.add_argument("--limit-s", type=float, default=math.inf, help="start no case after that")
    parser.add_argument("--no-do-bench", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--read", type=Path, help="a file that --out wrote")
    options = parser.parse_args()
    if options.read:
        print(table([json.loads(line) for line in options.read.read_text().splitlines()]))
        return
    if not torch.cuda.is_available():
        raise SystemExit("bars.py needs an NVIDIA GPU; `--read FILE` prints what one measured")
    from kagent_sandbox.device.cuda.timing import Clock

    began = time.monotonic()
    clock = Clock(0)
    print(where(), flush=True)
    records = []
    for name in options.task or tasks:
        task = find_task(name)
        for case in _sized(task, options.sizes) if options.sizes else task.cases("gpu").bench:
            if options.case not in case.name:
                continue
            start = time.monotonic()
            if start - began > options.limit_s:
                print(f"{name} {case.name}: left out, the time is up", flush=True)
                continue
            contenders = Contenders(task, case, clock, options)
            try:
                contenders.prepare()
                records.append(contenders.measure())
            except Exception as e:  # noqa: BLE001 - the next case may run
                print(f"{name} {case.name}: {type(e).__name__}: {str(e)[:500]}", flush=True)
                continue
            finally:
                contenders.close()
            torch.compiler.reset()
            print(f"{show(records[-1])}\n  {time.monotonic() - start:.0f} s", flush=True)
            if options.out:
                with options.out.open("a") as file:
                    file.write(json.dumps(records[-1]) + "\n")
    print("\n" + table(records))


if __name__ == "__main__":
    main()
