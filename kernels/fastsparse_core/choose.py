"""Choice of algorithm and tuning parameters, from structure statistics and measured crossovers."""

from __future__ import annotations

#: Groups of lanes that an H200 keeps resident in the CSR kernels, about: 132 multiprocessors x 96 groups.
_RESIDENT_GROUPS = 132 * 96


def slice_length(num_edges: int) -> int:
    """Longest slice of a row, in entries: a power of two from 32 to 512.

    Small graphs need short slices to fill the GPU; beyond a few million edges 512 entries cost next to
    nothing in partial results (two rows written and read per 512 gathered).
    """
    length = 32
    while length < 512 and length * 2 * _RESIDENT_GROUPS <= num_edges:
        length *= 2
    return length


def spmm_algorithm(algorithm: str) -> str:
    """Resolves ``"auto"`` for spmm and sddmm and rejects unknown names."""
    if algorithm in ("auto", "csr"):
        return "csr"
    raise ValueError(f"algorithm: expected 'auto' or 'csr', got {algorithm!r}")
