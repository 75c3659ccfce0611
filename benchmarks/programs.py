"""Complete training programs, loading and validation included, and forms of captured steps.

- programs: whole epochs of the programs in `program_list`. Variants: the framework alone with its best
  settings (worker processes, page-locked memory, `torch.compile` where it works); the layers swapped by one
  import; our loader, too; captured steps, too; the framework's program as it is, under `enable()` of both
  plugins, as `fastsparse run` does it. The first epochs, in which steps are recorded, are not timed. One
  read from the device per epoch gives the loss and the validation metric.
- forms: a step in every form of `step_forms`, plain and captured, with alternating calls. Needs a GPU.

pip's DGL is built without CUDA. On a GPU the baseline of its programs is PyG's program of the same model and
data, and DGL's own runs on the CPU. If pyg-lib is not installed, PyG's layers run with FastSparse's neighbour
loader.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch_geometric import seed_everything

import fastsparse_pyg
from fastsparse_core import capture
from fastsparse_core.capturing import graphs
from fastsparse_core.capturing.captured import CALLS

from . import suite
from .program_list import PROGRAMS, Kit, Sizes
from .runner import Benchmark, Cell, Job, Run, attempt, end_workers, option, release, synchronise
from .step_forms import FORMS, Problem, Step

#: Forms are timed in alternating rounds: their number, calls of a round at most, and its milliseconds.
_ROUNDS, _CALLS, _ROUND_MS = 7, 25, 100.0
#: Epochs before the clock starts: with a loader, and of one step, which is recorded after `CALLS` calls.
_WARM_UP, _WARM_UP_FULL = 3, CALLS + 6
#: Seconds after which epochs of one step are enough.
_BUDGET_S = 2.0
#: Epochs before the clock starts without a GPU, and for DGL on the CPU of a machine with a GPU.
_WARM_UP_CPU = 1
#: The variant without changes.
RUN = "fastsparse run"


def cells(run: Run, case: tuple[str, str]) -> Iterator[Job | Cell]:
    """All cells of one program, or that of one form."""
    part, name = case
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield from _program(run, name) if part == "programs" else _form(run, name)


# ---------------------------------------------------------------- programs


class Variant(NamedTuple):
    """How a program is run.

    Attributes:
        name: as the record has it.
        program: which.
        device: of model and batches.
        options: of :class:`Kit`.
        is_enabled: whether `enable()` of both plugins is called first.
    """

    name: str
    program: str
    device: torch.device
    options: dict[str, bool]
    is_enabled: bool = False


def variants(name: str, device: torch.device, compiles: bool) -> list[Variant]:
    """All variants of a program, the baseline first."""
    program = PROGRAMS[name]
    title = {"pyg": "PyG", "dgl": "DGL"}[program.framework]
    found = [Variant(title, name, device, {})]
    has_own = program.framework == "pyg" or device.type == "cpu"
    if not has_own:
        assert program.equivalent is not None
        found = [
            Variant("PyG", program.equivalent, device, {}),
            Variant("DGL, on the CPU", name, torch.device("cpu"), {}),
        ]
    if program.compiles and compiles:
        found.append(Variant(f"{title}, torch.compile", name, device, {"compiles": True}))
    if has_own:
        found.append(Variant("layers swapped", name, device, {"layers": True}))
    ours = {"layers": True, "loader": True}
    if program.loads:
        found.append(Variant("our loader", name, device, ours))
    found.append(Variant(RUN, name, device, {}, is_enabled=True))
    found.append(Variant("captured", name, device, {**ours, "captures": True}))
    return found


def _program(run: Run, name: str) -> Iterator[Cell]:
    program, options = PROGRAMS[name], run.options
    sizes = Sizes(*(getattr(options, field) for field in Sizes._fields))
    facts = {"part": "programs", "program": name, "framework": program.framework, "metric": program.metric}
    if run.is_late:
        yield {**facts, "implementation": "all", "status": "skipped: --limit-s had passed"}
        return
    waiting = variants(name, run.device, options.compile)
    while waiting:
        variant = waiting.pop(0)
        cell = _attempt(partial(_measure, variant, sizes, options.epochs))
        yield {**facts, "implementation": variant.name, **cell}
        if variant.name == "PyG" and "pyg-lib" in cell["status"]:
            fallback = {"loader": True}
            waiting.insert(0, Variant("PyG's layers, our loader", variant.program, run.device, fallback))


def _attempt(measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Like `attempt`, for errors of any kind, so that the other programs still run."""
    try:
        return attempt(measure)
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        status = f"failed: {type(error).__name__}: {lines[0][:160]}"
    release()
    return {"status": status}


def _measure(variant: Variant, sizes: Sizes, rounds: int) -> dict[str, Any]:
    device, program = variant.device, PROGRAMS[variant.program]
    if variant.options.get("captures") and not graphs.CudaGraphs.supports(device):
        return {"status": "skipped: capture needs a CUDA device"}
    plugins = [importlib.import_module(f"fastsparse_{name}") for name in {"pyg", program.framework}]
    try:
        if variant.is_enabled:
            for plugin in plugins:
                plugin.enable()
        return _timed(variant, Kit(program.framework, sizes, device, **variant.options), rounds)
    finally:
        for plugin in plugins:
            plugin.disable()
        if variant.options.get("compiles"):
            torch.compiler.reset()
        fastsparse_pyg.clear_cache()
        release()


def _timed(variant: Variant, kit: Kit, rounds: int) -> dict[str, Any]:
    program = PROGRAMS[variant.program]
    seed_everything(0)
    epoch = program.make(kit)
    warm_up = _WARM_UP if program.loads else _WARM_UP_FULL
    if not graphs.CudaGraphs.supports(kit.device):
        warm_up = _WARM_UP_CPU
    for _ in range(warm_up):
        epoch().tolist()
    times: list[float] = []
    found: dict[str, Any] = {}
    begin = time.perf_counter()
    for nth in range(rounds if program.loads else 10 * rounds):
        if nth >= rounds and time.perf_counter() - begin > _BUDGET_S:
            break
        synchronise(kit.device)
        start = time.perf_counter()
        loss, score = epoch().tolist()
        times.append((time.perf_counter() - start) * 1e3)
        if nth == rounds - 1:  # after the same number of epochs in all variants
            found = {"loss": loss, "score": score, "epochs": warm_up + rounds}
    found |= {"median_ms": statistics.median(times), "min_ms": min(times), "timed": len(times)}
    if kit.captures:
        reasons = [step.status for step in kit.steps if not step.is_recorded]
        found["capture"] = "; ".join(reasons) or "replaying"
    end_workers()
    return found


# ---------------------------------------------------------------- forms


def _form(run: Run, name: str) -> Iterator[Cell]:
    if not graphs.CudaGraphs.supports(run.device):
        yield {"part": "forms", "form": "all", "status": "skipped: capture needs a CUDA device"}
        return
    graph = suite.load(run.options.graph, run.options.device)
    problem = Problem(run.options.device, graph.num_nodes, 0, 500, run.options.width, graph.edge_index())
    yield {"part": "forms", "form": name, **_attempt(partial(compare, name, problem))}


def compare(name: str, problem: Problem) -> Cell:
    """Times of one form, plain and captured, and the difference of their results."""
    plain, step = FORMS[name](problem), capture(FORMS[name](problem))
    difference = 0.0
    results = []
    for run_ in (plain, step):
        seed_everything(1)
        results.append([_numbers(run_()) for _ in range(CALLS + 6)])
    for one, other in zip(*results, strict=True):
        pairs = zip(one, other, strict=True)
        difference = max([difference, *(abs(x - y) / max(abs(x), 1e-3) for x, y in pairs)])
    times: tuple[list[float], list[float]] = ([], [])
    status: str = step.captured.status
    rounds, calls = effort(_time(plain, 1), status == "replaying")
    for _ in range(rounds):
        for run_, found in zip((plain, step), times, strict=True):
            found.append(_time(run_, calls))
    one_ms, other_ms = (statistics.median(found) for found in times)
    gain = statistics.median(x / y for x, y in zip(*times, strict=True))
    return {
        "capture": status,
        "plain_ms": one_ms,
        "captured_ms": other_ms,
        "gain": gain,
        "difference": difference,
    }


def _numbers(result: Any) -> list[float]:
    return [
        float(item.detach().sum()) if isinstance(item, Tensor) else float(item)
        for item in tree_leaves(result)
    ]


def effort(milliseconds: float, is_replaying: bool) -> tuple[int, int]:
    """Number of rounds, and of calls per round, for a step with this duration.

    A refused step has three times as many rounds, because a few per cent matter, unless it is slow.
    """
    calls = min(max(int(_ROUND_MS / max(milliseconds, 1e-3)), 1), _CALLS)
    return _ROUNDS if is_replaying or calls < _CALLS // 2 else 3 * _ROUNDS, calls


def _time(step: Step, calls: int) -> float:
    """Milliseconds a call, calls back to back."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1000 / calls


def _cases(options: argparse.Namespace) -> list[tuple[str, str]]:
    """(part, name). Without a GPU there is only one form, whose cell says that it needs a GPU."""
    supported = graphs.CudaGraphs.supports(torch.device(options.device))
    forms = options.forms if supported else options.forms[:1]
    names = {"programs": options.programs, "forms": forms}
    return [(part, name) for part, them in names.items() if part in options.parts for name in them]


BENCHMARK = Benchmark(
    "programs",
    cells,
    _cases,
    options={
        "parts": option(["programs"], "what to run", choices=("programs", "forms")),
        "programs": option(None, "programs", choices=PROGRAMS),
        "epochs": option(3, "epochs that are timed; of one step each, ten times as many"),
        "width": option(128, "width of hidden layers"),
        "train_nodes": option(40_960, "seeds of an epoch of sampled neighbours"),
        "seeds": option(1_024, "seeds in a batch"),
        "molecules": option(8_192, "molecules in an epoch"),
        "batch": option(256, "molecules in a batch"),
        "links": option(
            65_536,
            "links in an epoch; LightGCN's users and items shrink with it",
        ),
        "workers": option(8, "processes of the framework's loader"),
        "compile": {
            "action": argparse.BooleanOptionalAction,
            "default": True,
            "help": "time torch.compile too",
        },
        "limit_s": option(330.0, "no program begins after this time"),
        "forms": option(None, "forms of steps", choices=FORMS),
        "graph": option("pubmed", f"of the forms; {suite.NAMES}"),
    },
    notes=(
        "Milliseconds of an epoch: loading, training and validation; medians. loss and score are those after"
        " `epochs` epochs. Baseline: the framework's program with its loader's best settings.",
    ),
)
