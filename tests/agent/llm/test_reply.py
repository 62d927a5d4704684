"""Replies as models write them: what is read, what is refused, and with which help."""

import ast
import string
import textwrap

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kagent.llm import code_blocks as fences
from kagent.llm.claims import MOST_HYPOTHESIS
from kagent.llm.reply import Answer, read_reply
from kagent_sandbox.data.verdict import Rejected, Stage, Status
from kagent_sandbox.runtime.text import printable
from sampling import examples

FILE = """import torch

def softmax(x):
    return torch.empty_like(x)
"""
HEAD = "Hypothesis: fewer passes over the row.\nPredicted speed-up: 1.15×\n\n"
ANSWER = Answer("fewer passes over the row.", 1.15, FILE)


def read(text, **more):
    return read_reply(text, "softmax", **more)


def refusal(text, **more):
    found = read(text, **more)
    assert isinstance(found, Rejected), found
    assert (found.stage, found.status) == (Stage.PARSE, Status.NO_KERNEL)
    return found.message


def written(hypothesis, source, fence="```", tag="python", predicted="1.15×"):
    """A reply in the form that prompts ask for."""
    head = f"Hypothesis: {hypothesis}\nPredicted speed-up: {predicted}\n\n"
    return f"{head}{fence}{tag}\n{source}{fence}\n"


CUDA = '''SOURCE = r"""
/* layout:
```
row 0 | row 1
```
```python
*/
__global__ void k() {}
"""
'''
NESTED = f"""import torch

{CUDA}
def softmax(x):
    '''It's
```
x = 1
```
    '''
    return x
"""


class TestWhatIsRead:
    @pytest.mark.parametrize(
        "text",
        [
            HEAD + f"```python\n{FILE}```\n",
            HEAD + f"```py\n{FILE}```",
            HEAD + f"```Python title=softmax.py\n{FILE}```",
            HEAD + f"```softmax.py\n{FILE}```",
            HEAD + f"```{{.python}}\n{FILE}```",
            HEAD + f"```\n{FILE}```\n",
            HEAD + f"~~~python\n{FILE}~~~\n",
            HEAD + f"````python\n{FILE}````\n",
            (HEAD + f"```python\n{FILE}```\n").replace("\n", "\r\n"),
            "\ufeff" + HEAD + f"```python\n{FILE}```\n",
            HEAD + f"  ```python\n{FILE}  ```\n",
            HEAD + "1. file:\n\n   ```python\n" + textwrap.indent(FILE, "   ") + "   ```\n",
            HEAD + FILE,
            HEAD + f"Here it is:\n\n```python\n{FILE}```\n\nIt `should` be **faster**. ```x```\n",
            f"Sure! Let us see.\n\n{HEAD}```python\n{FILE}```\n",
            HEAD + f"```python\n{FILE}```\n\nRun it:\n\n```bash\npip install kernel\n```\n",
            HEAD
            + f"```python\n{FILE}```\n\n```python\nfrom softmax import softmax\nsoftmax(x)\n```",
            HEAD + f"```cpp\nvoid k();\n```\n\n```python\n{FILE}```\n",
            HEAD + f"```text\nit's \"fast\n```\n\n```python\n{FILE}```\n",
            HEAD + f"```python\n{FILE}```\n\nAgain:\n\n```python\n{FILE}```\n",
            HEAD + f"```python\n{FILE}",  # nothing but the last fence is missing
            f"<think>\nHypothesis: no.\n```python\ndef softmax(x): pass\n```\n</think>\n{HEAD}"
            f"```python\n{FILE}```\n",
            "so...\n```python\ndef softmax(x): pass\n```\n</think>\n\n"
            f"{HEAD}```python\n{FILE}```\n",
            "**Hypothesis:** fewer passes over the row.\n**Predicted speed-up:** 1.15×\n\n"
            f"```\n{FILE}```",
            "### Hypothesis\n\nfewer passes\nover the row.\n\n### Predicted speedup\n\n15 %\n\n"
            f"```python\n{FILE}```",
            "- Hypothesis: fewer passes\n  over the row.\n- Predicted speed-up: 1.15\n"
            f"```py\n{FILE}```",
        ],
    )
    def test_honest_deviations(self, text):
        assert read(text) == ANSWER

    def test_fences_within_strings_belong_to_the_file(self):
        compile(NESTED, "", "exec")
        assert read(HEAD + f"```python\n{NESTED}```\n\nDone.\n").source == NESTED
        assert read(HEAD + f"~~~\n{NESTED}~~~\n").source == NESTED

    def test_a_syntax_error_is_left_to_the_compiler(self):
        broken = "def softmax(x):\n    return x x\n"
        assert read(HEAD + f"```python\n{broken}```\n").source == broken

    def test_a_string_that_never_ends_is_left_to_the_compiler(self):
        broken = 'S = """\ndef softmax(x):\n    return x\n'
        found = read(HEAD + f"```python\n{broken}```\n\nAs you see.\n\n```bash\nls\n```\n")
        assert found.source == broken

    @pytest.mark.parametrize(
        "source",
        [
            "def f(x): ...\nsoftmax = f\n",
            "if True:\n    def softmax(x): ...\n",
            "try:\n    import a\nexcept ImportError:\n    def softmax(x): ...\n",
            "class softmax:\n    pass\n",
            "softmax: object = max\n",
            "async def softmax(x): ...\n",
        ],
    )
    def test_an_entry_is_whatever_the_top_level_defines(self, source):
        assert read(f"```python\n{source}```").source == source

    def test_a_complete_file_in_a_reply_that_was_cut_afterwards(self):
        assert read(HEAD + f"```python\n{FILE}```\n\nAnd now for", truncated=True) == ANSWER

    def test_no_hypothesis_is_the_first_paragraph_or_none(self):
        assert read(f"I keep the row\nin registers.\n\nSo.\n```\n{FILE}```").hypothesis == (
            "I keep the row in registers."
        )
        assert read(f"```python\n{FILE}```") == Answer("", None, FILE)


class TestThePrediction:
    @pytest.mark.parametrize(
        ("text", "factor"),
        [
            ("1.15", 1.15),
            ("1.15x", 1.15),
            ("1.15×", 1.15),
            ("x1.15", 1.15),
            ("15 %", 1.15),
            ("+15%", 1.15),
            ("15% faster", 1.15),
            ("about 15 percent", 1.15),
            ("~1.15x over the parent", 1.15),
            ("**1.15×**", 1.15),
            ("1,15×", 1.15),
            ("1.1–1.2×", 1.15),
            ("1.1x to 1.2x", 1.15),
            ("10-20%", 1.15),
            ("10%–20%", 1.15),
            ("-15%", 0.85),
            ("15% slower", 0.85),
            ("2 times", 2.0),
            ("0%", 1.0),
            (".95x", 0.95),
            ("1.2X", 1.2),
            ("fp32 1.3×, bf16 1.1×", 1.3),
            ("bf16: x1.15, fp32: x1.05", 1.15),
            ("1.3 for bf16", 1.3),
            ("128 threads, not 64: 1.2×", 1.2),
            ("2x2 and 2×2 tiles, 32-bit loads: about 15 %", 1.15),
            ("1.15× — 2 passes less", 1.15),
            ("1.05 (5 %)", 1.05),
            ("fp32", None),
            ("v1.2.3", None),
            ("unknown", None),
            ("n/a", None),
            ("none", None),
            ("", None),
            ("0", None),
            ("99999999", None),
            ("-200%", None),
        ],
    )
    def test_forms(self, text, factor):
        found = read(written("h", FILE, predicted=text)).predicted
        assert found == (None if factor is None else pytest.approx(factor))

    @pytest.mark.parametrize(
        "line",
        [
            "Predicted gain: 1.15×",
            "predicted speedup: 1.15×",
            "Expected speed up (over the parent): 1.15×",
            "* **Predicted speed-up**: 1.15×",
            "Predicted Speed-ups: 1.15×",
        ],
    )
    def test_names(self, line):
        assert read(f"Hypothesis: h\n{line}\n```\n{FILE}```").predicted == pytest.approx(1.15)

    def test_missing(self):
        assert read(f"Hypothesis: 2 warps, 1.5× faster\n\n```\n{FILE}```").predicted is None


@pytest.mark.parametrize(
    ("text", "share"),
    [
        *(("0.8", 0.8), ("80 %", 0.8), ("about 0,75", 0.75), ("1", 1.0), ("95", 0.95)),
        *((".8", 0.8), ("8/10", 0.8), ("3 / 4", 0.75), ("9 out of 10", 0.9), ("0.8/0.9", 0.8)),
        *(("fp32 0.9, bf16 0.7", 0.9), ("for 2 of 3 cases 60 %", 0.6), ("**0.8**", 0.8)),
        *(
            ("high", None),
            ("", None),
            ("900 %", None),
            ("fp32", None),
            ("1/0", None),
            ("5/4", None),
        ),
    ],
)
def test_a_stated_probability(text, share):
    claims = f"Predicted speed-up: 1.15×\nProbability that it works: {text}\n"
    assert read(f"Hypothesis: h\n{claims}\n```\n{FILE}```").works == share
    # Beside the hypothesis, without an empty line between.
    found = read(f"Hypothesis: h\nProbability of working: {text}\n```\n{FILE}```")
    assert (found.hypothesis, found.works) == ("h", share)


class TestWhatIsRefused:
    def test_nothing(self):
        assert refusal("").startswith("the reply is empty: answer with a line 'Hypothesis: …'")
        assert refusal(" \n\t").startswith("the reply is empty")

    def test_prose(self):
        text = "I would use softmax with more warps."
        assert refusal(text) == (
            "the reply holds no Python file: answer with a line 'Hypothesis: …', a line "
            "'Predicted speed-up: …' and one ```python block that defines softmax"
        )
        assert "no Python file" in refusal(HEAD + "```bash\npip install softmax\n```\n")

    def test_several_files(self):
        other = FILE.replace("empty_like", "zeros_like")
        message = refusal(HEAD + f"```python\n{FILE}```\nor\n```python\n{other}```\n")
        assert message.startswith(
            "the reply holds 2 files that define softmax (lines 5–8, lines 12–15): choose one"
        )

    @pytest.mark.parametrize("tag", ["cuda", "cpp", "c++", ""])
    def test_another_language(self, tag):
        source = "#include <cuda_bf16.h>\n__global__ void softmax(const float* x) { }\n"
        message = refusal(HEAD + f"```{tag}\n{source}```\n")
        assert "holds CUDA or C++ alone (lines 5–6)" in message
        assert "wraps it with cuda_kernel(name, source) or cpp_kernel(name, source)" in message

    @pytest.mark.parametrize("tag", ["diff", "patch", "python", ""])
    def test_a_diff(self, tag):
        diff = "--- a/k.py\n+++ b/k.py\n@@ -1,2 +1,2 @@\n def softmax(x):\n-    a\n+    b\n"
        assert "holds a diff (lines 5–10): answer with the whole file" in refusal(
            HEAD + f"```{tag}\n{diff}```\n"
        )

    @pytest.mark.parametrize("truncated", [True, False])
    @pytest.mark.parametrize(
        "source",
        [
            "import torch\n\ndef softmax(x):\n    return torch.em(",
            'S = """\n__global__ void k() {\n',
            "import torch\n\n@triton.jit\ndef _k(x",
        ],
    )
    def test_cut_short(self, source, truncated):
        message = refusal(HEAD + f"```python\n{source}", truncated=truncated)
        assert "was cut short in its line " in message
        assert ", before its file ended: " in message
        assert "write a shorter file and less around it (or raise reply_tokens)" in message

    def test_cut_short_where_it_happens_to_make_sense(self):
        assert "was cut short" in refusal(HEAD + f"```python\n{FILE}", truncated=True)

    def test_cut_short_before_the_file(self):
        message = refusal("Hypothesis: the row of the soft", truncated=True)
        assert "was cut short in its line 1, before its file began" in message
        assert "ends before its thinking does" in refusal("<think>softmax ...", truncated=True)

    def test_a_file_without_the_entry(self):
        message = refusal(HEAD + "```python\nimport torch\ndef kernel(x): ...\nK = 3\n```\n")
        assert "does not define softmax (it defines K, kernel): " in message
        assert "def softmax(...)" in message
        assert "does not define softmax: " in refusal("```python\nfrom a import softmax\n```")

    def test_an_entry_that_is_only_mentioned(self):
        for source in ("# softmax\n", "x.softmax = 1\n", "def f():\n    def softmax(x): ...\n"):
            assert "does not define softmax" in refusal(f"```python\n{source}```")

    def test_no_refusal_has_the_form_of_a_traceback(self):
        assert "\n" not in refusal("def softmax(: \x00")


# Any hypothesis, any file -----------------------------------------------------------------------

words = st.text(st.characters(codec="utf-8"), max_size=200)
lines = st.one_of(
    st.text(st.sampled_from(string.printable.replace("\r", "")), max_size=30),
    st.sampled_from(["```", "```python", "~~~", "</think>", "<think>", "````", "Hypothesis: x"]),
    st.sampled_from(["def softmax(x):", "Predicted speed-up: 9×", '"quoted"', "it's", "// ```"]),
)


@st.composite
def docstrings(draw):
    """A string literal that holds anything, as Python writes it: raw, escaped or triple quoted."""
    text = "\n".join(draw(st.lists(lines, max_size=6)))
    quote = draw(st.sampled_from(['"""', "'''"]))
    plain = text.replace("\\", "\\\\").replace(quote[0], "\\" + quote[0])
    continued = text.replace("\n", " ")
    split_line = '"abc \\\n  def it\'s" # \'\'\' """'
    return draw(
        st.sampled_from([f"{quote}{plain}{quote}", repr(text), repr(continued), split_line])
    )


@st.composite
def files(draw):
    """Python files that define the entry."""
    parts = [f"V{i} = {value}" for i, value in enumerate(draw(st.lists(docstrings(), max_size=4)))]
    parts.append("def softmax(x):\n    return x")
    comments = draw(st.lists(st.sampled_from(["# it's", '# """', "# ```", "", "\f"]), max_size=3))
    order = draw(st.permutations(parts + comments))
    return "\n".join(order) + "\n"


@settings(max_examples=examples(300), deadline=None)
@given(words, files(), st.sampled_from(["```", "~~~", "````"]), st.sampled_from(["python", ""]))
@example("```python", FILE, "```", "python")
@example("</think> <think>", NESTED, "```", "python")
@example("Predicted speed-up: 3", NESTED, "```", "")
def test_what_is_written_is_read(hypothesis, source, fence, tag):
    ast.parse(source)
    hypothesis = " ".join(hypothesis.split())
    found = read(written(hypothesis, source, fence, tag))
    shown = " ".join(printable(hypothesis).split())
    assert found == Answer(shown, 1.15, source)


@settings(max_examples=examples(500), deadline=None)
@given(st.lists(lines | words | docstrings(), max_size=12), st.booleans())
def test_any_text_gives_one_or_the_other(pieces, truncated):
    found = read("\n".join(pieces), truncated=truncated)
    assert isinstance(found, Answer | Rejected)
    if isinstance(found, Answer):
        assert "softmax" in found.source
        assert "\n" not in found.hypothesis


def test_halves_of_characters_and_zeros():
    found = read(f"Hypothesis: \ud800\n\n```python\n{FILE}# \udfff\x00\n```")
    assert isinstance(found, Rejected | Answer)
    found = read(f"Hypothesis: \ud800\n\n```python\n{FILE}# \udfff\n```")
    assert found.source.encode()


def test_a_long_hypothesis_is_kept_in_part():
    found = read(written("word " * 10_000, FILE))
    assert len(found.hypothesis) <= MOST_HYPOTHESIS
    assert found.hypothesis.endswith(" …")


@pytest.mark.sampled(one_in=3)
@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "text",
    [
        "```" * 300_000,
        "```python\n" * 100_000,
        '```python\n"""\n' * 70_000,
        "```python\n'\n```\n" * 60_000,
        "~~~\n" * 250_000,
        '"' * 1_000_000,
        "```python\n" + '"' * 1_000_000,
        "```python\n" + "'\\" * 500_000,
        "```python\n" + '"\\"' * 300_000 + "\n```",
        "*" * 1_000_000,
        " " * 1_000_000 + "x",
        "Hypothesis" * 100_000,
        "Hypothesis: " + "a " * 500_000,
        "Hypothesis:\n" + "a\n" * 500_000,
        "Predicted speed-up " * 50_000,
        "Predicted speed-up: " + "1" * 1_000_000,
        "1. " * 300_000,
        "</think>" * 120_000,
        "<think>" * 140_000,
        "@@ " + "@ " * 500_000,
        "```\n" + "#" * 1_000_000 + "\n```",
        "```python\n" + "(" * 1_000_000 + "softmax\n```",
        "```python\n" + "x = 1 # softmax\n" * 60_000 + "```",
        "import softmax\n" * 70_000,
    ],
    ids=lambda text: repr(text[:16]),
)
def test_megabytes_cost_no_more_than_their_length(text):
    """A cost that grows with the square takes far longer than the limit of a test."""
    assert isinstance(read(text), Rejected | Answer)


def test_blocks_say_where_they_are():
    parts = fences.split("a\n```py\nx\ny\n```\nb\n~~~\nz")
    assert parts.prose == ("a", "", "b", "")
    assert [(b.tag, b.body, b.first, b.last, b.closed) for b in parts.blocks] == [
        ("py", "x\ny\n", 3, 4, True),
        ("", "z\n", 8, 8, False),
    ]
