"""The code in technique cards, made whole: each file of snippets/ is a candidate around one fence.

    NAME.LANGUAGE.py      around the first fence of the card's section for that language
    NAME.LANGUAGE.2.py    around the second

Its docstring holds `entry:` with arguments and results and `expect:`, an expression over the
arguments in float64 that gives the results; where that is the point `loads:`, the width of all
global loads in bytes; `error:` in machine epsilons where 4 are not enough; `inputs: positive` where
the code divides by a sum; `interpret: no` with the reason if Triton's interpreter cannot run it.
"""

import importlib.util
import math
import re
from dataclasses import dataclass
from pathlib import Path

import torch
from kagent.prompting.cards import is_installed, load_cards
from kagent.resources import resource
from kagent_sandbox.data.build import BuildCase, BuildRequest, TensorSpec
from kagent_sandbox.data.language import LANGUAGES

FOLDER = Path(__file__).parent / "snippets"
CARDS = load_cards([resource("prompts") / "cards"])
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INFO = {"triton": "python", "gluon": "python", "cuda": "cuda", "cpp": "cpp"}
PLACE = "# SNIPPET\n"


def fences(card):
    """(language, number from 1, text) of all code of a card."""
    found = []
    for heading, language in ((each.title, each.name) for each in LANGUAGES.values()):
        if heading in card.sections:
            matches = FENCE.findall(card.sections[heading])
            found += [(language, info, i, text) for i, (info, text) in enumerate(matches, 1)]
    return found


def name_of(card, language, number):
    return f"{card}.{language}.py" if number == 1 else f"{card}.{language}.{number}.py"


def needs_a_file(language, text):
    """Whole kernels and helpers must be built; a fragment of Python is only parsed."""
    return INFO[language] != "python" or re.search(r"^(@\w+\.jit|def )", text, re.MULTILINE)


@dataclass(frozen=True)
class Snippet:
    name: str
    source: str  # with the fence in its place
    entry: str
    arguments: tuple[TensorSpec, ...]
    results: tuple[TensorSpec, ...]
    fields: dict[str, str]

    @property
    def missing(self):
        """Packages that the card needs and that are not installed."""
        packages = CARDS[self.name.split(".")[0]].front.packages
        return [p for p in packages if not is_installed(p)]

    @property
    def target(self):
        return "cpu" if ".cpp." in self.name else self.fields.get("target", "sm_90a")

    def request(self):
        case = BuildCase("case", self.arguments, self.results)
        allow = tuple(self.fields.get("allow", "").split())
        return BuildRequest(self.source, self.entry, self.target, (case,), allow=allow)


def snippets():
    found = []
    for card in CARDS.values():
        for language, _info, number, text in fences(card):
            path = FOLDER / name_of(card.name, language, number)
            if path.is_file():
                found.append(_snippet(path, text))
    return found


def _snippet(path, text):
    wrapper = path.read_text()
    assert wrapper.count(PLACE) == 1, path
    source = wrapper.replace(PLACE, text)
    head = wrapper.split('"""')[1]
    head = re.sub(r"\n    +", " ", head)  # a field goes on in indented lines
    fields = dict(re.findall(r"^(\w+): (.*)$", head, re.MULTILINE))
    entry, arguments, results = re.fullmatch(r"(\w+)\((.*)\) -> (.*)", fields["entry"]).groups()
    return Snippet(path.name, source, entry, _specs(arguments), _specs(results), fields)


def _specs(text):
    found = []
    for i, (name, dtype, sizes) in enumerate(re.findall(r"(?:(\w+): )?(\w+)\[([\d,]*)\]", text)):
        shape = tuple(int(n) for n in sizes.split(",") if n)
        strides = [1] * len(shape)
        for d in range(len(shape) - 2, -1, -1):
            strides[d] = strides[d + 1] * shape[d + 1]
        found.append(TensorSpec(name or f"result{i}", shape, tuple(strides), dtype))
    return tuple(found)


def error_of(snippet, device, folder):
    """Runs it on random inputs: its relative error over what is allowed, 4 machine epsilons."""
    path = folder / snippet.name
    path.write_text(snippet.source)
    spec = importlib.util.spec_from_file_location("snippet", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.manual_seed(0)
    inputs = {a.name: _draw(a, device) for a in snippet.arguments}
    if snippet.fields.get("inputs") == "positive":  # a sum near 0 would round as the machine adds
        inputs = {n: t.abs() for n, t in inputs.items()}
    got = getattr(module, snippet.entry)(*inputs.values())
    exact = {n: t.double() if t.dtype.is_floating_point else t for n, t in inputs.items()}
    expected = eval(snippet.fields["expect"], {"torch": torch, "math": math, **exact})
    got, expected = (x if isinstance(x, tuple) else (x,) for x in (got, expected))
    worst = 0.0
    for result, g, e in zip(snippet.results, got, expected, strict=True):
        assert tuple(g.shape) == result.shape
        assert g.dtype == getattr(torch, result.dtype)
        difference = (g.double() - e).norm() / e.double().norm()
        allowed = float(snippet.fields.get("error", "4")) * torch.finfo(g.dtype).eps
        worst = max(worst, float(difference) / allowed)
    return worst


def _draw(argument, device):
    dtype = getattr(torch, argument.dtype)
    if dtype.is_floating_point:
        return torch.randn(argument.shape, device=device).to(dtype)
    return torch.randint(0, 7, argument.shape, device=device).to(dtype)
