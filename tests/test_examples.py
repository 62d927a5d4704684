"""Examples in docstrings run as they are written; those of `kagent.Run` are in test_api.py."""

import pytest
from docstring_examples import run_examples
from kagent_sandbox import draws, lang

EXAMPLES = (
    *(lang.cpp_kernel, lang.tensor_map, lang.struct),
    *(draws.draw_index, draws.draw_as_counted, draws.draw_kinds, draws.draw_rows, draws.plant),
    *(draws.draw_around, draws.draw_attention, draws.offsets, draws.break_rows),
    draws.break_attention,
    *(draws.draw_huge, draws.draw_moments, draws.draw_runs),
)


@pytest.mark.parametrize("function", EXAMPLES, ids=lambda function: function.__name__)
def test_examples_of_what_kernels_and_references_import(function):
    run_examples(function)


@pytest.mark.gpu
def test_the_example_of_a_cuda_kernel():
    run_examples(lang.cuda_kernel)
