"""Locks across a fork."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch

from fastsparse_core import Adjacency
from fastsparse_core.cache import AdjacencyCache
from fastsparse_core.locks import ForkSafeLock
from fastsparse_core.structure.build_once import BuiltOnce

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")


def in_a_child(do) -> bool:
    """True if ``do`` returns in a forked process within ten minutes."""
    pid = os.fork()
    if pid == 0:
        try:
            do()
        except BaseException:
            os._exit(1)
        os._exit(0)
    for _ in range(60_000):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status == 0
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return False


class Graph:
    pass


def structure() -> Adjacency:
    return Adjacency.from_csr(torch.tensor([0, 1, 2]), torch.tensor([1, 0]), (2, 2))


@pytest.mark.parametrize("kind", ["cache", "memo"])
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_child_builds_what_another_thread_was_building(kind):
    building, go_on = threading.Event(), threading.Event()
    cache, memo, graph, ready = AdjacencyCache("test"), BuiltOnce(), Graph(), structure()

    def slowly():
        building.set()
        go_on.wait(1800)
        return ready

    def ask(build):
        return memo.get("it", build) if kind == "memo" else cache.lookup(graph, 0, None, build)

    thread = threading.Thread(target=ask, args=(slowly,))
    thread.start()
    assert building.wait(1800)
    try:
        assert in_a_child(lambda: ask(lambda: ready))
    finally:
        go_on.set()
        thread.join()


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_who_forks_within_a_lock_leaves_it_in_both_processes():
    lock = ForkSafeLock()

    def leave():
        with lock:
            pass

    with lock:
        assert in_a_child(leave)
    with lock:
        pass
