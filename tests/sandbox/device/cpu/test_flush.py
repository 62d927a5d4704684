"""Nothing of the judge's own runs beside what it times."""

import hashlib
import threading

import torch
from kagent_sandbox.device.cpu import flush


def test_threads_that_still_run_are_waited_for(monkeypatch):
    monkeypatch.setattr(flush, "_MOST_REST_S", 60.0)
    begun, ended = threading.Event(), threading.Event()

    def work():
        data = bytes(30_000_000)
        begun.set()
        hashlib.sha256(data)  # without the interpreter's lock
        ended.set()

    thread = threading.Thread(target=work)
    thread.start()
    begun.wait()
    flush.come_to_rest()
    assert ended.is_set()
    thread.join()


def test_after_it_settles_no_thread_of_openmp_spins(monkeypatch):
    monkeypatch.setattr(flush, "_MOST_REST_S", 60.0)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        torch.ones(1 << 20).sum()
        flush.settle()
        tasks = flush.other_threads()
        assert tasks
        assert not any(map(flush._runs, tasks))
    finally:
        torch.set_num_threads(threads)
