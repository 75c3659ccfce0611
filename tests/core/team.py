"""Processes that run functions together, for the tests of what is distributed."""

from __future__ import annotations

import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def _member(pipe: Any, rank: int, size: int, backend: str, meeting: str) -> None:
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    store = dist.FileStore(meeting, size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    while True:
        function, arguments = pipe.recv()
        try:
            pipe.send((True, function(rank, size, device, *arguments)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))


class Team:
    """``size`` processes that wait for jobs; one that takes too long or dies fails the job."""

    def __init__(self, size: int, backend: str = "gloo") -> None:
        context = multiprocessing.get_context("spawn")
        self.folder = tempfile.TemporaryDirectory()
        meeting = str(Path(self.folder.name, "meeting"))
        self.pipes, self.processes = [], []
        for rank in range(size):
            here, there = context.Pipe()
            process = context.Process(target=_member, args=(there, rank, size, backend, meeting), daemon=True)
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)

    def run(self, function: Callable[..., Any], *arguments: Any, seconds: float = 120.0) -> list[Any]:
        """``function(rank, size, device, *arguments)`` on every process; returns what each returned."""
        for pipe in self.pipes:
            pipe.send((function, arguments))
        answers = []
        for rank, pipe in enumerate(self.pipes):
            if not pipe.poll(seconds):
                self.close()
                raise TimeoutError(f"{function.__name__}: rank {rank} did not answer in {seconds} s")
            answers.append(pipe.recv())
        # All of them: where one fails, the others' errors are those of waiting for it.
        failed = [f"rank {rank}:\n{result}" for rank, (done, result) in enumerate(answers) if not done]
        assert not failed, "\n".join([function.__name__, *failed])
        return [result for _, result in answers]

    def close(self) -> None:
        """Ends the processes."""
        for process in self.processes:
            process.kill()  # they wait for a job, or for each other: nothing is lost
            process.join()
        self.folder.cleanup()
