"""Measuring where kernels overtake each other: the crossing, and what a profile takes from it."""

from __future__ import annotations

import pytest
import torch

from fastsparse_core import gpu, tune


@pytest.mark.parametrize(
    ("points", "at"),
    [
        ([(1, 1, 2), (10, 1, 1), (100, 2, 1)], 10),
        ([(100, 2, 1), (1, 1, 2)], 10),  # in any order, between two points on a logarithmic scale
        ([(1, 2, 1), (100, 1, 2)], 10),  # the second is faster below
        ([(1, 1, 2), (100, 1, 2)], None),
        ([(1, 2, 1)], None),
        ([], None),
    ],
)
def test_crossover(points, at):
    found = tune.crossover(points)
    assert found is None if at is None else found == pytest.approx(at)


def test_a_profile_takes_what_was_found(monkeypatch):
    crosses = tune.Experiment("few_edges", "", lambda *_: iter([(10, 1, 2), (1000, 2, 1)]))
    never = tune.Experiment("shared", "", lambda *_: iter([(0.5, 1, 2)]))
    monkeypatch.setattr(tune, "EXPERIMENTS", (crosses, never))
    monkeypatch.setattr(tune, "gradient_rate", lambda *_: 1e9)
    device, said = torch.device("cpu"), []
    before = gpu.profile_of(device)
    profile = tune.tune(device, lambda call: 1.0, lambda *them: said.append(them))
    assert profile.few_edges == 100
    assert profile.shared == before.shared
    assert profile.gradient_rate == 1e9
    assert profile.source.startswith("tuned ")
    assert [name for name, _ in said] == ["few_edges", "shared", "gradient_rate"]


def test_structures_share_columns():
    few, many = (tune.structure(800, 4000, 8000, share, torch.device("cpu")) for share in (0.0, 0.9))
    assert many.bsb.num_vectors < 0.7 * few.bsb.num_vectors


def test_every_experiment_is_for_a_constant():
    constants = {each.name for each in gpu.measured_fields()}
    assert {experiment.constant for experiment in tune.EXPERIMENTS} <= constants


@pytest.mark.gpu
def test_measures_and_stores(tmp_path, monkeypatch):
    monkeypatch.setattr(tune, "_BUDGET_MS", 0.5)
    monkeypatch.setattr(tune, "EXPERIMENTS", tune.EXPERIMENTS[:1])
    assert tune.main(["--out", str(tmp_path / "here.json")]) == 0
    assert gpu.read(tmp_path / "here.json").source.startswith("tuned ")


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert tune.main([]) == 1
    assert "--device: expected a GPU that PyTorch can use, got cuda" in capsys.readouterr().err
