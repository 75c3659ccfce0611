"""AdjacencyCache: hits, staleness, lifetime."""

from __future__ import annotations

import gc

import torch

from fastsparse_core import Adjacency
from fastsparse_core.cache import MAX_OPTIONS, AdjacencyCache


class Graph:
    """Stands for a graph object."""


def build() -> Adjacency:
    return Adjacency.from_coo(torch.tensor([0, 1]), torch.tensor([1, 0]), (2, 2))


def test_hit_needs_same_object_stamp_and_options():
    cache, graph = AdjacencyCache("test"), Graph()
    first = cache.lookup(graph, 1, "a", build)
    assert cache.lookup(graph, 1, "a", build) is first
    assert cache.lookup(graph, 1, "b", build) is not first
    assert cache.lookup(Graph(), 1, "a", build) is not first
    assert cache.lookup(graph, 2, "a", build) is not first
    info = cache.info()
    assert (info.hits, info.misses, info.stale) == (1, 4, 1)


def test_the_latest_entry_needs_all_three_too():
    cache, graph = AdjacencyCache("test"), Graph()
    for key, stamp, options in ((graph, 2, "a"), (graph, 1, "b"), (Graph(), 1, "a")):
        latest = cache.lookup(graph, 1, "a", build)
        assert cache.lookup(key, stamp, options, build) is not latest


def test_entry_dies_with_its_graph():
    cache, graph = AdjacencyCache("test"), Graph()
    cache.lookup(graph, 0, None, build)
    assert cache.info().entries == 1
    assert cache.info().bytes > 0
    del graph
    gc.collect()
    assert cache.info().entries == 0


def test_tensors_are_compared_by_identity():
    cache, index = AdjacencyCache("test"), torch.zeros(2, 3)
    first = cache.lookup(index, 0, None, build)
    assert cache.lookup(index, 0, None, build) is first
    assert cache.lookup(index.clone(), 0, None, build) is not first


def test_options_are_bounded_and_clear_forgets():
    cache, graph = AdjacencyCache("test"), Graph()
    for option in range(MAX_OPTIONS + 3):
        cache.lookup(graph, 0, option, build)
    assert cache.info().entries == MAX_OPTIONS
    cache.clear()
    assert cache.info().misses == cache.info().entries == 0
