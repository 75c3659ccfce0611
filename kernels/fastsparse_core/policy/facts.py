"""The facts about a structure that the rules use: numbers and flags, no tensors."""

from __future__ import annotations

from typing import NamedTuple

#: Largest number of heads: the limit of a CUDA grid in its second and third dimension.
MOST_HEADS = 65_535


class Facts(NamedTuple):
    """Facts about a structure and its use so far, for the rules.

    Attributes:
        is_cuda: whether the structure is on a GPU.
        num_dst: number of rows.
        num_src: number of columns.
        num_edges: number of entries.
        uses: number of products with the structure that `auto` has counted.
        scattered: number of gradients that were summed with atomics; None: atomics are not allowed.
        converted: whether the structure was converted to binary sparse blocks.
        can_convert: whether the structure can be converted to these blocks.
        num_vectors: number of vectors in the blocks.
        has_sddmm_structure: whether the work list of sddmm on blocks was built.
        has_transpose: whether the transpose was built.
        is_padded: as in `Adjacency`.
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
    """The result of a rule.

    Attributes:
        algorithm: name of the kernel.
        is_final: whether the same call always gets the same result from now on. If not, the result may change
            when the structure has been used `policy.REUSE` times or is converted.
        counts: whether the call counts as a use.
        converts: whether to convert the structure now. The rule is evaluated again afterwards.
    """

    algorithm: str
    is_final: bool = True
    counts: bool = False
    converts: bool = False
