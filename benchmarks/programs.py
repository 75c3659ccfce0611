"""Complete training programs, loading and validation included, and forms of captured steps.

- programs: whole epochs of the programs in `program_list`. Variants: the framework alone with its best
  settings (worker processes, page-locked memory, `torch.compile` where it works); the layers swapped by one
  import; our loader, too; captured steps, too. The first epochs, in which steps are recorded, are not timed.
  One read from the device per epoch gives the loss and the validation metric.
- forms: a step in every form of `step_forms`, plain and captured, calls of both in turn. Needs a GPU.

pip's DGL knows no CUDA. On a GPU the baseline of its programs is PyG's program of the same model and data,
and DGL's own runs on the CPU. If PyG's neighbour loaders miss pyg-lib, PyG's layers run on our loader.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
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
from .common import add_common, attempt, progress, recorder, release
from .program_list import PROGRAMS, Kit, Sizes
from .step_forms import FORMS, Problem, Step

#: Calls of a form that are timed, in rounds that alternate; three times as many where a few per cent matter.
_ROUNDS, _CALLS = 7, 25
#: Epochs before the clock starts: with a loader, and of one step, which is recorded after `CALLS` calls.
_WARM_UP, _WARM_UP_FULL = 3, CALLS + 6
#: Seconds after which epochs of one step are enough.
_BUDGET_S = 2.0
#: Where there is no GPU, and for DGL on the CPU beside one.
_WARM_UP_CPU = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common(parser)
    add = parser.add_argument
    add("--parts", nargs="+", choices=("programs", "forms"), default=["programs"], help="what to run")
    add("--programs", nargs="+", choices=PROGRAMS, default=list(PROGRAMS), help="programs")
    add("--epochs", type=int, default=3, help="epochs that are timed; of one step each, ten times as many")
    add("--width", type=int, default=128, help="width of hidden layers")
    add("--train-nodes", type=int, default=40_960, help="seeds of an epoch of sampled neighbours")
    add("--seeds", type=int, default=1_024, help="seeds in a batch")
    add("--molecules", type=int, default=8_192, help="molecules in an epoch")
    add("--batch", type=int, default=256, help="molecules in a batch")
    add(
        "--links",
        type=int,
        default=65_536,
        help="links in an epoch; purchases of LightGCN are about three times",
    )
    add("--workers", type=int, default=8, help="processes of the framework's loader")
    add("--compile", action=argparse.BooleanOptionalAction, default=True, help="time torch.compile too")
    add("--limit-s", type=float, default=330.0, help="no program begins after this time")
    add("--forms", nargs="+", choices=FORMS, default=list(FORMS), help="forms of steps")
    add("--graph", default="pubmed", help=f"of the forms; {suite.NAMES}")


def run(options: argparse.Namespace) -> Path:
    """Runs the benchmark; returns the path of its record."""
    out = recorder("programs", options)
    out.note(
        "Milliseconds of an epoch: loading, training and validation; medians. loss and score are those after"
        " `epochs` epochs. Baseline: the framework's program with its loader's best settings."
    )
    out.write()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if "programs" in options.parts:
            _run_programs(options, out)
        if "forms" in options.parts:
            _run_forms(options, out)
    return out.path


# ---------------------------------------------------------------- programs


class Variant(NamedTuple):
    """How a program is run.

    Attributes:
        name: as the record has it.
        program: which.
        device: of model and batches.
        options: of :class:`Kit`.
    """

    name: str
    program: str
    device: torch.device
    options: dict[str, bool]


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
    found.append(Variant("captured", name, device, {**ours, "captures": True}))
    return found


def _run_programs(options: argparse.Namespace, out: Any) -> None:
    device = torch.device(options.device)
    sizes = Sizes(
        options.width,
        options.train_nodes,
        options.seeds,
        options.molecules,
        options.batch,
        options.links,
        options.workers,
    )
    end = time.monotonic() + options.limit_s
    for name in progress(options.programs, "programs"):
        program = PROGRAMS[name]
        common = {
            "part": "programs",
            "program": name,
            "framework": program.framework,
            "metric": program.metric,
        }
        if time.monotonic() > end:
            out.add(**common, implementation="all", status="skipped: --limit-s had passed")
            continue
        waiting = variants(name, device, options.compile)
        while waiting:
            variant = waiting.pop(0)
            cell = _attempt(functools.partial(_measure, variant, sizes, options.epochs))
            out.add(**common, implementation=variant.name, **cell)
            if variant.name == "PyG" and "pyg-lib" in cell["status"]:
                fallback = {"loader": True}
                waiting.insert(0, Variant("PyG's layers, our loader", variant.program, device, fallback))


def _attempt(measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """As `attempt`, for errors of any kind: the other programs still run."""
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
    try:
        return _timed(variant, Kit(program.framework, sizes, device, **variant.options), rounds)
    finally:
        if program.framework == "dgl":
            importlib.import_module("fastsparse_dgl").disable()
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
        if kit.device.type == "cuda":
            torch.cuda.synchronize(kit.device)
        start = time.perf_counter()
        loss, score = epoch().tolist()
        times.append((time.perf_counter() - start) * 1e3)
        if nth == rounds - 1:  # after the same number of epochs in all variants
            found = {"loss": loss, "score": score, "epochs": warm_up + rounds}
    found |= {"median_ms": statistics.median(times), "min_ms": min(times), "timed": len(times)}
    if kit.captures:
        reasons = [step.status for step in kit.steps if not step.is_recorded]
        found["capture"] = "; ".join(reasons) or "replaying"
    return found


# ---------------------------------------------------------------- forms


def _run_forms(options: argparse.Namespace, out: Any) -> None:
    if not graphs.CudaGraphs.supports(torch.device(options.device)):
        out.add(part="forms", form="all", status="skipped: capture needs a CUDA device")
        return
    graph = suite.load(options.graph, options.device)
    edge_index, nodes = graph.edge_index().long(), graph.rowptr.numel() - 1
    for name in progress(options.forms, "forms"):
        problem = Problem(options.device, nodes, 0, 500, options.width, edge_index)
        out.add(part="forms", form=name, **_attempt(functools.partial(compare, name, problem)))


def compare(name: str, problem: Problem) -> dict[str, Any]:
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
    status: str = step.captured.status  # type: ignore[attr-defined]
    for _ in range(_ROUNDS if status == "replaying" else 3 * _ROUNDS):
        for run_, found in zip((plain, step), times, strict=True):
            found.append(_time(run_))
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


def _time(step: Step) -> float:
    """Milliseconds a call, calls back to back."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(_CALLS):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1000 / _CALLS
