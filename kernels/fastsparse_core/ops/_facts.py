"""Collects the facts about a structure for the rules in `policy`, and carries out their decisions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastsparse_core import policy
from fastsparse_core.policy import Choice, Facts
from fastsparse_core.structure.adjacency import Adjacency


def facts_of(adj: Adjacency) -> Facts:
    """Collects the current facts about a structure that the rules use."""
    col, usage, converted = adj.col, adj.usage, adj.has_bsb
    is_cuda = col.is_cuda
    return Facts(
        is_cuda,
        adj.num_dst,
        adj.num_src,
        col.numel(),
        usage.products,
        usage.scattered,
        converted,
        adj.can_convert,
        adj.bsb.num_vectors if converted else 0,
        adj.has_sddmm_structure,
        adj.has_transpose,
        adj.is_padded,
        torch.are_deterministic_algorithms_enabled(),
        is_cuda and torch.cuda.is_current_stream_capturing(),
    )


def follow(adj: Adjacency, rule: Callable[[Facts], Choice]) -> tuple[Choice, Facts]:
    """Evaluates a rule; counts the use and converts the structure if the rule's choice says so.

    Returns:
        The rule's choice, and the facts it was based on.
    """
    facts = facts_of(adj)
    choice = rule(facts)
    if choice.counts:
        adj.usage.products += 1
    if choice.converts:
        adj.try_bsb()
        facts = facts_of(adj)
        choice = rule(facts)
    return choice, facts


def scatters(adj: Adjacency, algorithm: str, dtype: torch.dtype, value: Tensor | None) -> bool:
    """The rule `policy.scatters` for the gradient of a product; counts the use if the result is True."""
    if adj.usage.scattered is None or adj.has_transpose:
        return False
    per_entry = value is None or (value.dim() <= 2 and value.numel() == adj.num_values)
    if not policy.scatters(facts_of(adj), algorithm, dtype, per_entry):
        return False
    adj.usage.scattered += 1
    return True


def count_csr_use(adj: Adjacency) -> None:
    """Counts a use of unsorted slices; after enough uses, sorts the slices.

    Slices in row order need no preparation, but sorted slices are faster. The structure keeps tensors alive
    that the current call already reads.
    """
    if not adj.has_sorted_slices:
        adj.usage.csr += 1
        is_due = policy.sorts_slices(adj.usage.csr, adj.num_edges)
        if is_due and not torch.cuda.is_current_stream_capturing():
            adj.sort_slices()


def used_csr(adj: Adjacency, *, valued: bool = True) -> Any:
    """Returns the structure for the CSR kernels, and counts the call as a use.

    Args:
        adj: the structure.
        valued: whether the kernel reads the entries' positions in the caller's order.
    """
    count_csr_use(adj)
    structure = adj.structure_for(valued=valued)
    if valued and adj.has_sorted_slices:
        adj.plans["csr"] = structure  # callers look here first, because uses need not be counted any more
    return structure
