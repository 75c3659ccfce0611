"""Every CUDA kernel under compute-sanitizer: parts of tests/sanitize.py in processes side by side.

Each process instruments kernels on one core for minutes. The parts share almost no kernels, so they run at
the same time. Only kernels of this package are instrumented. memcheck runs without PyTorch's pool of
memory, in which every address is valid.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from . import record, tables
from .runner import add_common, progress

DRIVER = record.REPOSITORY / "tests" / "sanitize.py"
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
#: A part of the mangled names of all our kernels and of none of PyTorch's or CUB's.
OUR_KERNELS = "fastsparse4cuda"
#: The summary in the last line of a log.
SUMMARY = re.compile(
    r"RACECHECK SUMMARY: \d+ hazards? displayed \((?P<errors>\d+) errors?, (?P<warnings>\d+) warnings?\)"
    r"|ERROR SUMMARY: (?P<found>\d+) errors?"
)
#: Line that the driver prints after all calls returned.
DONE = "all kernels ran"
#: Beginning of the line in which the driver says why this GPU cannot run a part.
NOT_RUN = "not run: "
#: compute-sanitizer talks to its target through a port, so concurrent processes need different ports.
FIRST_PORT, PORTS = 49152, 16
#: Signals that end this process. It must end its child processes itself, because they run in sessions of
#: their own.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass
class End:
    """Deadline for all processes, by the monotonic clock."""

    at: float

    def now(self, *_: object) -> None:
        """Ends all processes and starts no others. Signal handlers call it, so it takes no lock."""
        self.at = float("-inf")

    @contextmanager
    def by_signals(self) -> Iterator[None]:
        """Context that ends all processes after a signal or an exception."""
        before = {number: signal.signal(number, self.now) for number in SIGNALS}
        try:
            yield
        finally:
            self.now()
            for number, handler in before.items():
                signal.signal(number, handler)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common(parser)
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=["memcheck", "racecheck"])
    parser.add_argument("--parts", nargs="+", metavar="NAME", help="some parts of tests/sanitize.py, not all")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes at the same time")
    parser.add_argument("--limit", type=float, default=1200, help="seconds until a process is ended")
    parser.add_argument("--total", type=float, help="seconds until all are ended; by default never")
    parser.add_argument("--log", type=Path, default=Path("build/sanitizer"), help="folder of the logs")
    parser.add_argument(
        "--keep", action="store_true", help="keep what a record of the same kernels says of others"
    )
    parser.add_argument("--program", default="compute-sanitizer")


def run(options: argparse.Namespace) -> Path:
    """Runs the parts; returns the path of the record.

    Raises:
        SystemExit: An error was found, or a part failed or did not finish, as where a signal ends this; the
            record says which.
    """
    program = shutil.which(options.program)
    if program is None:
        raise SystemExit(f"{options.program} is not on the PATH: it comes with the CUDA toolkit")
    parts = part_names()
    wanted = options.parts or parts
    if unknown := [name for name in wanted if name not in parts]:
        raise SystemExit(f"no such part: {', '.join(unknown)}; expected some of {', '.join(parts)}")
    settings = {"tools": options.tools, "jobs": options.jobs, "limit": options.limit}
    out = record.Recorder("sanitizer", torch.device(options.device), settings, options.out, options.commit)
    out.note(
        f"{_version(program)}; only our kernels are instrumented, CUB's and PyTorch's are not; parts run side"
        " by side, so that their seconds are no measure of a kernel"
    )
    pairs = [(part, tool) for part in wanted for tool in options.tools]
    if options.keep:
        for cell in earlier(out, pairs):
            out.add(**cell)
    options.log.mkdir(parents=True, exist_ok=True)
    end = End(time.monotonic() + (float("inf") if options.total is None else options.total))
    with ThreadPoolExecutor(options.jobs) as pool, end.by_signals():
        running = [
            pool.submit(
                check, program, tool, part, nth, nth // len(options.tools), options.log, options.limit, end
            )
            for nth, (part, tool) in enumerate(pairs)
        ]
        cells = [out.add(**done.result()) for done in progress(as_completed(running), "parts", len(running))]
    bad = [
        cell
        for cell in cells
        if not cell["status"].startswith(NOT_RUN) and (cell["status"] != "ok" or cell["errors"])
    ]
    if bad:
        tables.show(out.path, Console())
        names = ", ".join(f"{cell['part']} ({cell['tool']})" for cell in bad)
        raise SystemExit(f"{len(bad)} of {len(cells)} not clean: {names}; logs in {options.log}")
    return out.path


def part_names() -> list[str]:
    """The parts that the driver knows."""
    listed = subprocess.run(
        [sys.executable, DRIVER, "--list"], capture_output=True, text=True, check=True, env=_environment()
    )
    return listed.stdout.split()


def _environment() -> dict[str, str]:
    """That of a driver: this checkout's packages, and one thread, as other drivers have the other cores."""
    path = [str(record.REPOSITORY / "kernels"), str(record.REPOSITORY), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path)), "OMP_NUM_THREADS": "1"}


def _version(program: str) -> str:
    told = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"Version (\S+)", told)
    return f"compute-sanitizer {found[1] if found else 'of unknown version'}"


def earlier(out: record.Recorder, pairs: Iterable[tuple[str, str]]) -> list[dict[str, Any]]:
    """Cells of a stored record of the same kernels, without those that are run again."""
    if not out.path.exists():
        return []
    stored, again = record.load(out.path), set(pairs)
    if stored["source"]["kernels_digest"] != out.record["source"]["kernels_digest"]:
        return []
    return [cell for cell in stored["cells"] if (cell["part"], cell["tool"]) not in again]


def check(
    program: str, tool: str, part: str, nth: int, turn: int, log_folder: Path, limit: float, end: End
) -> dict[str, Any]:
    """Runs one part under one tool; a cell of the record.

    Args:
        program: compute-sanitizer.
        tool: One of `TOOLS`.
        part: One of the driver's.
        nth: Number among those that run at the same time: each has ports of its own.
        turn: GPUs take turns by this.
        log_folder: Where the output goes, under the part's and the tool's name.
        limit: Seconds that it may take.
        end: When it is ended at the latest.
    """
    command = [program, "--tool", tool, "--kernel-name", f"kernel_substring={OUR_KERNELS}"]
    command += [
        "--launch-timeout",
        "0",
        "--port",
        str(FIRST_PORT + nth * PORTS),
        "--max-connections",
        str(PORTS),
    ]
    if tool == "memcheck":
        command += ["--report-api-errors", "explicit"]
    command += [sys.executable, str(DRIVER), "--part", part]
    environment = _environment()
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if gpus == [""]:
        gpus = [str(index) for index in range(torch.cuda.device_count())]
    if gpus:
        environment["CUDA_VISIBLE_DEVICES"] = gpus[turn % len(gpus)]
    if tool in ("memcheck", "initcheck"):
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    start = time.monotonic()
    cell: dict[str, Any] = {"part": part, "tool": tool}
    if start >= end.at:
        return {**cell, "status": "not started"}
    log = log_folder / f"{part}-{tool}.log"
    with log.open("wb") as output:
        # In its own session, so that the sanitizer and its target can be ended together at the limit.
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        while process.poll() is None and time.monotonic() < min(start + limit, end.at):
            time.sleep(0.1)  # instead of one long wait, because a signal may move the deadline
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            cell["status"] = "not finished"
    cell["seconds"] = round(time.monotonic() - start, 1)
    return cell if "status" in cell else {**cell, **found_in(log.read_text(errors="replace"))}


def found_in(log: str) -> dict[str, Any]:
    """Errors and warnings in a log, and whether the driver finished."""
    for line in log.splitlines():
        if line.startswith(NOT_RUN):
            return {"status": line}
    summaries = list(SUMMARY.finditer(log))
    if not summaries:
        lines = log.strip().splitlines()
        return {"status": f"failed: no summary; {lines[-1][:160] if lines else 'no output'}"}
    found = {
        "errors": max(int(summary["errors"] or summary["found"] or 0) for summary in summaries),
        "warnings": max(int(summary["warnings"] or 0) for summary in summaries),
    }
    if DONE not in log:
        return {"status": "failed: the driver did not come to its end", **found}
    return {"status": "ok", **found}
