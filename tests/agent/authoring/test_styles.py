"""Files as their authors write them: examples, functions and decorators in many styles."""

import numpy as np
import torch
from kagent.authoring.tracing.drawing import observed, recorded


def words(function):
    return [d.drawing.words() for d in recorded(function)]


def test_examples_of_numpy_and_of_lists_are_drawn_as_their_values_are():
    def example():
        numbers = np.random.default_rng(0).standard_normal((64, 48)).astype(np.float32)
        yield torch.from_numpy(numbers)
        yield torch.tensor(numbers) * 0 + 3
        yield torch.tensor([i % 7 for i in range(300)])

    first, second, third = words(example)
    assert first.startswith("normal with mean 0 ")
    assert second == "evenly from 1.5 to 4.5"
    assert third == "whole numbers from 0 to 6"


def test_examples_like_others_are_drawn():
    def example():
        x = torch.empty(8, 16)
        like = torch.rand_like(x), torch.randn_like(x, dtype=torch.bfloat16)
        return *like, torch.randint_like(x, 5), torch.randint_like(x, 2, 5)

    assert words(example) == [
        "evenly from 0 to 1",
        "normal with mean 0 and deviation 1",
        "whole numbers from 0 to 4",
        "whole numbers from 2 to 4",
    ]


def test_numbers_that_are_all_the_same_are_drawn_around_them():
    def example():
        masked = torch.zeros(4, 4)
        masked[0] = 1
        vectors = torch.zeros(8), torch.ones(8).bfloat16(), torch.full((8,), -2.0)
        return *vectors, torch.ones(4, 4), masked, torch.tensor(0.5), torch.zeros(4).long()

    code = "as the example's own code draws it"
    expected = ["evenly from 0 to 0.1", "evenly from 0.5 to 1.5", "evenly from -3 to -1"]
    assert words(example) == [
        *expected,
        "evenly from 1 to 1",  # it may be a mask
        code,
        "evenly from 0.25 to 0.75",
        code,
    ]
    given = observed((torch.zeros(8), torch.ones(8), torch.full((8,), -2.0), torch.ones(4, 4)))
    assert [d.drawing.words() for d in given] == [*expected, "evenly from 1 to 1"]


def test_memory_for_results_is_drawn():
    def example():
        x = torch.randn(8, 16)
        return torch.empty(8), torch.empty_like(x).bfloat16(), torch.empty_like(x)

    assert words(example)[::2] == ["normal with mean 0 and deviation 1"] * 2
