"""Examples in docstrings run as they are written; those of `kagent.Run` are in test_api.py."""

import pytest
from examples import run_examples
from kagent_sandbox import draws, lang


@pytest.mark.parametrize("function", [lang.cpp_kernel, draws.draw_index, draws.offsets])
def test_examples_of_what_kernels_and_references_import(function):
    run_examples(function)


@pytest.mark.gpu
def test_the_example_of_a_cuda_kernel():
    run_examples(lang.cuda_kernel)
