"""The judge's own kernels on a GPU."""

import error_sums
import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.alone]


def test_kernels_make_the_sums_of_torchs_operations():
    assert error_sums.check("cuda") == 1890
