"""Objects that a thread stores for its step live as long as they are used, in every version of PyTorch."""

import ctypes
import sys

import pytest
import torch

from fastsparse_core import recorded


@pytest.mark.parametrize("takes_reference", [None, False], ids=["as installed", "before PyTorch 2.12"])
def test_references_are_balanced(takes_reference, monkeypatch):
    stash = torch._C._stash_obj_in_tls

    def without_reference(key: str, value: object) -> None:
        stash(key, value)
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(value))

    if takes_reference is False and recorded._takes_no_reference():
        pytest.skip("that is how the installed one is")
    recorded._takes_no_reference.cache_clear()
    if takes_reference is False:
        monkeypatch.setattr(torch._C, "_stash_obj_in_tls", without_reference)
    run = recorded.StepRun(has_padding=False, of_edges=None)
    count = sys.getrefcount(run)
    for _ in range(100):
        with recorded.running(run), recorded.without_dropout():
            assert recorded.current() is run
    assert sys.getrefcount(run) == count
    recorded._takes_no_reference.cache_clear()
