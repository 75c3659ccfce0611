"""Tables of features that several processes share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from team import Team
from torch import Tensor

from fastsparse_core.sampling import FeatureTable


@pytest.fixture(scope="module", params=["gloo", pytest.param("nccl", marks=pytest.mark.gpu)])
def team(request: pytest.FixtureRequest) -> Iterator[Team]:
    """Two processes, on the CPU or with one GPU each."""
    if request.param == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    members = Team(2, request.param)
    yield members
    members.close()


@pytest.fixture(scope="module")
def team_of_one_gpu() -> Iterator[Team]:
    """Two processes that share a GPU."""
    members = Team(2)
    yield members
    members.close()


def features(rows: int = 1001, width: int = 24, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(rows, width, generator=generator).to(dtype)


def _rows_are_the_table_s(rank: int, size: int, device: torch.device, use_gpu: bool) -> None:
    device = torch.device("cuda", 0) if use_gpu else device
    for dtype, width, aligned in (
        (torch.float32, 24, False),
        (torch.bfloat16, 128, False),
        (torch.float16, 7, True),
        (torch.uint8, 5, False),
    ):
        table = features(width=width).to(dtype)
        rows = FeatureTable(table, device, aligned=aligned, shared=True)
        # A loader's table of the same tensor reads the same memory.
        others = FeatureTable(table, device, aligned=aligned)
        for kept in (None, torch.arange(3, 900, 7), torch.empty(0, dtype=torch.int64)):
            if kept is not None:
                others.keep(kept)
            for index in (torch.arange(1001), torch.randint(1001, (500 + 99 * rank,)), torch.empty(0).long()):
                for each in (rows, others):
                    assert torch.equal(each[index.to(device)].cpu(), table[index])
    few, zeros = features(rows=1, width=4), torch.zeros(3, dtype=torch.int64)  # fewer than processes
    assert torch.equal(FeatureTable(few, device, shared=True)[zeros.to(device)].cpu(), few[zeros])


def test_rows(team):
    team.run(_rows_are_the_table_s, False)


@pytest.mark.gpu
def test_rows_of_two_processes_on_one_gpu(team_of_one_gpu):
    team_of_one_gpu.run(_rows_are_the_table_s, True)


def _batches_of_pyg(rank: int, size: int, device: torch.device) -> None:
    from torch_geometric.data import Data

    from fastsparse_pyg import NeighborLoader

    table = features()
    data = Data(x=table, edge_index=torch.randint(1001, (2, 9000)))
    FeatureTable(table, torch.device("cuda", 0), shared=True)
    for count in (0, 100):
        loader = NeighborLoader(data, [5, 3], torch.arange(rank, 1001, size), batch_size=64, device="cuda:0")
        loader._keep_rows(count)
        for batch in loader:
            assert torch.equal(batch.x.cpu(), table[batch.n_id.cpu()])


def _batches_of_dgl(rank: int, size: int, device: torch.device) -> None:
    from fastsparse_dgl import DataLoader, NeighborSampler
    from fastsparse_dgl.compat import dgl

    table = features()
    graph = dgl.graph((torch.randint(1001, (9000,)), torch.randint(1001, (9000,))), num_nodes=1001)
    graph.ndata["feat"] = table
    FeatureTable(graph.ndata["feat"], torch.device("cuda", 0), shared=True)
    for cache in ({}, {"node": {"feat": 100}}):
        sampler = NeighborSampler([5, 3], prefetch_node_feats=["feat"])
        options = {"device": "cuda:0", "batch_size": 64, "gpu_cache": cache}
        for inputs, _, blocks in DataLoader(graph, torch.arange(rank, 1001, size), sampler, **options):
            assert torch.equal(blocks[0].srcdata["feat"].cpu(), table[inputs.cpu()])


@pytest.mark.gpu
@pytest.mark.parametrize("plugin", ["pyg", "dgl"])
def test_loaders_read_shared_tables(team_of_one_gpu, plugin):
    if plugin == "dgl":
        pytest.importorskip("dgl.dataloading")  # without DGL, `dgl` may be the folder of its tests
    pytest.importorskip(f"fastsparse_{plugin}", exc_type=ImportError)
    team_of_one_gpu.run(_batches_of_pyg if plugin == "pyg" else _batches_of_dgl)


def _memory(rank: int, size: int, device: torch.device) -> int:
    table = features(rows=200_000, width=64)
    if device.type == "cuda":
        before = torch.cuda.memory_allocated()
        rows = FeatureTable(table, device, shared=True)
        taken = torch.cuda.memory_allocated() - before
        assert taken < 0.51 * table.nbytes
        return rows[torch.arange(3, device=device)].size(0)
    rows = FeatureTable(table, device, shared=True)
    assert rows[torch.arange(3)].size(0) == 3
    dist.barrier()
    mapped = next(line for line in Path("/proc/self/maps").read_text().splitlines() if "fastsparse-" in line)
    assert " rw-s " in mapped  # one file for all processes
    assert mapped.endswith("(deleted)")
    return int(mapped.split()[4])


def test_the_table_is_in_memory_once(team):
    found = team.run(_memory)
    assert len(set(found)) == 1


def _refuses(rank: int, size: int, device: torch.device) -> None:
    table = features()
    rows = FeatureTable(table, device, shared=True)
    table[3] += 1
    with pytest.raises(RuntimeError, match="written to after it was shared"):
        rows[torch.arange(3, device=device)]
    again = FeatureTable(table, device, shared=True)
    assert torch.equal(again[torch.arange(5, device=device)].cpu(), table[:5])
    with pytest.raises(ValueError, match=r"expected the same table in every process, got \(1001, 24\)"):
        FeatureTable(table[rank:], device, shared=True)


def test_what_cannot_be_shared(team):
    team.run(_refuses)


def test_without_processes():
    with pytest.raises(ValueError, match="start the script with torchrun"):
        FeatureTable(features(), torch.device("cpu"), shared=True)
