"""Tensors without their memory, and pickles that were changed: an error, never a read beyond what is there.

What is tried runs in a process of its own, so that a crash is a failed test and not the end of all tests.
"""

from __future__ import annotations

import faulthandler
import functools
import io
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fastsparse_core import (
    CBSR,
    Adjacency,
    additive_attention,
    attention,
    edge_softmax,
    gated_aggregate,
    gather_csr,
    gatv2_attention,
    gine_aggregate,
    maxk,
    multi_aggregate,
    scatter,
    scatter_softmax,
    sddmm,
    segment_reduce,
    segment_softmax,
    spmm,
    ssd,
)
from fastsparse_core.distributed import Partition, PartitionedAdjacency
from fastsparse_core.sampling import FeatureTable, NeighborSampler
from fastsparse_core.structure.segments import Segments

NODES, EDGES = 60, 240
#: Errors of FastSparse's check, and of PyTorch if PyTorch reads first.
NO_MEMORY = ("has no memory: its storage was resized to 0 bytes", "out of bounds for storage of size 0")


def graph(device: str, **options: Any) -> Adjacency:
    generator = torch.Generator().manual_seed(0)
    ends = torch.randint(0, NODES, (2, EDGES), generator=generator).to(device)
    return Adjacency.from_coo(*ends, (NODES, NODES), **options)


# ---------------------------------------------------------------- storages that were resized to nothing


def without_memory(*shape: int, device: str, first: int) -> Tensor:
    """A tensor whose storage was freed, in which it began at element `first`."""
    base = torch.ones(first + torch.Size(shape).numel(), device=device)
    base.untyped_storage().resize_(0)
    return base[first:].view(shape)


def calls_without_memory(device: str) -> dict[str, Callable[[Callable[..., Tensor]], object]]:
    """Calls by the name of the operand without memory; a call gets a function that makes such tensors."""
    adj = graph(device)
    index = torch.arange(NODES, device=device).flip(0) // 2
    rowptr = torch.tensor([0, 20, NODES], device=device)

    def x(*shape: int) -> Tensor:
        return torch.ones(*shape, device=device)

    rows, heads = (NODES, 16), (NODES, 2, 8)
    kept = maxk(x(*rows), 4)
    sampler = NeighborSampler(graph("cpu"), [2, 2])
    return {
        "spmm, x": lambda bad: spmm(adj, bad(*rows)),
        "spmm, value": lambda bad: spmm(adj, x(*rows), bad(EDGES)),
        "spmm, x of max": lambda bad: spmm(adj, bad(*rows), reduce="max"),
        "sddmm, x_dst": lambda bad: sddmm(adj, bad(*rows), x(*rows)),
        "sddmm, x_src": lambda bad: sddmm(adj, x(*rows), bad(*rows)),
        "edge_softmax, score": lambda bad: edge_softmax(adj, bad(EDGES, 2)),
        "attention, q": lambda bad: attention(adj, bad(*heads), x(*heads), x(*heads)),
        "attention, k": lambda bad: attention(adj, x(*heads), bad(*heads), x(*heads)),
        "attention, v": lambda bad: attention(adj, x(*heads), x(*heads), bad(*heads), algorithm="csr"),
        "attention, bias": lambda bad: attention(adj, *[x(*heads)] * 3, None, bad(EDGES, 2)),
        "attention, edge_attr": lambda bad: attention(
            adj, *[x(*heads)] * 3, edge_attr=bad(EDGES, 4), edge_weight=x(16, 4)
        ),
        "additive_attention, v": lambda bad: additive_attention(adj, x(NODES, 2), x(NODES, 2), bad(*heads)),
        "gatv2_attention, x_src": lambda bad: gatv2_attention(adj, x(*heads), bad(*heads), x(2, 8)),
        "gatv2_attention, att": lambda bad: gatv2_attention(adj, x(*heads), x(*heads), bad(2, 8)),
        "gine_aggregate, x": lambda bad: gine_aggregate(adj, bad(*rows), x(EDGES, 16)),
        "gine_aggregate, edge_attr": lambda bad: gine_aggregate(adj, x(*rows), bad(EDGES, 16)),
        "gated_aggregate, q": lambda bad: gated_aggregate(adj, x(*rows), bad(*rows), x(*rows)),
        "multi_aggregate, x": lambda bad: multi_aggregate(adj, bad(*rows), ["mean", "max"]),
        "maxk, x": lambda bad: maxk(bad(*rows), 4),
        "ssd, values": lambda bad: ssd(adj, CBSR(bad(NODES, 4), kept.ids, 16)),
        "scatter, src": lambda bad: scatter(bad(*rows), index, NODES),
        "scatter, src of max": lambda bad: scatter(bad(*rows), index, NODES, "max"),
        "scatter, index": lambda bad: scatter(x(*rows), bad(2 * NODES).view(torch.int64), NODES),
        "scatter_softmax, src": lambda bad: scatter_softmax(bad(*rows), index),
        "segment_reduce, src": lambda bad: segment_reduce(bad(*rows), rowptr),
        "segment_softmax, src": lambda bad: segment_softmax(bad(*rows), rowptr),
        "gather_csr, src": lambda bad: gather_csr(bad(2, 16), rowptr),
        "FeatureTable, table": lambda bad: FeatureTable(bad(*rows), index.device)[index],
        "NeighborSampler, seeds": lambda bad: sampler.sample(bad(8).cpu().view(torch.int64)),
        "from_coo, row": lambda bad: Adjacency.from_coo(
            bad(2 * NODES).view(torch.int64), index, (NODES, NODES)
        ),
    }


def freed(device: str) -> Iterator[tuple[str, str]]:
    for first in (0, 1000):  # an address of 0, and one of 4,000
        make = functools.partial(without_memory, device=device, first=first)
        for name, call in calls_without_memory(device).items():
            yield f"{name}, from element {first}", error_of(call, make)


# ---------------------------------------------------------------- pickles

#: Parts of the state that no kernel uses as an address; for a partition, its method.
UNREAD = ("_num_given", "_merge", "_loop_edge", ("partition", 2))


def structures(device: str) -> dict[str, tuple[Any, Callable[[Any], object]]]:
    """Structures by name, each with a function that uses it."""
    rows = torch.ones(NODES, 8, device=device)

    def products(adj: Adjacency) -> list[Tensor]:
        value = torch.ones(adj.num_values, device=adj.device)
        return [spmm(adj, rows, value), spmm(adj.t(), rows, value), sddmm(adj, rows, rows)]

    index = torch.arange(NODES, device=device) % 7
    assignment = Partition.from_assignment(index.cpu(), 7)
    kept = maxk(torch.randn(NODES, 16, device=device), 4)
    generator = torch.Generator().manual_seed(0)
    rowptr = torch.tensor([0, 20, 20, NODES], device=device)
    return {
        "edges": (graph(device), products),
        "loops": (graph(device, self_loops="replace"), products),
        "merged": (graph(device, duplicates="sum"), products),
        "rows": (
            Adjacency.from_csr(rowptr, torch.randint(0, 5, (NODES,), generator=generator).to(device), (3, 5)),
            lambda adj: spmm(adj, rows[:5]),
        ),
        "segments": (Segments.from_index(index, 7), lambda it: _reduced(it, rows)),
        "consecutive segments": (Segments.from_rowptr(rowptr, NODES), lambda it: _reduced(it, rows)),
        "partition": (assignment, lambda it: [it.scatter(rows.cpu(), rank) for rank in range(it.num_parts)]),
        "cbsr": (kept, CBSR.to_dense),
    }


def _reduced(segments: Segments, rows: Tensor) -> Tensor:
    from fastsparse_core.ops._segment_launch import sum_rows

    return sum_rows(rows, segments, "sum")


def same(one: Any, other: Any) -> bool:
    if isinstance(one, (list, tuple)):
        return all(map(same, one, other))
    return torch.equal(one, other)


def restored(device: str) -> Iterator[tuple[str, str]]:
    """Intact pickles of new and of used structures give the same results."""
    for name, (made, use) in structures(device).items():
        for again in (pickle.loads(pickle.dumps(made)), (use(made), pickle.loads(pickle.dumps(made)))[1]):
            yield name, "same" if same(use(made), use(again)) else "another result"


class _Changed(pickle.Pickler):
    """Pickles one object with another state."""

    def __init__(self, to: Any, of: Any, state: Any) -> None:
        super().__init__(to)
        self._of, self._state = of, state

    def reducer_override(self, item: Any) -> Any:
        if item is not self._of:
            return NotImplemented
        how, arguments, *rest = item.__reduce_ex__(2)
        if rest and rest[0] is not None:
            return how, arguments, self._state
        return how, tuple(self._state.values())


def parts_of(made: Any) -> dict[str, Any]:
    _, arguments, *rest = made.__reduce_ex__(2)
    return dict(rest[0] if rest and rest[0] is not None else enumerate(arguments))


def changes(part: Any) -> Iterator[tuple[str, Any]]:
    """Damaged versions of one part of a structure, by name."""
    if isinstance(part, Tensor):
        for at in (0, part.numel() // 2, -1) if part.numel() else ():
            for number in (-1, -(2**30), 200 if part.dtype == torch.uint8 else 2**30):
                if part.is_floating_point() or (number < 0 and not part.dtype.is_signed):
                    continue
                changed = part.clone()
                changed.view(-1)[at] = number
                if not torch.equal(changed, part):
                    yield f"{number} at {at}", changed
        yield "its first half", part[: len(part) // 2].clone()
        yield "nothing", part[:0].clone()
        yield "twice", torch.cat([part, part])
        if not part.is_floating_point():
            yield "float64", part.double()
        yield "two dimensions", part.view(-1, 1, 1)
    if isinstance(part, int):
        yield from (("less", part - 1), ("negative", -5), ("a string", "5"))
    if isinstance(part, tuple) and part and isinstance(part[0], int):
        yield from (
            ("less", (part[0] - 1, *part[1:])),
            ("shorter", part[:-1]),
            ("negative", (-1,) * len(part)),
        )
        yield "smaller", tuple(size // 2 for size in part)
    yield "a string", "no"


def tampered(device: str) -> Iterator[tuple[str, str]]:
    for name, (made, use) in structures(device).items():
        parts = parts_of(made)
        for key, part in parts.items():
            if key in UNREAD or (name, key) in UNREAD:
                continue
            for what, changed in changes(part):
                yield f"{name}, {key}: {what}", error_of(use_pickled, made, {**parts, key: changed}, use)
            if isinstance(key, str):  # only named parts: other positions would move
                without = {other: item for other, item in parts.items() if other != key}
                yield f"{name} without {key}", error_of(use_pickled, made, without, use)


def use_pickled(made: Any, parts: dict[Any, Any], use: Callable[[Any], object]) -> None:
    file = io.BytesIO()
    _Changed(file, made, parts).dump(made)
    use(pickle.loads(file.getvalue()))


def truncated(device: str) -> Iterator[tuple[str, str]]:
    for name, (made, _) in structures(device).items():
        whole = pickle.dumps(made)
        for length in range(0, len(whole), max(len(whole) // 40, 1)):
            yield f"{name}, {length} bytes", error_of(pickle.loads, whole[:length])


# ---------------------------------------------------------------- the process


def error_of(call: Callable[..., object], *arguments: Any) -> str:
    try:
        call(*arguments)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def found(kind: str, device: str) -> list[tuple[str, str]]:
    """Names and outcomes of what a process of its own has tried."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, __file__, kind, device], env=environment, capture_output=True, text=True
    )
    assert ran.returncode == 0, f"crashed after {ran.stdout.splitlines()[-1:]}: {ran.stderr}"
    outcomes = [tuple(json.loads(line)) for line in ran.stdout.splitlines()]
    assert outcomes
    return outcomes


def test_tensors_without_memory_are_errors(device):
    for name, outcome in found("freed", device):
        assert any(message in outcome for message in NO_MEMORY), f"{name}: {outcome}"


def test_empty_tensors_need_no_memory(device):
    empty = torch.ones(4, device=device)
    empty.untyped_storage().resize_(0)
    adj = Adjacency.from_coo(*torch.zeros(2, 0, dtype=torch.int64, device=device), (3, 0))
    assert spmm(adj, empty[:0].view(0, 4)).shape == (3, 4)
    assert scatter(empty[:0].view(0, 4), torch.arange(0, device=device), 2).tolist() == [[0] * 4] * 2


def test_pickled_structures_work_as_before(device):
    assert {outcome for _, outcome in found("restored", device)} == {"same"}


def test_changed_pickles_are_errors(device):
    for name, outcome in found("tampered", device):
        assert outcome.startswith(("ValueError", "TypeError")), f"{name}: {outcome}"


def test_truncated_pickles_are_errors(device):
    for name, outcome in found("truncated", device):
        assert outcome.startswith(("EOFError", "UnpicklingError")), f"{name}: {outcome}"


def test_a_partition_says_what_is_wrong_with_its_parts():
    with pytest.raises(ValueError, match="starts: expected positions that ascend from 0"):
        Partition((0, 3, 2))
    with pytest.raises(ValueError, match="order: expected every node from 0 to 2 once"):
        Partition((0, 3), torch.tensor([0, 2, 2]))
    with pytest.raises(ValueError, match=r"order: expected shape \(3,\)"):
        Partition((0, 3), torch.arange(2))


def test_a_damaged_adjacency_says_what_to_do():
    adj = graph("cpu")
    with pytest.raises(ValueError, match="got a damaged one .*col: expected indices from 0 to num_src"):
        adj.__setstate__({**adj.__getstate__(), "col": adj.col + 100})
    with pytest.raises(NotImplementedError, match="does not support pickling"):
        PartitionedAdjacency.__new__(PartitionedAdjacency).__setstate__(adj.__getstate__())


if __name__ == "__main__":
    faulthandler.enable()
    KIND, DEVICE = sys.argv[1:]
    for outcome in globals()[KIND](DEVICE):
        print(json.dumps(outcome), flush=True)
