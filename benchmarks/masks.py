"""Attention with a sparse mask: ours against PyTorch's with a dense mask, FlexAttention and nested tensors.

- window: every token attends to the tokens at most so many places away.
- random: each pair is kept with a probability; no blocks are empty.
- graph: neighbours in a graph of the suite, in its order.
- lengths: sequences of different lengths, within which all attend to all.

Masks are made beforehand in the form that each implementation reads. FlexAttention is compiled. The results
of PyTorch's implementations are compared with ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastsparse_core import Adjacency, attention

from . import suite
from .runner import DTYPES, Benchmark, Cell, Job, Run, option
from .timing import kernel_time

#: Largest number of tokens for a dense mask, because it has a score per head and pair of tokens.
MOST_DENSE = 32_768
#: Accepted relative error: implementations round float16 and bfloat16 in different places.
TOLERANCE = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 4e-2}


@dataclass(frozen=True)
class Mask:
    """Which pairs attend.

    Attributes:
        name: of the case.
        rows: int64 (pairs,), ascending: who attends.
        cols: int64 (pairs,): to whom.
        tokens: how many there are.
        lengths: of the sequences that the pairs are all pairs of; None: they are not of that kind.
    """

    name: str
    rows: Tensor
    cols: Tensor
    tokens: int
    lengths: Tensor | None = None

    def dense(self) -> Tensor:
        """Boolean (tokens, tokens)."""
        mask = torch.zeros(self.tokens, self.tokens, dtype=torch.bool, device=self.rows.device)
        mask[self.rows, self.cols] = True
        return mask


def make_mask(name: str, tokens: int, device: torch.device) -> Mask:
    """A mask by its name: window-W, random-P, lengths-L or a graph of the suite."""
    kind, _, how = name.partition("-")
    generator = torch.Generator(device=device).manual_seed(0)
    if kind == "window":
        reach = torch.arange(-int(how), int(how) + 1, device=device)
        rows = torch.arange(tokens, device=device).repeat_interleave(reach.numel())
        cols = rows + reach.repeat(tokens)
        kept = (cols >= 0) & (cols < tokens)
        return Mask(name, rows[kept], cols[kept], tokens)
    if kind == "random":
        pairs = torch.rand(tokens, tokens, device=device, generator=generator) < float(how)
        pairs.fill_diagonal_(True)
        return Mask(name, *pairs.nonzero().t().contiguous(), tokens)
    if kind == "lengths":
        lengths = torch.randint(
            10, 2 * int(how) - 9, (max(tokens // int(how), 1),), generator=generator, device=device
        )
        first = lengths.cumsum(0) - lengths
        of_token = torch.repeat_interleave(lengths)
        rows = torch.arange(of_token.numel(), device=device).repeat_interleave(lengths[of_token])
        begin = (lengths.square().cumsum(0) - lengths.square())[of_token[rows]]
        place = torch.arange(rows.numel(), device=device) - begin
        cols = first[of_token[rows]] + place % lengths[of_token[rows]]
        return Mask(name, rows, cols, of_token.numel(), lengths)
    graph = suite.load(name, device)
    return Mask(name, graph.row().long(), graph.col.long(), graph.num_nodes)


def cells(run: Run, name: str) -> Iterator[Job]:
    """All implementations of one mask."""
    mask = make_mask(name, run.options.tokens, run.device)
    pairs = mask.rows.numel()
    facts = {"mask": name, "tokens": mask.tokens, "pairs": pairs, "kept": pairs / mask.tokens**2}
    for dtype in run.options.dtypes:
        shape = 3, mask.tokens, run.options.heads, run.options.width
        generator = torch.Generator(device=run.device).manual_seed(1)
        leaves = torch.randn(shape, generator=generator, device=run.device).to(DTYPES[dtype])
        upstream = torch.randn(shape[1:], generator=generator, device=run.device).to(DTYPES[dtype])
        for backward in (False, True):
            expected: list[Tensor] = []
            for implementation in run.options.implementations:
                cell = {"dtype": dtype, "backward": backward, "implementation": implementation}
                measure = partial(_measure, run, implementation, mask, leaves, upstream, backward, expected)
                yield {**facts, **cell}, measure


def _measure(
    run: Run,
    implementation: str,
    mask: Mask,
    leaves: Tensor,
    upstream: Tensor,
    backward: bool,
    expected: list[Tensor],
) -> Cell:
    call = _MAKERS[implementation](mask)
    q, k, v = (leaf.detach().requires_grad_(backward) for leaf in leaves)

    def step() -> Tensor:
        out = call(q, k, v)
        if not backward:
            return out
        return torch.cat(torch.autograd.grad(out, (q, k, v), upstream))

    tolerance = TOLERANCE[str(leaves.dtype).removeprefix("torch.")]
    # Timed by events around each call, without host overhead, as in a compiled model.
    return run.compared(step, expected, tolerance * (2 if backward else 1), kernel_time, above=True)()


Call = Callable[[Tensor, Tensor, Tensor], Tensor]


def _ours(mask: Mask) -> Call:
    adj = Adjacency.from_coo(mask.rows, mask.cols, (mask.tokens, mask.tokens)).prepare()
    return partial(attention, adj)


def _heads_first(call: Callable[..., Tensor]) -> Call:
    """PyTorch's functions take (1, heads, tokens, width)."""

    def turned(*tensors: Tensor) -> Tensor:
        return call(*(each.transpose(0, 1)[None] for each in tensors))[0].transpose(0, 1)

    return turned


def _dense(mask: Mask) -> Call:
    if mask.tokens > MOST_DENSE:
        raise NotImplementedError(f"a dense mask of {mask.tokens:,} tokens")
    return _heads_first(partial(F.scaled_dot_product_attention, attn_mask=mask.dense()))


def _flex(mask: Mask) -> Call:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    device, tokens = mask.rows.device, mask.tokens
    if mask.lengths is not None:
        of_token = torch.repeat_interleave(mask.lengths)

        def keeps(batch: Any, head: Any, row: Any, col: Any) -> Any:
            return of_token[row] == of_token[col]
    elif mask.name.startswith("window"):
        reach = int(mask.name.partition("-")[2])

        def keeps(batch: Any, head: Any, row: Any, col: Any) -> Any:
            return (row - col).abs() <= reach
    elif tokens > MOST_DENSE:
        raise NotImplementedError(f"a mask that is no rule, of {tokens:,} tokens")
    else:
        pairs = mask.dense()

        def keeps(batch: Any, head: Any, row: Any, col: Any) -> Any:
            return pairs[row, col]

    blocks = create_block_mask(keeps, None, None, tokens, tokens, device=str(device))
    return _heads_first(partial(torch.compile(flex_attention), block_mask=blocks))


def _nested(mask: Mask) -> Call:
    if mask.lengths is None:
        raise NotImplementedError("nested tensors hold sequences, no other masks")
    offsets = torch.cat([mask.lengths.new_zeros(1), mask.lengths.cumsum(0)])

    def call(*tensors: Tensor) -> Tensor:
        parts = [torch.nested.nested_tensor_from_jagged(each, offsets).transpose(1, 2) for each in tensors]
        return F.scaled_dot_product_attention(*parts).transpose(1, 2).values()

    return call


_MAKERS = {"FastSparse": _ours, "dense": _dense, "flex": _flex, "nested": _nested}

BENCHMARK = Benchmark(
    "masks",
    cells,
    "masks",
    budget_ms=40.0,
    options={
        "masks": option(
            ["window-64", "random-0.01", "random-0.1", "lengths-128", "pubmed", "ogbn-arxiv"],
            "window-W, random-P, lengths-L (mean), or a graph",
        ),
        "tokens": option(16_384, "tokens, but of graphs"),
        "heads": option(8, "heads"),
        "width": option(64, "features of a head"),
        "implementations": option(choices=tuple(_MAKERS)),
        "dtypes": option(["bfloat16"], choices=tuple(DTYPES)),
    },
    notes=("masks are prepared beforehand; peak memory is what a call takes above what was held before",),
)
