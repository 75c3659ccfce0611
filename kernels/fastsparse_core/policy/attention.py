"""Whether attention runs as one kernel or step by step, and which kernel takes dot products."""

from __future__ import annotations

from fastsparse_core.log import warn_once
from fastsparse_core.policy.conversion import is_reused
from fastsparse_core.policy.facts import Choice, Facts

#: Edges from which a structure is converted at its first use: batches have no more, a full graph is used on,
#: and the CSR kernels' backward pass keeps two numbers for every edge and head.
_MOST_UNCONVERTED = 4_000_000
_TAKE_AUTO = "Pass algorithm='auto' to let FastSparse choose"


def attention_algorithm(algorithm: str, unsupported_reason: str) -> str:
    """Resolves ``"auto"``, and a request that this call does not support, to ``"fused3s"`` or ``"unfused"``.

    Args:
        algorithm: as the caller asked; of scores that have one fused kernel, ``"csr"`` means that one too.
        unsupported_reason: why the fused kernels do not support the call, "" if they can.
    """
    if algorithm == "unfused":
        return algorithm
    if unsupported_reason:
        warn_once(
            f"attention stores scores for every edge, which takes time and memory: {unsupported_reason}. "
            "The fused kernels take float32, float16 and bfloat16, on the CPU float64, and heads of 1 to 256 "
            "features"
        )
        return "unfused"
    return "fused3s"


def dot_product_algorithm(facts: Facts, algorithm: str, no_blocks: str, no_csr: str) -> Choice:
    """Resolves ``"auto"``, and a request that this call does not support, to the name of a kernel.

    ``"fused3s"`` is faster once a structure is converted to blocks, ``"csr"`` reads it as it is. So
    ``"auto"`` takes csr until a structure is used often, and always under deterministic algorithms, where the
    number of uses must not change bits.

    Args:
        facts: of the structure.
        algorithm: as the caller asked.
        no_blocks: why ``"fused3s"`` does not support the call, "" if it can.
        no_csr: the same of ``"csr"``.
    """
    if algorithm == "unfused" or (no_blocks and no_csr):
        return Choice(attention_algorithm(algorithm, no_blocks))
    if algorithm == "csr" or (no_blocks and not no_csr):
        if algorithm == "fused3s":
            warn_once(f"attention runs as algorithm='csr' in place of 'fused3s': {no_blocks}. {_TAKE_AUTO}")
        if not no_csr:
            return Choice("csr")
        warn_once(f"attention runs as algorithm='fused3s' in place of 'csr': {no_csr}. {_TAKE_AUTO}")
        return Choice("fused3s")
    if algorithm == "auto" and facts.is_padded and not no_csr:
        return Choice("csr")
    large = facts.num_edges > _MOST_UNCONVERTED
    if algorithm == "fused3s" or no_csr or facts.converted or not facts.is_cuda or large:
        return Choice("fused3s")
    return Choice("csr", is_final=False, counts=True, converts=facts.can_convert and is_reused(facts))
