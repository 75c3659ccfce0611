"""Attention operators under PyTorch's tools, their memory, what kernels cannot handle, and errors."""

from __future__ import annotations

import gc

import pytest
import torch
from attention_problems import (
    ALGORITHMS,
    KINDS,
    problem,
    random_graph,
)
from cases import relative_error

from fastsparse_core import (
    Adjacency,
    additive_attention,
    attention,
    gatv2_attention,
    policy,
)
from fastsparse_core.formats.bsb import HEIGHT, MOST_COLUMNS
from fastsparse_core.ops import _attention, _attention_launch
from fastsparse_core.ops._attention_launch import ADDITIVE, DOT_PRODUCT, GATV2
from fastsparse_core.ops._checks import check_heads

KIND_CODES = {"dot_product": DOT_PRODUCT, "additive": ADDITIVE, "gatv2": GATV2}


@pytest.mark.parametrize("kind", KINDS)
def test_autocast(device, kind):
    adj = random_graph().adjacency(device)
    case = problem(kind, adj, biased=True, requires_grad=True)
    with torch.autocast(device, dtype=torch.bfloat16):
        out = case.run(adj)
    assert out.dtype == torch.bfloat16
    for grad in torch.autograd.grad(out.float().sum(), case.tensors):
        assert grad.dtype == torch.float32
    assert relative_error(out, case.expected(adj)) < 3e-2


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_captured_in_a_cuda_graph(kind):
    adj = random_graph().adjacency("cuda").prepare()
    case = problem(kind, adj, 2, 32, dtype=torch.float16, requires_grad=True)

    def step():
        out = case.run(adj, algorithm="fused3s")
        return [out, *torch.autograd.grad(out.float().square().sum(), case.tensors)]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            expected = step()
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        results = step()
    captured.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(*pair) for pair in zip(results, expected, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_memory_does_not_grow_with_the_edges(kind, dtype):
    nodes, heads, width = 20_000, 2, 32
    for num_edges in (200_000, 2_000_000):
        generator = torch.Generator("cuda").manual_seed(0)
        row, col = (
            torch.randint(0, nodes, (num_edges,), generator=generator, device="cuda") for _ in range(2)
        )
        adj = Adjacency.from_coo(row, col, (nodes, nodes))
        case = problem(kind, adj, heads, width, dtype=dtype, requires_grad=True)

        def step(adj=adj, case=case):
            out = case.run(adj, algorithm="fused3s")
            torch.autograd.grad(out.float().sum(), case.tensors)

        step()  # builds formats
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        # Requested bytes: the allocator's blocks are larger, by up to 1 MB each.
        before = torch.cuda.memory_stats()["requested_bytes.all.current"]
        step()
        peak = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
        # Rows of features: the result, its gradient, and the gradients of the operands that have rows of
        # features.
        operands = {"dot_product": 3, "additive": 1, "gatv2": 2}[kind]
        rows = nodes * heads * width * dtype.itemsize * (2 + operands)
        numbers = nodes * heads * 8 * 4  # log-sum-exp, row states, gradients of scores
        # Every slice of a long row stores a row of features per operand, and its softmax state.
        splits = [a.bsb_split if kind == "dot_product" else a.row_split for a in (adj, adj.t())]
        height = HEIGHT if kind == "dot_product" else 1
        partial = sum(split.num_slots for split in splits) * height * heads * (2 * width + 4) * 4
        # The gradient of `att`: one row per group of lanes, and a copy for their sum.
        groups = _attention_launch.att_rows_of(len(adj.row_split.slices)) if kind == "gatv2" else 0
        att = 2 * groups * heads * width * 4
        assert peak <= rows + numbers + partial + att + 4096
        # One score per edge would exceed the limit.
        assert numbers + partial + att < num_edges * heads * 4 or num_edges < 2_000_000


def test_what_cannot_be_fused_is_said_once_for_each_reason(reasons):
    assert [policy.attention_algorithm("auto", "float64 on CUDA") for _ in range(3)] == ["unfused"] * 3
    (record,) = reasons.records
    assert record.levelname == "WARNING"
    assert "attention stores scores for every edge, which takes time and memory: float64 on" in record.message
    assert policy.attention_algorithm("fused3s", "no heads") == "unfused"
    assert len(reasons.records) == 2
    assert policy.attention_algorithm("auto", "") == "fused3s"
    assert policy.attention_algorithm("unfused", "no heads") == "unfused"
    assert len(reasons.records) == 2


@pytest.mark.parametrize(
    ("dtype", "heads", "width", "value_width", "reason"),
    [
        (torch.float64, 2, 8, 8, "float64 on CUDA"),
        (torch.float32, 0, 8, 8, "no heads"),
        (torch.float32, 2, 0, 8, "heads of width 0, not 1 to 256"),
        (torch.float32, 2, 8, 260, "heads of width 260, not 1 to 256"),
        (torch.float16, 2, 12, 8, "heads of 24 bytes, not a multiple of 16"),
        (torch.float32, 2, 12, 256, ""),
        (torch.bfloat16, 1, 256, 8, ""),
    ],
)
def test_reasons_against_dot_product_kernels(dtype, heads, width, value_width, reason):
    adj = Adjacency.from_coo(torch.tensor([0, 2]), torch.tensor([3, 1]), (3, 4))
    widths = (heads * width, heads * width, heads * value_width)
    assert _attention.blocks_unsupported_reason(adj, dtype, widths, heads) == reason


def test_too_many_sources_are_a_reason_against_dot_product_kernels():
    row = torch.tensor([0])
    for shape in ((1, MOST_COLUMNS + 1), (MOST_COLUMNS + 1, 1)):
        adj = Adjacency.from_coo(row, row, shape)
        assert "more than 16777216 nodes" in _attention.blocks_unsupported_reason(adj, torch.float32, (8,), 1)


@pytest.mark.parametrize("backward", [False, True])
def test_blocks_of_both_directions_are_tried_where_a_gradient_is_wanted(monkeypatch, backward):
    adj = Adjacency.from_coo(torch.tensor([0, 2]), torch.tensor([3, 1]), (3, 4))

    def no_memory() -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(adj.t(), "_bsb", no_memory)
    assert _attention.has_blocks(adj, backward=backward) is not backward


@pytest.mark.parametrize(
    ("dtype", "width", "slope", "reason"),
    [
        (torch.float64, 8, 0.2, "float64 on CUDA"),
        (torch.float32, 257, 0.2, "heads of width 257, not 1 to 256"),
        (torch.float32, 0, 0.2, "heads of width 0, not 1 to 256"),
        (torch.float16, 8, 1.5, "negative_slope=1.5, not from 0 to 1, on CUDA"),
        (torch.float16, 13, 0.2, ""),
    ],
)
def test_reasons_against_gatv2_kernels(dtype, width, slope, reason):
    adj = Adjacency.from_coo(torch.tensor([0]), torch.tensor([1]), (4, 4))
    assert _attention.unsupported_reason(adj, GATV2, dtype, 2 * width, 2, slope) == reason


def test_too_many_features_are_a_reason_against_additive_kernels():
    heads = _attention.MAX_WIDTH // 256 + 1
    adj = Adjacency.from_coo(torch.tensor([0]), torch.tensor([1]), (4, 4))
    message = _attention.unsupported_reason(adj, ADDITIVE, torch.float32, heads * 256, heads)
    assert "features of all heads, more than" in message


def test_too_many_heads_are_refused_before_any_launch():
    heads = policy.MOST_HEADS + 1
    check_heads(heads, torch.device("cpu"))
    check_heads(heads - 1, torch.device("cuda"))
    with pytest.raises(ValueError, match="expected at most 65535 heads on CUDA, got 65536"):
        check_heads(heads, torch.device("cuda"))
    dtype, width = torch.float32, heads * 4
    message = "65536 heads, more than 65535"
    adj = Adjacency.from_coo(torch.tensor([0]), torch.tensor([1]), (4, 4))
    for kind in KIND_CODES.values():
        assert _attention.unsupported_reason(adj, kind, dtype, width, heads) == message
    assert _attention.blocks_unsupported_reason(adj, dtype, (width,), heads) == message
    heads = _attention.MAX_WIDTH_ON_BLOCKS // 256 + 1
    message = "features of all heads, more than 8388480"
    assert message in _attention.blocks_unsupported_reason(adj, dtype, (heads * 256,), heads)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_too_many_heads_raise_on_cuda(kind):
    adj = Adjacency.from_coo(torch.tensor([0, 2]), torch.tensor([3, 1]), (3, 4)).to("cuda")
    case = problem(kind, adj, policy.MOST_HEADS + 1, 4)
    for algorithm in ALGORITHMS:
        with pytest.raises(ValueError, match="at most 65535 heads"):
            case.run(adj, algorithm=algorithm)


# ---------------------------------------------------------------- errors


def arguments(kind: str) -> dict[str, object]:
    if kind == "dot_product":
        return {"q": torch.ones(3, 2, 4), "k": torch.ones(4, 2, 4), "v": torch.ones(4, 2, 5)}
    if kind == "additive":
        return {"score_dst": torch.ones(3, 2), "score_src": torch.ones(4, 2), "v": torch.ones(4, 2, 5)}
    return {"x_dst": torch.ones(3, 2, 4), "x_src": torch.ones(4, 2, 4), "att": torch.ones(2, 4)}


@pytest.mark.parametrize("algorithm", ["auto", *ALGORITHMS])
@pytest.mark.parametrize(
    ("kind", "change", "error", "message"),
    [
        ("dot_product", {"q": torch.ones(4, 2, 4)}, ValueError, "q: expected num_dst = 3 rows"),
        ("dot_product", {"k": torch.ones(4, 2, 3)}, ValueError, "q and k: expected features of one width"),
        ("dot_product", {"v": torch.ones(4, 3, 5)}, ValueError, "same number of heads, got 2, 2"),
        ("dot_product", {"v": torch.ones(4, 5)}, ValueError, "q, k and v: expected"),
        ("dot_product", {"v": torch.ones(4, 2, 5).half()}, TypeError, "q, k and v: expected one dtype"),
        ("dot_product", {"q": torch.ones(3, 2, 4).int()}, TypeError, "q: expected float64"),
        ("dot_product", {"scale": float("nan")}, ValueError, "scale: expected a finite number, got nan"),
        ("dot_product", {"scale": torch.ones(1)}, TypeError, "scale: expected a number, got Tensor"),
        ("dot_product", {"bias": torch.ones(1)}, ValueError, r"bias: expected shape \(2,\) or \(2, 2\)"),
        ("dot_product", {"bias": torch.ones(2, 3)}, ValueError, "bias: expected shape"),
        ("dot_product", {"bias": torch.ones(2).int()}, TypeError, "bias: expected a floating tensor"),
        ("dot_product", {"bias": torch.ones(2, device="meta")}, ValueError, "bias: expected device cpu"),
        ("dot_product", {"dropout_p": 1.0}, ValueError, "dropout_p: expected a probability from 0"),
        ("dot_product", {"dropout_p": -0.1}, ValueError, "dropout_p: expected a probability"),
        ("dot_product", {"dropout_p": float("nan")}, ValueError, "dropout_p: expected a probability"),
        ("dot_product", {"dropout_p": "0.5"}, TypeError, "dropout_p: expected a number, got str"),
        ("dot_product", {"heads": 3}, ValueError, r"heads: expected 2 for \(n, 2, D\)"),
        ("dot_product", {"q": torch.ones(3, 8), "k": torch.ones(4, 8), "v": torch.ones(4, 9), "heads": 2},
         ValueError, r"v: expected \(n, 2 \* D\) for 2 heads side by side, got \(4, 9\)"),
        ("dot_product", {"q": torch.ones(3, 8), "k": torch.ones(4, 8), "v": torch.ones(4, 8), "heads": 0},
         ValueError, r"q: expected \(n, 0 \* D\)"),
        ("additive", {"v": torch.ones(4, 5)}, ValueError, r"v: expected \(n, 2 \* D\) for 2 heads"),
        ("gatv2", {"x_dst": torch.ones(3, 9), "x_src": torch.ones(4, 9)}, ValueError,
         r"att: expected shape \(heads, D\) with heads \* D = 9, got \(2, 4\)"),
        ("additive", {"score_dst": torch.ones(3, 3)}, ValueError, r"score_dst: expected shape \(3, 2\)"),
        ("additive", {"score_src": torch.ones(3, 2)}, ValueError, "score_src: expected num_src = 4 rows"),
        ("additive", {"v": torch.ones(4)}, ValueError, r"v: expected \(num_src, heads, D\)"),
        ("additive", {"negative_slope": float("inf")}, ValueError, "negative_slope: expected a finite"),
        ("additive", {"bias": torch.ones(3)}, ValueError, "bias: expected shape"),
        ("additive", {"dropout_p": 2}, ValueError, "dropout_p: expected a probability"),
        ("gatv2", {"x_src": torch.ones(4, 3, 4)}, ValueError, "x_dst and x_src: expected"),
        ("gatv2", {"x_src": torch.ones(4, 2, 4).double()}, TypeError, "x_dst and x_src: expected one dtype"),
        ("gatv2", {"att": torch.ones(2, 5)}, ValueError, r"att: expected shape \(heads, D\) = \(2, 4\)"),
        ("gatv2", {"att": torch.ones(2, 4).int()}, TypeError, "att: expected a floating tensor"),
        ("gatv2", {"negative_slope": float("nan")}, ValueError, "negative_slope: expected a finite"),
        ("gatv2", {"dropout_p": 1}, ValueError, "dropout_p: expected a probability"),
    ],
)  # fmt: skip
def test_bad_input(kind, change, error, message, algorithm):
    adj = Adjacency.from_coo(torch.tensor([0, 2]), torch.tensor([3, 1]), (3, 4))
    operator = {"dot_product": attention, "additive": additive_attention, "gatv2": gatv2_attention}[kind]
    with pytest.raises(error, match=message):
        operator(adj, **{**arguments(kind), **change}, algorithm=algorithm)


@pytest.mark.parametrize("kind", KINDS)
def test_unknown_algorithm(kind):
    adj = Adjacency.from_coo(torch.tensor([0, 2]), torch.tensor([3, 1]), (3, 4))
    operator = {"dot_product": attention, "additive": additive_attention, "gatv2": gatv2_attention}[kind]
    with pytest.raises(
        ValueError, match="algorithm: expected one of 'auto', 'fused3s', 'csr', 'unfused', got 'magic'"
    ):
        operator(adj, **arguments(kind), algorithm="magic")
