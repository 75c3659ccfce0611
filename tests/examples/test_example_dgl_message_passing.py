"""examples/dgl_message_passing.py end to end on a tiny graph."""

from __future__ import annotations

import pytest
import torch


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_both_train_alike(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("fastsparse_dgl", exc_type=ImportError)
    import dgl_message_passing

    arguments = ["--nodes", "300", "--edges", "3000", "--hidden", "8", "--epochs", "6", "--device", device]
    plain, enabled = dgl_message_passing.main(arguments).values()
    torch.testing.assert_close(torch.tensor(enabled.losses), torch.tensor(plain.losses), rtol=1e-3, atol=1e-4)
    assert enabled.losses[-1] < enabled.losses[0]
    assert capsys.readouterr().out.count("ms per epoch") == 2
