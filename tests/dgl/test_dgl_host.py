"""How much Python of ours a warm step runs: launch overhead decides the time of steps of small models."""

from __future__ import annotations

import torch
from dgl_cases import homogeneous
from dgl_layer_cases import CASES, Case, each_case
from frames import frames_of_step
from hook_cases import enabled

#: Limits of a warm step on the CPU: number of Python frames, and of files that they belong to.
LIMIT = (45, 12)


def step_frames(case: Case, *, which: int = 1) -> tuple[int, int]:
    """Frames and files of a step of the original (0) or of the drop-in (1)."""
    layer = case.pair(6, 4)[which]
    graph, x = homogeneous(), torch.randn(30, 6, requires_grad=True)
    rest = case.rest(graph, 6)

    def forward() -> torch.Tensor:
        out = case.run(layer, graph, x, *rest)
        return out if isinstance(out, torch.Tensor) else out[0] + out[1].sum()

    return frames_of_step(forward)


@each_case(CASES)
def test_frames_of_a_warm_step(case: Case) -> None:
    frames, files = step_frames(case)
    assert frames <= LIMIT[0], (frames, files)
    assert files <= LIMIT[1], (frames, files)


@each_case(CASES)
def test_enabled_layers_run_as_their_drop_ins_do(case: Case) -> None:
    frames, _ = step_frames(case)
    with enabled():
        found, _ = step_frames(case, which=0)
    assert found <= frames + 4
