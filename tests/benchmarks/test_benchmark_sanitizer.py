"""Kernels under compute-sanitizer: parts name all sources and run, and a record says what became of each."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import sanitize
from hopper import KERNELS, prepare
from rich.console import Console

from benchmarks import record, sanitizer, tables
from benchmarks.__main__ import run
from fastsparse_core.fused.aggregate_linear_launch import gathers_neighbours

#: The part whose kernels run only on Hopper GPUs.
HOPPER = "aggregate-linear"

#: A script in place of compute-sanitizer, which runs no kernel. The part chooses the case: no error or a race
#: (spmm-float32), another GPU is needed (aggregate-linear), an exception (spmm-float16), no end (structures).
STAND_IN = """#!{python}
import sys, time
print("Version 1.2.3.4") if "--version" in sys.argv else None
part, tool = sys.argv[-1], sys.argv[sys.argv.index("--tool") + 1] if "--tool" in sys.argv else ""
if part == "spmm-float32":
    print("all kernels ran")
    if tool == "racecheck":
        print("========= RACECHECK SUMMARY: 3 hazards displayed (2 errors, 1 warning)")
    else:
        print("========= ERROR SUMMARY: 0 errors")
if part == "aggregate-linear":
    print("not run: aggregate-linear: needs another GPU")
    print("all kernels ran")
    print("========= ERROR SUMMARY: 0 errors")
if part == "spmm-float16":
    print("ValueError: no such thing")
    print("========= ERROR SUMMARY: 1 error")
if part == "structures":
    import os
    print(os.getpid(), flush=True)
    time.sleep(3600)
"""


def test_every_source_of_kernels_is_in_a_part() -> None:
    sources = {path.stem for path in (record.REPOSITORY / "kernels" / "cuda").glob("*.cu")}
    named = {name for part in sanitize.PARTS.values() for name in part.files}
    assert named == sources, "tests/sanitize.py: every kernel has a part, which names its source"


@pytest.mark.parametrize("name", [name for name in sanitize.PARTS if name != HOPPER])
def test_calls_of_a_part_are_right(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sanitize, "DEVICE", "cpu")
    sanitize.PARTS[name].run()


def test_the_part_that_needs_hopper_reaches_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sanitize, "DEVICE", "cpu")
    with pytest.raises(sanitize.NotHere, match="architecture 9.0"):
        sanitize.PARTS[HOPPER].run()
    hopper = prepare("cpu", monkeypatch)
    sanitize.PARTS[HOPPER].run()
    assert set(hopper.launched) == set(KERNELS)
    assert gathers_neighbours(sanitize.short(), "auto")
    assert not gathers_neighbours(sanitize.sparse(), "auto")


def test_parts_leave_the_choice_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sanitize, "DEVICE", "cpu")
    before = [{name: vars(module)[name] for name in small} for module, small in sanitize.CHANGED]
    sanitize.PARTS["spmm-resident-all"].run()
    assert [{name: vars(module)[name] for name in small} for module, small in sanitize.CHANGED] == before


@pytest.mark.parametrize(
    ("compiled", "plain"),
    [
        (
            "void fastsparse::cuda::(anonymous namespace)::a<float, 3>(float*)",
            "fastsparse::cuda::a<float, 3>",
        ),
        ("fastsparse::cuda::(anonymous namespace)::b(fastsparse::cuda::Args)", "fastsparse::cuda::b"),
        (
            "void fastsparse::cuda::c<(fastsparse::cuda::Weight)1>(int)",
            "fastsparse::cuda::c<(fastsparse::cuda::Weight)1>",
        ),
    ],
)
def test_names_of_kernels_without_parameters(compiled: str, plain: str) -> None:
    assert sanitize._plain(compiled) == plain


@pytest.fixture
def stand_in(tmp_path: Path) -> str:
    path = tmp_path / "compute-sanitizer"
    path.write_text(STAND_IN.format(python=sys.executable))
    path.chmod(0o755)
    return str(path)


def arguments(tmp_path: Path, stand_in: str, *more: str) -> list[str]:
    folders = ["--out", str(tmp_path / "out"), "--log", str(tmp_path / "log")]
    return ["sanitizer", "--device", "cpu", "--program", stand_in, *folders, "--jobs", "2", *more]


def stored(tmp_path: Path) -> dict[tuple[str, str], dict]:
    result = record.load(next((tmp_path / "out").glob("*/sanitizer.json")))
    return {(cell["part"], cell["tool"]): cell for cell in result["cells"]}


def test_errors_failures_and_parts_without_an_end_are_told_apart(tmp_path: Path, stand_in: str) -> None:
    parts = ["--parts", "spmm-float32", "spmm-float16", "spmm-bfloat16"]
    with pytest.raises(SystemExit, match="5 of 6 not clean"):
        run(arguments(tmp_path, stand_in, *parts), Console(quiet=True))
    # By itself, for the others may need longer than its limit.
    without_end = ["--parts", "structures", "--limit", "1", "--keep"]
    with pytest.raises(SystemExit, match="2 of 2 not clean"):
        run(arguments(tmp_path, stand_in, *without_end), Console(quiet=True))
    cells = stored(tmp_path)
    race = cells["spmm-float32", "racecheck"]
    assert (race["status"], race["errors"], race["warnings"]) == ("ok", 2, 1)
    assert cells["spmm-float32", "memcheck"]["errors"] == 0
    failed = cells["spmm-float16", "memcheck"]
    assert (failed["status"], failed["errors"]) == ("failed: the driver did not come to its end", 1)
    assert cells["spmm-bfloat16", "memcheck"]["status"] == "failed: no summary; no output"
    assert cells["structures", "racecheck"]["status"] == "not finished"
    assert cells["structures", "racecheck"]["seconds"] >= 1
    assert "RACECHECK" in (tmp_path / "log" / "spmm-float32-racecheck.log").read_text()

    path = next((tmp_path / "out").glob("*/sanitizer.json"))
    table = tables.TABLES["sanitizer"](record.load(path))[0]
    rows = {row[0]: row[1:] for row in table.rows}
    assert list(table.columns) == ["part", "memcheck", "racecheck"]
    assert rows["all 4 parts"][1].startswith("3 errors, 1 warnings, 3 ")
    assert rows["structures"] == ["not finished", "not finished"]
    assert rows["spmm-float32"][0].startswith("0 errors, 0 warnings, ")


def test_a_part_that_this_gpu_has_not_is_no_error_and_not_clean(tmp_path: Path, stand_in: str) -> None:
    run(arguments(tmp_path, stand_in, "--parts", HOPPER, "--tools", "memcheck"), Console(quiet=True))
    assert stored(tmp_path)[HOPPER, "memcheck"]["status"] == "not run: aggregate-linear: needs another GPU"
    path = next((tmp_path / "out").glob("*/sanitizer.json"))
    assert tables.TABLES["sanitizer"](record.load(path))[0].rows[1] == [HOPPER, "not run"]


def test_a_clean_part_ends_well_and_is_kept(tmp_path: Path, stand_in: str) -> None:
    clean = ["--parts", "spmm-float32", "--tools", "memcheck"]
    run(arguments(tmp_path, stand_in, *clean), Console(quiet=True))
    result = record.load(next((tmp_path / "out").glob("*/sanitizer.json")))
    assert result["notes"][0].startswith("compute-sanitizer 1.2.3.4;")
    (row, *others) = tables.CHAPTERS["sanitizer"].tables(result)[0].rows
    assert row[1] == "0 errors, 0 warnings"
    assert not others
    more = ["--parts", "spmm-float32", "--tools", "racecheck", "--keep"]
    with pytest.raises(SystemExit, match="1 of 1 not clean"):
        run(arguments(tmp_path, stand_in, *more), Console(quiet=True))
    assert stored(tmp_path).keys() == {("spmm-float32", "memcheck"), ("spmm-float32", "racecheck")}


def test_no_part_starts_after_the_end(tmp_path: Path, stand_in: str) -> None:
    with pytest.raises(SystemExit, match="2 of 2 not clean"):
        run(arguments(tmp_path, stand_in, "--parts", "structures", "--total", "0"), Console(quiet=True))
    assert {cell["status"] for cell in stored(tmp_path).values()} == {"not started"}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_parts_and_leaves_a_record(tmp_path: Path, stand_in: str, number: int) -> None:
    parts = ["--parts", "spmm-float32", "structures", "maxk-float32", "--tools", "memcheck", "--jobs", "1"]
    command = [sys.executable, "-m", "benchmarks", *arguments(tmp_path, stand_in, *parts)]
    process = subprocess.Popen(command, cwd=record.REPOSITORY, env=sanitizer._environment())
    log = tmp_path / "log" / "structures-memcheck.log"
    try:
        until = time.monotonic() + 1800
        while not (log.exists() and log.read_text().strip()) and time.monotonic() < until:
            time.sleep(0.1)
        (child,) = log.read_text().split()
        process.send_signal(number)
        assert process.wait(1800) != 0
    finally:
        process.kill()
        process.wait()
    with pytest.raises(ProcessLookupError):
        os.kill(int(child), 0)
    statuses = {part: cell["status"] for (part, _), cell in stored(tmp_path).items()}
    assert statuses == {"spmm-float32": "ok", "structures": "not finished", "maxk-float32": "not started"}


def test_what_is_missing_or_unknown_is_said(tmp_path: Path, stand_in: str) -> None:
    with pytest.raises(SystemExit, match="no-such-program is not on the PATH"):
        run(arguments(tmp_path, "no-such-program"), Console(quiet=True))
    with pytest.raises(SystemExit, match="no such part: spmm; expected some of spmm-float32"):
        run(arguments(tmp_path, stand_in, "--parts", "spmm"), Console(quiet=True))


def test_drivers_find_this_checkout() -> None:
    assert str(record.REPOSITORY / "kernels") in sanitizer._environment()["PYTHONPATH"].split(os.pathsep)
    assert (sanitizer.DONE, sanitizer.NOT_RUN) == (sanitize.DONE, sanitize.NOT_RUN)
