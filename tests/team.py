"""Processes that run functions together, for the tests of what is distributed."""

from __future__ import annotations

import multiprocessing
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

#: What members wait for each other. Other tests may keep the cores busy, and imports take long.
PATIENCE = timedelta(minutes=10)
#: What members get to end their own part where another's has failed, in seconds.
GRACE = 20.0


def _member(pipe: Any, rank: int, size: int, backend: str, meeting: str) -> None:
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    store = dist.FileStore(meeting, size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=PATIENCE)
    while True:
        function, arguments = pipe.recv()
        try:
            pipe.send((True, function(rank, size, device, *arguments)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))


class Team:
    """``size`` processes that wait for jobs; one that takes too long or dies fails the job, not the next."""

    def __init__(self, size: int, backend: str = "gloo") -> None:
        self.size, self.backend = size, backend
        self.pipes: list[Any] = []
        self.processes: list[Any] = []

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.folder = tempfile.TemporaryDirectory()
        meeting = str(Path(self.folder.name, "meeting"))
        for rank in range(self.size):
            here, there = context.Pipe()
            arguments = (there, rank, self.size, self.backend, meeting)
            process = context.Process(target=_member, args=arguments, daemon=True)
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """``function(rank, size, device, *arguments)`` on every process; returns what each returned."""
        if not self.processes:
            self._start()
        for pipe in self.pipes:
            pipe.send((function, arguments))
        answers: dict[int, Any] = {}
        failed: dict[int, str] = {}
        end = time.monotonic() + PATIENCE.total_seconds()
        while len(answers) + len(failed) < self.size:
            open_ones = [pipe for rank, pipe in enumerate(self.pipes) if rank not in answers | failed]
            ready = wait(open_ones, max(end - time.monotonic(), 0))
            if not ready:
                break
            for pipe in ready:
                rank = self.pipes.index(pipe)
                try:
                    done, result = pipe.recv()
                except EOFError:
                    done, result = False, "died"
                (answers if done else failed)[rank] = result
                if not done:  # the others may wait for it
                    end = min(end, time.monotonic() + GRACE)
        missing = [rank for rank in range(self.size) if rank not in answers | failed]
        if missing or "died" in failed.values():
            self.close()
        errors = [f"rank {rank}:\n{error}" for rank, error in failed.items()]
        errors += [f"rank {rank}: no answer" for rank in missing]
        assert not errors, "\n".join([function.__name__, *errors])
        return [answers[rank] for rank in range(self.size)]

    def close(self) -> None:
        """Ends the processes; the next job starts others."""
        for process in self.processes:
            process.kill()  # they wait for a job, or for each other: nothing is lost
            process.join()
        if self.processes:
            self.folder.cleanup()
        self.pipes, self.processes = [], []
