"""tiled() on a graph that several processes divide: the numbers of one process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from team import Team
from torch import nn

from fastsparse_core.distributed import PartitionedAdjacency, all_reduce_gradients, partition

pytest.importorskip("fastsparse_pyg", exc_type=ImportError)

NODES = 90


@pytest.fixture(scope="module", params=["gloo", pytest.param("nccl", marks=pytest.mark.gpu)])
def team(request: pytest.FixtureRequest) -> Iterator[Team]:
    """Two processes, on the CPU or with one GPU each."""
    if request.param == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    members = Team(2, request.param)
    yield members
    members.close()


def _compare(
    rank: int, size: int, device: torch.device, kind: str, loops: bool, offload: bool, piece: int
) -> None:
    import fastsparse_pyg
    from fastsparse_core.distributed import exchange

    exchange.PIECE_BYTES, exchange._PIECE_ROWS = piece, 10

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = getattr(fastsparse_pyg, kind)
            self.convs = nn.ModuleList([layer(6, 40), layer(40, 40), layer(40, 3)])
            self.first = nn.Linear(6, 6)

        def forward(self, x, edges):
            x = self.first(x)
            for conv in self.convs:
                x = conv(x, edges).tanh()
            return x

    torch.manual_seed(0)
    edges = torch.randint(NODES, (2, 500))
    if not loops:
        edges = edges[:, edges[0] != edges[1]]
    x = torch.randn(NODES, 6, dtype=torch.float64)
    model = Model().double()
    expected = model(x.requires_grad_(), edges)
    wanted = torch.arange(0, NODES, 7)
    loss = expected.square().sum() + expected[wanted].sin().sum()
    loss.backward()
    gradients = [each.grad.clone() for each in model.parameters()]
    model.zero_grad()

    model.to(device)
    parts = partition(edges, size, "contiguous", num_nodes=NODES)
    adj = PartitionedAdjacency.from_coo(edges[1].to(device), edges[0].to(device), parts)
    own = parts.nodes(rank)
    mine = x.detach()[own].to(device).requires_grad_()
    net = fastsparse_pyg.tiled(model, tile_rows=16, offload=offload)
    out = net(mine, adj)
    torch.testing.assert_close(out.cpu(), expected[own])
    rows = torch.tensor([nth for nth, node in enumerate(own.tolist()) if node % 7 == 0], device=device)
    rows = rows if rank else torch.cat([rows, rows[:0]])
    some = net(mine, adj, rows=rows)
    torch.testing.assert_close(some.cpu(), expected[own][rows.cpu()])
    (out.square().sum() + some.sin().sum()).backward()
    all_reduce_gradients(model)
    for each, one in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(each.grad.cpu(), one)
    torch.testing.assert_close(mine.grad.cpu(), x.grad[own])
    none = net(mine, adj, rows=rows if rank == 0 else rows[:0])  # a process without training nodes
    none.sum().backward()


@pytest.mark.parametrize("kind", ["FastGCNConv", "FastSAGEConv", "FastGraphConv"])
def test_divided_graph(team, kind):
    few_columns = NODES * 16 * 8  # of all nodes, in float64
    for loops, offload, piece in (
        (False, False, 2**33),
        (True, True, few_columns),
        (False, True, few_columns),
        (True, False, few_columns),
    ):
        team.run(_compare, kind, loops, offload, piece)
