"""The faults of tests/mutate.py still fit the code and the tests."""

from __future__ import annotations

import re

import pytest
from mutate import CHECKOUT, FAULTS, Fault


def test_there_are_thirty_faults_and_all_differ():
    assert len(FAULTS) >= 30
    assert len({(fault.file, fault.text) for fault in FAULTS}) == len(FAULTS)


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.what for fault in FAULTS])
def test_fault_fits(fault: Fault):
    assert (CHECKOUT / fault.file).read_text().count(fault.text) == 1
    assert fault.replacement != fault.text
    for test in fault.tests:
        file, _, name = test.partition("::")
        source = (CHECKOUT / file).read_text()
        assert not name or re.search(rf"^def {name}\(", source, re.MULTILINE), test
