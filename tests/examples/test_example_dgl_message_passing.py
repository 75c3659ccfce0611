"""examples/dgl_message_passing.py end to end on a tiny graph: five models of update_all and apply_edges."""

from __future__ import annotations

import pytest
import torch


@pytest.mark.parametrize("model", ["gcn", "gat", "gin", "rgcn", "gated-gcn"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_both_train_alike(model: str, device: str, capsys: pytest.CaptureFixture[str]) -> None:
    """DGL's own code on the CPU, and the same with FastSparse on the device."""
    pytest.importorskip("fastsparse_dgl", exc_type=ImportError)
    import dgl_message_passing

    sizes = ["--nodes", "2000", "--edges", "40000", "--hidden", "16", "--epochs", "16"]
    plain, enabled = dgl_message_passing.main([*sizes, "--model", model, "--device", device]).values()
    torch.testing.assert_close(torch.tensor(enabled.losses), torch.tensor(plain.losses), rtol=1e-3, atol=1e-4)
    assert enabled.losses[-1] < 0.9 * enabled.losses[0]
    assert enabled.accuracy == pytest.approx(plain.accuracy, abs=0.02)
    assert enabled.accuracy > 0.3  # one of five by chance
    title, *rows = capsys.readouterr().out.splitlines()
    assert [row.split()[0] for row in rows] == [model] * 2
    assert "ms per epoch" in title
