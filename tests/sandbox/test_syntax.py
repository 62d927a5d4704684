"""CPython's parser is not safe for several threads at once: `kagent_sandbox.syntax` is."""

import ast
import gc
import os
import sys
import threading
import time

from kagent_sandbox import syntax

SOURCE = "\n".join(f"def f{i}(x):\n    return [x + {i} for _ in range({i})]" for i in range(150))

FORMULA = "ceil(rows / 4) * 2"


def give_way(phase, info):
    time.sleep(0)


def test_threads_parse_at_the_same_time():
    switch_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    gc.callbacks.append(give_way)  # what lets another thread in while a tree is being made
    errors, trees = [], []

    def work():
        try:
            for _ in range(6):
                trees.append(ast.dump(syntax.parse(SOURCE)))
                assert ast.unparse(syntax.parse_expression(FORMULA)) == FORMULA
        except SystemError as e:
            errors.append(e)

    threads = [threading.Thread(target=work) for _ in range(4)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(switch_s)
        gc.callbacks.remove(give_way)
    assert not errors
    assert len(set(trees)) == 1


def test_a_forked_child_can_parse_although_a_thread_of_its_parent_did():
    inside, leave = threading.Event(), threading.Event()

    def hold():
        with syntax._lock:
            inside.set()
            leave.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    inside.wait(30)
    child = os.fork()
    if child == 0:
        os._exit(0 if syntax.parse("x = 1").body else 1)
    leave.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0
