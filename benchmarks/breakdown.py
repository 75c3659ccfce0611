"""Where the time of a training step goes: device time by kind of work, and how long the device waits.

The models are those of `benchmarks/train.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from fastsparse_pyg import clear_cache

from . import suite
from .runner import Benchmark, Cell, Job, Run, option, release, synchronise
from .timing import step_time
from .train import DTYPES, MODELS, make_steps, random_task

STEPS = 10

#: kind -> pattern of the names of its kernels (on a CPU: of its operators); the first match counts
KINDS = {
    "aggregation": r"fastsparse|^_\w*(spmm|graphconvolution|aggregatetransform|attention|edgesoftmax)",
    "dense products": r"gemm|gemv|cutlass|nvjet|xmma|splitk|cublas|aten::(addmm|mm|bmm|linear)",
    "optimiser": r"multi_tensor|adam|aten::_foreach",
    "loss": r"softmax|nll_loss",
    "reductions": r"reduce|aten::sum",
    "elementwise and copies": r"elementwise|copy|memcpy|memset|fill|cat|aten::",
}


def cells(run: Run, name: str) -> Iterator[Job]:
    """All cells of one graph."""
    graph = suite.load(name, run.options.device)
    for model, dtype in run.grid("models", "dtypes"):
        cell = {**graph.facts(), "model": model, "dtype": dtype}
        yield cell, partial(_measure, graph, model, dtype, run.device)
        clear_cache()
        release()


def kind_of(name: str) -> str:
    """The kind of work that a kernel or operator does."""
    fits = (kind for kind, pattern in KINDS.items() if re.search(pattern, name, re.IGNORECASE))
    return next(fits, "other")


def _measure(graph: suite.Graph, model: str, dtype: str, device: torch.device) -> Cell:
    build, layers = MODELS[model]
    ours = next(iter(layers.values()))
    x, y = random_task(graph.num_nodes, device)
    make = partial(build, ours.layer, **ours.options)
    _, step, _ = make_steps(make, graph.edge_index(), x, y, dtype)
    timing = step_time(step, device, budget_ms=100, warm_up=ours.warm_up, min_calls=5)
    on_device = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_device else [])]) as trace:
        for _ in range(STEPS):
            step()
        synchronise(device)
    spent = dict.fromkeys((*KINDS, "other"), 0.0)
    for event in trace.key_averages():
        if on_device and event.device_type == DeviceType.CUDA and not event.is_user_annotation:
            spent[kind_of(event.key)] += event.self_device_time_total / 1e3 / STEPS
        elif not on_device:
            spent[kind_of(event.key)] += event.self_cpu_time_total / 1e3 / STEPS
    return {
        **timing.as_cell(),
        "kinds_ms": {kind: round(time, 4) for kind, time in spent.items()},
        "idle_ms": round(max(timing.median_ms - sum(spent.values()), 0.0), 4) if on_device else None,
    }


BENCHMARK = Benchmark(
    "breakdown",
    cells,
    graphs=["pubmed", "ogbn-arxiv", "reddit", "ogbn-products"],
    options={
        "models": option(choices=tuple(MODELS)),
        "dtypes": option(["bf16-amp"], choices=DTYPES),
    },
    notes=(f"means of {STEPS} steps; the device is idle where the host cannot queue fast enough",),
)
