"""Rules: whether attention runs as one fused kernel, and which kernel computes dot-product attention."""

from __future__ import annotations

from fastsparse_core.log import warn_once
from fastsparse_core.policy.conversion import is_reused
from fastsparse_core.policy.facts import Choice, Facts

#: A structure with more edges is converted at its first use: it is a full graph that will be used again, not
#: a batch, and the backward pass of the CSR kernels stores two numbers per edge and head.
_MOST_UNCONVERTED = 4_000_000
_TAKE_AUTO = "Pass algorithm='auto' to let FastSparse choose"


def attention_algorithm(algorithm: str, unsupported_reason: str) -> str:
    """Resolves ``"auto"``, and a request that this call does not support, to ``"fused3s"`` or ``"unfused"``.

    Args:
        algorithm: the caller's choice. For kinds of scores with only one fused kernel, ``"csr"`` means that
            kernel.
        unsupported_reason: why the fused kernels do not support the call; "" if they do.
    """
    if algorithm == "unfused":
        return algorithm
    if unsupported_reason:
        warn_once(
            f"attention stores scores for every edge, which takes time and memory: {unsupported_reason}. "
            "The fused kernels support float32, float16 and bfloat16 (on the CPU also float64), and heads of "
            "1 to 256 features"
        )
        return "unfused"
    return "fused3s"


def dot_product_algorithm(facts: Facts, algorithm: str, no_blocks: str, no_csr: str) -> Choice:
    """Resolves ``"auto"``, and a request that this call does not support, to the name of a kernel.

    ``"fused3s"`` is faster, but needs a structure that is converted to blocks. ``"csr"`` needs no conversion.
    So ``"auto"`` uses csr until a structure has been used often. With deterministic algorithms it does not
    convert a structure, because the number of uses must not change the bits of the result.

    Args:
        facts: facts about the structure.
        algorithm: the caller's choice.
        no_blocks: why ``"fused3s"`` does not support the call; "" if it does.
        no_csr: why ``"csr"`` does not support the call; "" if it does.
    """
    if algorithm == "unfused" or (no_blocks and no_csr):
        why = no_blocks if no_csr == no_blocks else f"{no_blocks}; {no_csr}"
        return Choice(attention_algorithm(algorithm, why))
    if algorithm == "csr" or (no_blocks and not no_csr):
        if algorithm == "fused3s":
            warn_once(f"attention runs as algorithm='csr' instead of 'fused3s': {no_blocks}. {_TAKE_AUTO}")
        if not no_csr:
            return Choice("csr")
        warn_once(f"attention runs as algorithm='fused3s' instead of 'csr': {no_csr}. {_TAKE_AUTO}")
        return Choice("fused3s")
    if algorithm == "auto" and facts.is_padded and not no_csr:
        return Choice("csr")
    large = facts.num_edges > _MOST_UNCONVERTED
    if algorithm == "fused3s" or no_csr or facts.converted or not facts.is_cuda or large:
        return Choice("fused3s")
    return Choice("csr", is_final=False, counts=True, converts=facts.can_convert and is_reused(facts))
