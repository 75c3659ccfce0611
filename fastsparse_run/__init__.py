"""The command ``fastsparse``, which runs unchanged scripts on FastSparse.

A new Python process replaces this one and runs the script, so the script's arguments, ``__main__``,
tracebacks and exit code are those of ``python script.py``. Two environment variables enable FastSparse in the
new process and in every Python process that it starts:

- ``PYTHONPATH`` begins with the folder ``startup``. Python imports its ``sitecustomize`` before the script.
- :data:`~fastsparse_run.watch.VARIABLE` lists packages, and the function to call when each is imported.

Packages register these functions as entry points of the group ``fastsparse.enable``: the entry's name is the
imported package, its object is a function without arguments.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Sequence

from fastsparse_run import watch

GROUP = "fastsparse.enable"
USAGE = """\
usage: fastsparse run [--report[=time]] [--report-json FILE] script.py [arguments]
       fastsparse run [--report[=time]] [--report-json FILE] -m module [arguments]
       fastsparse doctor [--json]
       fastsparse tune [--device DEVICE] [--out FILE]

run     run a Python script; FastSparse replaces the slow parts of PyG, DGL and torch.sparse
        --report            at the end, print which calls FastSparse computed, and why not the others
        --report=time       also measure the time of these calls, and the time spent waiting for batches
        --report-json FILE  write the report to a JSON file
doctor  check the installation; --json prints the result as JSON
tune    measure on this GPU from which sizes on which kernel is faster

FASTSPARSE_DISABLE=scatter,sparse_mm switches parts off: layers, scatter, pool, loaders, sparse_mm, shims, dgl
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line ``fastsparse``.

    ``run``, ``doctor`` and ``tune`` replace this process by a new Python process.

    Args:
        arguments: the command and its options; None: the arguments of this process.

    Returns:
        The exit code, if the process was not replaced: 0 after ``--help``, 2 for wrong arguments.

    Example:
        >>> import fastsparse_run
        >>> fastsparse_run.main(["--help"])  # doctest: +ELLIPSIS
        usage: fastsparse run ...
        0
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    command = given.pop(0) if given else ""
    if command in ("-h", "--help"):
        print(USAGE, end="")
        return 0
    if command in ("doctor", "tune"):
        _become(["-m", f"fastsparse_core.{command}", *given], dict(os.environ))
    if command != "run":
        if command:
            return _refuse(f"expected one of run, doctor, tune, got {command!r}")
        print(USAGE, end="", file=sys.stderr)
        return 2
    return _run(given)


def _run(given: list[str]) -> int:
    environment = dict(os.environ)
    while given and given[0].startswith("--"):
        option, _, value = given.pop(0).partition("=")
        if option == "--help":
            print(USAGE, end="")
            return 0
        if option == "--report-json":
            if not value and not given:
                return _refuse("--report-json: expected a file")
            environment[watch.REPORT_FILE] = os.path.abspath(value or given.pop(0))
        elif option == "--report":
            if value not in ("", "time"):
                return _refuse(f"--report: expected nothing or 'time', got {value!r}")
            environment[watch.REPORT] = value or "1"
        else:
            return _refuse(f"unknown option {option}; options of the script come after its name")
    if (report := environment.get(watch.REPORT, "")) not in ("", "1", "time"):
        return _refuse(f"{watch.REPORT}: expected '1' or 'time', got {report!r}")
    if given and given[0] == "-c":
        return _refuse("-c is not supported; write the code to a file and run the file")
    if not given or given == ["-m"]:
        return _refuse("expected a script, or -m and a module")
    if given[0] != "-m" and given[0].startswith("-"):
        return _refuse(f"unknown option {given[0]}; options of the script come after its name")
    if given[0] != "-m" and not os.path.exists(given[0]):
        return _refuse(f"there is no file {given[0]!r}")
    if sys.flags.ignore_environment or sys.flags.no_site:
        return _refuse("Python's options -E, -I and -S leave FastSparse disabled; run without them")
    entries = importlib.metadata.entry_points(group=GROUP)
    actions = sorted({f"{entry.name}={entry.value}" for entry in entries})
    if not actions:
        return _refuse(
            f"no package registers {GROUP!r}; reinstall FastSparse: "
            "pip install --force-reinstall fastsparse-gnn"
        )
    environment[watch.VARIABLE] = ";".join(actions)
    environment[watch.MAIN_PROCESS] = str(os.getpid())
    paths = [
        os.path.join(os.path.dirname(os.path.abspath(__file__)), "startup"),
        environment.get("PYTHONPATH"),
    ]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    name = given[1] if given[0] == "-m" else os.path.basename(given[0])
    print(f"fastsparse: runs {name} with FastSparse (FASTSPARSE_DISABLE switches parts off)", file=sys.stderr)
    _become(given, environment)
    return 0


def _become(arguments: list[str], environment: dict[str, str]) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    os.execve(sys.executable, [sys.executable, *flags, *arguments], environment)


def _refuse(what: str) -> int:
    print(f"fastsparse: {what}. See fastsparse --help", file=sys.stderr)
    return 2
