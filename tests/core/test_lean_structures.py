"""Memory while large structures are built: sorts in pieces, no second structure, nothing unneeded."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from live_bytes import LiveBytes
from team import Team
from torch import Tensor

from fastsparse_core import Adjacency, spmm
from fastsparse_core.distributed import Partition, PartitionedAdjacency, local_rows, partitioned_adjacency
from fastsparse_core.formats import compress
from fastsparse_core.structure import adjacency, block_formats


def random_edges(num_rows: int, num_cols: int, count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    row = torch.randint(num_rows, (count,), generator=generator)
    # A third of the edges are in one row, which is longer than a piece.
    row[: count // 3] = num_rows // 2
    return row, torch.randint(num_cols, (count,), generator=generator)


def symmetric_edges(count: int = 300, nodes: int = 40) -> tuple[Tensor, Tensor]:
    row, col = random_edges(nodes, nodes, count)
    return torch.cat([row, col]), torch.cat([col, row])


@pytest.fixture
def in_pieces(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Makes every sort one in pieces of some entries."""

    def cut(entries: int) -> None:
        monkeypatch.setattr(compress, "_PIECE_ENTRIES", entries)
        monkeypatch.setattr(compress, "_MOST_SCRATCH", -1)

    return cut


@pytest.mark.parametrize("entries", [1, 7, 64, 10_000])
@pytest.mark.parametrize("shape", [(10, 7, 90), (50, 50, 400), (1, 4, 30), (5, 3, 0)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_sorts_in_pieces_give_the_same(device, in_pieces, shape, entries, dtype) -> None:
    num_rows, num_cols, count = shape
    row, col = (ends.to(device, dtype) for ends in random_edges(num_rows, num_cols, count))

    def results() -> list[Tensor]:
        pointers, columns, order = compress.compress(row, col, num_rows, num_cols)
        of_transpose = compress.transpose(pointers, columns, num_cols)
        pairs = compress.transpose_pairs(pointers, columns, num_cols)
        return [pointers, columns, order, *of_transpose, *pairs]

    expected = results()
    in_pieces(entries)
    for found, wanted in zip(results(), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_sorts_in_pieces_take_little_memory(in_pieces) -> None:
    """The memory in addition to the result depends on the piece, not on the number of edges."""
    extra, nodes = [], 1_000
    for count in (20_000, 80_000):
        row = torch.arange(nodes).repeat_interleave(count // nodes)
        col = torch.randint(nodes, (count,), generator=torch.Generator().manual_seed(0))
        pointers, columns = compress.compress_pairs(row, col, nodes, nodes)
        in_pieces(2_000)
        with LiveBytes() as memory:
            result = compress.transpose_pairs(pointers, columns, nodes)
        extra.append(memory.peak - sum(tensor.nbytes for tensor in result))
    assert extra[1] < 1.2 * extra[0]
    assert extra[1] < 4 * 80_000  # less than the columns of the whole structure


def test_a_large_structure_keeps_what_it_was_given(monkeypatch) -> None:
    row, col = symmetric_edges()
    pointers, columns = compress.compress_pairs(row, col, 40, 40)
    monkeypatch.setattr(adjacency, "_MANY_ENTRIES", 0)
    adj = Adjacency.from_csr(pointers, columns, (40, 40), copy=False)
    assert adj.col.data_ptr() == columns.data_ptr()
    assert adj.memory_usage() == {"rowptr": pointers.nbytes, "col": columns.nbytes}
    x = torch.randn(40, 4)
    expected = Adjacency.from_csr(pointers, columns, (40, 40))
    torch.testing.assert_close(spmm(adj, x, reduce="mean"), spmm(expected, x, reduce="mean"))


@pytest.fixture
def no_sort(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError("a symmetric structure is transposed")

    monkeypatch.setattr(adjacency, "_FEW_ENTRIES", 0)
    monkeypatch.setattr(adjacency, "transpose", refuse)
    monkeypatch.setattr(adjacency, "transpose_pairs", refuse)


@pytest.mark.parametrize("entries", [1, 50, 10_000])
def test_a_symmetric_structure_is_recognised_without_its_transpose(
    device, monkeypatch, no_sort, entries
) -> None:
    monkeypatch.setattr(compress, "_PIECE_ENTRIES", entries)
    row, col = (ends.to(device) for ends in symmetric_edges())
    pointers, columns = compress.compress_pairs(row, col, 40, 40)
    adj = Adjacency.from_csr(pointers, columns, (40, 40))
    transposed = adj.t(valued=False)
    assert transposed.col is adj.col
    assert transposed.rowptr is adj.rowptr
    value = torch.randn(adj.num_edges, device=device, dtype=torch.float64)
    x = torch.randn(40, 3, device=device, dtype=torch.float64)
    dense = torch.zeros(40, 40, device=device, dtype=torch.float64)
    dense.index_put_((adj.row().long(), columns.long()), value, accumulate=True)
    torch.testing.assert_close(spmm(adj.t(), x, value), dense.T @ x)


def test_other_structures_are_not_taken_for_symmetric(monkeypatch) -> None:
    monkeypatch.setattr(adjacency, "_FEW_ENTRIES", 0)
    row, col = symmetric_edges()
    pointers, columns = compress.compress_pairs(row, col, 40, 40)
    changed = columns.clone()
    changed[-1] = (changed[-1] + 1) % 40
    unsorted = columns.clone()
    unsorted[pointers[20] : pointers[21]] = unsorted[pointers[20] : pointers[21]].flip(0)
    for other in (changed, unsorted):
        adj = Adjacency.from_csr(pointers, other, (40, 40))
        assert not adj.is_symmetric
        dense = torch.zeros(40, 40).index_put_(
            (adj.row().long(), other.long()), torch.ones(()), accumulate=True
        )
        x = torch.randn(40, 3)
        torch.testing.assert_close(spmm(adj.t(), x), dense.T @ x)


def test_conversion_to_blocks_needs_memory(monkeypatch, reasons) -> None:
    row, col = symmetric_edges()
    monkeypatch.setattr(block_formats, "_FEW_BYTES", 0)
    monkeypatch.setattr(block_formats, "_free_bytes", lambda device: 2.0 * 600 * 48 - 1)
    adj = Adjacency.from_coo(row, col, (40, 40))
    assert not adj.try_bsb()
    assert not adj.can_convert
    assert "most of the free memory" in reasons.text
    monkeypatch.setattr(block_formats, "_free_bytes", lambda device: 2.0 * 600 * 48)
    assert Adjacency.from_coo(row, col, (40, 40)).try_bsb()


def _lean_parts(rank: int, size: int, device: torch.device) -> list[float]:
    """Peak memory of each constructor, relative to the memory of its result."""
    compress._PIECE_ENTRIES = local_rows.PIECE_ENTRIES = partitioned_adjacency.PIECE_ENTRIES = 4_000
    nodes, count = 100, 400_000
    row = torch.arange(nodes).repeat_interleave(count // nodes).to(torch.int32)
    col = torch.randint(nodes, (count,), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    rowptr = torch.arange(0, count + 1, count // nodes)
    owners = torch.arange(nodes) % 7 % size
    shares = []
    for partition in (Partition((0, 30, 100)), Partition.from_assignment(owners, size)):
        order = torch.arange(nodes) if partition.order is None else partition.order
        entries = torch.cat([torch.arange(rowptr[i], rowptr[i + 1]) for i in order.tolist()])
        edges = row[entries], col[entries]
        for kind in ("csr", "coo"):
            with LiveBytes() as memory:
                if kind == "csr":
                    adj = PartitionedAdjacency.from_csr(rowptr, col, partition)
                else:
                    adj = PartitionedAdjacency.from_coo(*edges, partition)
            shares.append(memory.peak / sum(adj.memory_usage().values()))
    return shares


def test_parts_of_a_graph_are_built_within_their_memory() -> None:
    team = Team(2)
    try:
        for shares in team.run(_lean_parts):
            assert max(shares) <= 1.3, shares
    finally:
        team.close()


@pytest.mark.gpu
def test_lean_structures_on_a_gpu(monkeypatch) -> None:
    """Wrapping compressed rows takes nothing that stays, and transposing takes one piece in addition to the
    result."""
    count, nodes = 2**24, 2**16
    rowptr = torch.arange(0, count + 1, count // nodes, device="cuda")
    col = torch.randint(nodes, (count,), device="cuda", dtype=torch.int32)
    monkeypatch.setattr(adjacency, "_MANY_ENTRIES", 0)
    monkeypatch.setattr(compress, "_PIECE_ENTRIES", 2**20)
    before = torch.cuda.memory_allocated()
    adj = Adjacency.from_csr(rowptr, col, (nodes, nodes), copy=False)
    assert torch.cuda.memory_allocated() - before < 2**12
    expected = compress.transpose_pairs(rowptr, col, nodes)
    monkeypatch.setattr(compress, "_MOST_SCRATCH", 2**20)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = adj.t(valued=False)
    assert torch.cuda.max_memory_allocated() - before < 1.5 * sum(part.nbytes for part in expected)
    assert torch.equal(found.rowptr, expected[0])
    assert torch.equal(found.col, expected[1])
