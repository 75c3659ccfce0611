"""What the rules know of a call: numbers, no tensors and no structure."""

from __future__ import annotations

from typing import NamedTuple

#: Heads that a grid has space for.
MOST_HEADS = 65_535


class Facts(NamedTuple):
    """A structure and its use so far, as far as the rules ask.

    Attributes:
        is_cuda: whether it is on a GPU.
        num_dst: rows.
        num_src: columns.
        num_edges: entries.
        uses: products that `auto` has counted with it.
        scattered: gradients that were added by atomics; None where they may not be.
        converted: whether it was converted to binary sparse blocks.
        can_convert: whether that was not refused.
        num_vectors: of the blocks.
        has_sddmm_structure: whether that of sddmm on blocks was.
        has_transpose: whether the transpose was built.
        is_padded: whether there is space for more entries.
        deterministic: whether PyTorch is set to use deterministic algorithms.
        capturing: whether a CUDA graph is being captured.
    """

    is_cuda: bool
    num_dst: int
    num_src: int
    num_edges: int
    uses: int = 0
    scattered: int | None = None
    converted: bool = False
    can_convert: bool = True
    num_vectors: int = 0
    has_sddmm_structure: bool = False
    has_transpose: bool = False
    is_padded: bool = False
    deterministic: bool = False
    capturing: bool = False


class Choice(NamedTuple):
    """What a rule says.

    Attributes:
        algorithm: name of the kernel.
        is_final: whether the same call will get the same answer from now on. If not, it does until the
            structure was used `policy.REUSE` times or is converted.
        counts: whether the call counts as a use.
        converts: whether the structure is worth converting now; the rule is asked again afterwards.
    """

    algorithm: str
    is_final: bool = True
    counts: bool = False
    converts: bool = False
