"""Dot-product attention from CSR: against float64 references, and when it is taken."""

from __future__ import annotations

import pytest
import torch
from cases import DTYPES, TOLERANCE, EdgeList, LargestTensor, features, ragged, relative_error
from torch import Tensor

from fastsparse_core import Adjacency, algorithms, attention, policy, reference
from fastsparse_core.policy import Choice, Facts

CSR, BLOCKS = Choice("csr", is_final=False, counts=True), Choice("fused3s")


def operands(
    adj: Adjacency,
    heads: int,
    width: int,
    dtype: torch.dtype,
    layout: str = "contiguous",
    biased: bool = True,
) -> list[Tensor]:
    """Queries, keys, values and bias that want gradients."""
    device = str(adj.device)
    rows = (adj.num_dst, adj.num_src, adj.num_src)
    tensors = [features(n, heads * width, dtype, layout, device, seed) for seed, n in enumerate(rows)]
    tensors = [tensor.unflatten(1, (heads, width)) for tensor in tensors]
    if biased:
        tensors.append(features(adj.num_values, heads, dtype, "contiguous", device, 4))
    return [tensor.detach().requires_grad_() for tensor in tensors]


def compare(adj: Adjacency, tensors: list[Tensor], dropout_p: float = 0.0) -> None:
    """Result and gradients of the kernels against the reference in float64."""
    dtype = tensors[0].dtype
    doubled = [tensor.detach().double().requires_grad_() for tensor in tensors]
    torch.manual_seed(0)
    seed = int(torch.randint(2**63 - 1, ()))
    torch.manual_seed(0)
    out = attention(adj, *tensors[:3], None, *tensors[3:], dropout_p=dropout_p, algorithm="csr")
    expected = reference.attention(adj, *doubled[:3], None, *doubled[3:], dropout_p=dropout_p, seed=seed)
    assert out.dtype == dtype
    assert relative_error(out, expected) < 2 * TOLERANCE[dtype]
    grad = features(*out.flatten(1).shape, dtype, "contiguous", str(out.device), 9).view(out.shape)
    found = torch.autograd.grad(out, tensors, grad)
    wanted = torch.autograd.grad(expected, doubled, grad.double())
    for actual, right in zip(found, wanted, strict=True):
        assert actual.dtype == dtype
        assert relative_error(actual, right) < 8 * TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("heads", "width"), [(1, 64), (4, 32), (16, 16), (3, 20), (5, 7), (2, 130), (1, 256)]
)
def test_equals_reference(device, poisoned_memory, dtype, heads, width):
    if device == "cuda" and dtype == torch.float64:
        pytest.skip("no kernel takes float64 on CUDA")
    adj = ragged(4000, device)  # rows of no, few and 600 entries, values in another order
    compare(adj, operands(adj, heads, width, dtype), dropout_p=0.3 if heads == 4 else 0.0)


@pytest.mark.parametrize("layout", ["row_stride", "misaligned", "transposed"])
def test_reads_any_layout(device, layout):
    adj = ragged(600, device)
    compare(adj, operands(adj, 2, 16, torch.float32, layout, biased=False))


@pytest.mark.parametrize(
    ("row", "col", "shape"),
    [([], [], (0, 0)), ([], [], (3, 2)), ([0, 0, 2], [1, 0, 1], (3, 2)), ([1, 1], [0, 2], (10, 3))],
)
def test_structures_without_rows_or_edges(device, poisoned_memory, row, col, shape):
    ends = (torch.tensor(x, dtype=torch.int64) for x in (row, col))
    adj = EdgeList(*ends, shape).adjacency(device)
    tensors = operands(adj, 2, 8, torch.float32)
    compare(adj, tensors)
    out = attention(adj, *tensors[:3], algorithm="csr")
    assert (out[adj.in_degree() == 0] == 0).all()


def test_values_of_dropped_edges_get_no_gradient(device, poisoned_memory):
    ends = torch.tensor([[0, 1, 1, 2], [0, 0, 1, 1]], device=device)
    adj = Adjacency.from_coo(*ends, (3, 3), self_loops="replace")
    assert adj.num_values > adj.num_edges
    compare(adj, operands(adj, 2, 8, torch.float32))


def test_same_bits_every_time_and_nothing_of_edges_times_width(device):
    adj = ragged(4000, device)
    tensors = operands(adj, 4, 32, torch.float32, biased=False)
    adj.t()
    results = []
    for _ in range(3):
        counted = LargestTensor()
        with counted:  # records allocations of the kernels, which run below the dispatcher
            out = attention(adj, *tensors, algorithm="csr")
            results.append([out, *torch.autograd.grad(out.square().sum(), tensors)])
        assert counted.numel < adj.num_edges * 4 * 32
    for others in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], others, strict=True))


def test_one_neighbour_gives_its_value_whatever_the_score(device):
    adj = Adjacency.from_coo(torch.arange(50), torch.arange(50).flip(0), (50, 50)).to(device)
    q, k, v = (x.detach() for x in operands(adj, 2, 16, torch.float32, biased=False))
    assert torch.equal(attention(adj, 1e4 * q, k, v, algorithm="csr"), v.flip(0))


def test_other_scores_and_edge_features_take_the_name(device):
    """They have one fused kernel, which reads CSR too."""
    adj = ragged(600, device)
    q, k, v = (x.detach() for x in operands(adj, 2, 8, torch.float32, biased=False))
    edges = {
        "edge_attr": torch.ones(adj.num_values, 2, device=device),
        "edge_weight": torch.ones(16, 2).to(device),
    }
    with algorithms(attention="csr"):
        named = attention(adj, q, k, v, **edges)
    assert torch.equal(named, attention(adj, q, k, v, **edges))


@pytest.mark.gpu
def test_a_structure_is_converted_once_it_is_used_often():
    adj = ragged(4000, "cuda")
    tensors = operands(adj, 4, 16, torch.float32)
    with torch.no_grad():
        seen = []
        for _ in range(policy.REUSE + 2):
            attention(adj, *tensors[:3])
            seen.append(adj.has_bsb)
    assert seen == [False] * policy.REUSE + [True] * 2
    attention(adj, *tensors[:3]).sum().backward()
    assert adj.t().has_bsb


@pytest.mark.gpu
def test_heads_of_any_width_are_fused():
    adj = ragged(4000, "cuda")
    tensors = operands(adj, 3, 5, torch.float16, biased=False)
    counted = LargestTensor()
    with counted:
        out = attention(adj, *tensors)
        torch.autograd.grad(out.sum(), tensors)
    assert counted.numel < adj.num_edges * 3 * 5
    expected = reference.attention(adj, *(x.detach().double() for x in tensors))
    assert relative_error(out, expected) < TOLERANCE[torch.float16]


# ---------------------------------------------------------------- the rule


def of(facts: Facts, algorithm: str = "auto", no_blocks: str = "", no_csr: str = "") -> Choice:
    return policy.dot_product_algorithm(facts, algorithm, no_blocks, no_csr)


def test_new_structures_take_csr_until_they_are_used_often():
    new = Facts(True, 20_000, 20_000, 100_000)
    reused = new._replace(uses=policy.REUSE)
    assert of(new) == of(new._replace(uses=policy.REUSE - 1)) == CSR
    assert of(reused) == CSR._replace(converts=True)
    for change in ({"deterministic": True}, {"capturing": True}, {"can_convert": False}):
        assert of(reused._replace(**change)) == CSR
    assert of(reused._replace(converted=True)) == of(new._replace(converted=True)) == BLOCKS


def test_large_structures_are_converted_at_once_however_often_they_are_used():
    large = Facts(True, 200_000, 200_000, 4_000_001)
    for change in ({}, {"uses": 99}, {"deterministic": True}):
        assert of(large._replace(**change)) == BLOCKS


def test_names_are_followed_where_they_can_be(reasons):
    new = Facts(True, 100, 100, 1000)
    assert of(new, "fused3s") == BLOCKS
    assert of(new, "csr") == of(new._replace(converted=True), "csr") == Choice("csr")
    assert of(new, "unfused") == of(new, "unfused", "a", "b") == Choice("unfused")
    assert of(new, no_blocks="a") == Choice("csr")
    assert of(new, no_csr="b") == BLOCKS
    assert of(new._replace(is_cuda=False)) == BLOCKS
    assert not reasons.records
    assert of(new, "fused3s", no_blocks="a") == Choice("csr")
    assert of(new, "csr", no_csr="b") == BLOCKS
    assert of(new, no_blocks="a", no_csr="b") == Choice("unfused")
    assert [record.message.partition(". ")[0] for record in reasons.records] == [
        "attention runs as algorithm='csr' instead of 'fused3s': a",
        "attention runs as algorithm='fused3s' instead of 'csr': b",
        "attention stores scores for every edge, which takes time and memory: a; b",
    ]
