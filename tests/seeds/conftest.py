"""One warm builder for each module of seeds' tests."""

import pytest
from kagent_sandbox.build.client import Builder


@pytest.fixture(scope="module")
def builder():
    with Builder() as b:
        yield b
