"""Attention layers as on CUDA, but by the CPU's kernels: what is handed over, and how few operators run."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from test_attention_layer import F_IN, Layer, assert_close, both, structure
from torch.utils._python_dispatch import TorchDispatchMode

from fastsparse_core import _C, policy
from fastsparse_core.fused import attention_layer, attention_on_cuda
from fastsparse_core.fused.attention_kinds import DOT_PRODUCT
from fastsparse_core.fused.attention_on_cuda import plan_of
from fastsparse_core.ops import _attention_launch
from fastsparse_core.ops._attention_launch import GATV2, Call, Wanted
from fastsparse_core.ops._facts import used_csr
from fastsparse_core.policy import Choice


class Plan:
    """`_C.CudaAttentionLayer` by the CPU's kernels, which keep the same state for additive attention."""

    scratch, on_blocks = 16, False

    def __init__(self, adj, score, dtype, widths, heads, scale, algorithm, *, records, backward=False):
        assert (algorithm, records) == ("csr" if backward else "auto", True)
        self.adj, self.backward_pass = adj, backward
        self.state = adj.num_dst * heads * 3
        layout = (dtype, heads, widths[0] // heads, len(widths))
        self.layer = _C.AttentionLayer(used_csr(adj), score.code, *layout, scale)

    def forward(
        self, joint, first, second, bias, is_float, out, result, state, scratch, dropout_p, seed, tf32, stream
    ):
        assert (self.backward_pass, out is result, is_float, stream) == (False, True, False, 7)
        assert scratch is not None
        edges = (None, None, None)
        self.layer.forward(joint, first, second, *edges, bias, out, state, dropout_p, seed, 1)

    def backward(
        self, joint, first, second, out, state, scratch, grad, grad_joint, grad_first,
        grad_second, grad_bias, bias_dtype, sums, sums_dtype, dropout_p, seed, tf32, stream,
    ):  # fmt: skip
        assert (self.backward_pass, stream) == (True, 7)
        assert scratch is not None
        assert grad_bias is None or bias_dtype == torch.float32
        assert sums is None or sums_dtype == torch.float32
        edges, of_edges = (None, None, None), (None, None, None)
        gradients = (grad, grad_joint, grad_first, grad_second, *of_edges, grad_bias, sums)
        self.layer.backward(
            used_csr(self.adj.t()), joint, first, second, *edges, state, *gradients, dropout_p, seed, 1
        )


class Operators(TorchDispatchMode):
    """Counts PyTorch's operators."""

    is_harmless = True

    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen[function.overloadpacket.__name__] += 1
        return function(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def on_cuda(monkeypatch):
    def plan(adj, x, *how):
        *how, records = how
        return Plan(adj, *how, records=records)

    monkeypatch.setattr(attention_layer, "_plan", plan)
    monkeypatch.setattr(attention_on_cuda, "plan_of", Plan)
    monkeypatch.setattr(attention_on_cuda, "queue", lambda index: 7)


@pytest.mark.parametrize("kind", ["gat", "gatv2", "dot", "dot with skip"])
@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_same_as_operators(kind, mean, dropout_p):
    adj = structure("cpu")
    layer = Layer(kind, 2, 8, torch.float32, "cpu", mean=mean, dropout_p=dropout_p)
    x = torch.randn(70, F_IN, requires_grad=True)
    assert_close(both(layer, adj, x), 1e-4, floor=1e-2)


#: Number of operators in the forward and backward pass of a layer with a bias, with gradients of features and
#: all parameters.
MOST = {"gat": (5, 8), "gatv2": (7, 10), "dot": (6, 7), "dot with skip": (7, 9)}


@pytest.mark.parametrize("kind", MOST)
def test_few_operators(kind):
    """An operator takes the host as long as a launch, which is all the time of layers on small graphs."""
    adj, layer = structure("cpu"), Layer(kind, 2, 8, torch.float32, "cpu")
    x = torch.randn(70, F_IN, requires_grad=True)
    leaves = [x, *layer.parameters()]
    out = layer.as_one(adj, x)
    grad = torch.randn_like(out)
    torch.autograd.grad(out, leaves, grad)
    with Operators() as forward:
        out = layer.as_one(adj, x)
    with Operators() as backward:
        torch.autograd.grad(out, leaves, grad)
    most = MOST[kind]
    assert (forward.seen.total() <= most[0], backward.seen.total() <= most[1]) == (True, True), (
        forward.seen,
        backward.seen,
    )


class Recorded:
    """What `_C.CudaAttentionLayer` is made of."""

    def __init__(self, rows, rows_t, blocks, blocks_t, *sizes):
        self.on_blocks, self.backward = blocks is not None, rows_t is not None or blocks_t is not None


def test_a_plan_of_rows_is_kept_and_counted_until_the_rule_says_blocks(monkeypatch):
    asked = []

    def rule(adj, dtype, width, heads, algorithm, *, backward):
        asked.append((algorithm, backward))
        adj.usage.products += 1
        return Choice("fused3s") if adj.has_bsb else Choice("csr", is_final=False, counts=True)

    monkeypatch.setattr(_C, "CudaAttentionLayer", Recorded)
    monkeypatch.setattr(_C, "BsbStructure", lambda **args: args)
    monkeypatch.setattr(attention_on_cuda, "choice_on_cuda", rule)
    monkeypatch.setattr(attention_on_cuda, "multiprocessors", lambda device: 1)
    adj = structure("cpu")
    call = (adj, DOT_PRODUCT, torch.float32, (16, 16, 16), 2, 0.5)
    plans = [plan_of(*call, "auto", records=True) for _ in range(policy.REUSE)]
    assert asked == [("auto", True)]
    assert adj.usage.products == policy.REUSE
    assert {(plan, plan.on_blocks, plan.backward) for plan in plans} == {(plans[0], False, False)}
    assert plan_of(*call, "auto", records=True) is plans[0]  # the rule gives the same answer
    assert len(asked) == 2
    backward = plan_of(*call, "csr", records=True, backward=True)
    assert (backward.on_blocks, backward.backward) == (False, True)
    assert plan_of(*call, "csr", records=True, backward=True) is backward
    assert adj.try_bsb()
    last = plan_of(*call, "auto", records=True)
    assert last.on_blocks
    assert plan_of(*call, "auto", records=True) is last
    assert len(asked) == 3
    assert plan_of(*call, "fused3s", records=True, backward=True).on_blocks


def test_gatv2_keeps_two_numbers_of_each_row_and_head(monkeypatch):
    """What the kernel of the backward pass stores: the log-sum-exp, and the gradient's share of the row."""
    lengths = []

    def scratch(device, *asked):
        lengths.append(asked)
        return None, [0] * len(asked)

    monkeypatch.setattr(_attention_launch, "scratch", scratch)
    monkeypatch.setattr(_C, "gatv2_attention_backward", lambda *args: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    adj, heads, width = structure("cpu"), 2, 16
    x_dst, x_src, grad = (torch.randn(rows, width) for rows in (adj.num_dst, adj.num_src, adj.num_dst))
    call = Call(x_dst, x_src, None, torch.randn(heads, 8), None, None, None, 0.2, 0.0, None, GATV2, heads)
    lse = torch.randn(adj.num_dst, heads)
    _attention_launch._backward_on_rows(adj, call, grad, torch.randn_like(grad), lse, Wanted())
    slots = (adj.row_split.num_slots, adj.t().row_split.num_slots)
    assert lengths == [(adj.num_dst * heads * 2, slots[0] * width, slots[1] * width)]
