"""One backend for the module; each test has its own launcher process."""

import pytest


@pytest.fixture(scope="module")
def backend():
    from kagent_sandbox.device.cuda.backend import GpuBackend

    with GpuBackend() as made:
        yield made


@pytest.fixture(scope="module")
def arena(backend):
    made = backend.arena(512 << 20)
    yield made
    made.close()


@pytest.fixture
def launcher(backend, arena):
    arena.bytes(0, arena.nbytes).fill_(0xAB)
    made = backend.launcher(arena)
    yield made
    made.close()
