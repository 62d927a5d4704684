"""Benchmarks that queue work: Ctrl-C begins nothing more."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from work_queue import cancelled_on_interrupt


def test_an_interrupt_cancels_what_waits():
    begun, over = threading.Event(), threading.Event()
    futures = []

    def first():
        begun.set()
        over.wait()

    def interrupted():
        with ThreadPoolExecutor(1) as pool, cancelled_on_interrupt(pool):
            futures.extend(pool.submit(work) for work in (first, over.wait))
            begun.wait()
            # The first one ends as a command that had Ctrl-C, too.
            futures[1].add_done_callback(lambda _: over.set())
            raise KeyboardInterrupt

    with pytest.raises(SystemExit, match="interrupted"):
        interrupted()
    assert futures[0].done()
    assert futures[1].cancelled()


def test_without_one_all_is_done():
    with ThreadPoolExecutor(1) as pool, cancelled_on_interrupt(pool):
        found = [pool.submit(int, n) for n in "123"]
    assert [f.result() for f in found] == [1, 2, 3]
