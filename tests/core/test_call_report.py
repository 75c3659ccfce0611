import json

import pytest

import fastsparse_core
from fastsparse_core import call_report


@pytest.fixture(autouse=True)
def recording():
    call_report.start_recording()
    yield
    call_report.start_recording()
    call_report.stop_recording()


def test_calls_are_counted_by_line_and_kernel():
    for _ in range(3):
        call_report.record("scatter", "segments")
    call_report.record("GCNConv", "PyG", "explain mode")
    rows = {(row.call, row.by, row.reason): count for row, count in fastsparse_core.report().rows}
    assert rows == {("scatter", "segments", ""): 3, ("GCNConv", "PyG", "explain mode"): 1}
    assert "test_call_report.py" in fastsparse_core.report().rows[0][0].place
    assert "computed 3 of 4 calls" in str(fastsparse_core.report())
    (first, _) = json.loads(fastsparse_core.report().to_json())["rows"]
    assert (first["call"], first["calls"]) == ("scatter", 3)


def test_at_most_three_sentences_of_advice():
    for name in ("a", "b", "c", "d"):
        call_report.record(name, "PyG", "too slow", "Do it faster")
    advice = fastsparse_core.report().advice
    assert len(advice) == 3
    assert advice[0].startswith("a at ")
    assert advice[0].endswith(" ran 1 times without a kernel: too slow. Do it faster.")


def test_no_advice_where_most_calls_ran_on_a_kernel():
    for reason in ("the index is new", "", ""):
        call_report.record("scatter", "PyG" if reason else "segments", reason, "Keep it" if reason else "")
    assert fastsparse_core.report().advice == ()


def test_nothing_is_recorded_unless_asked_for():
    call_report.stop_recording()
    call_report.record("scatter", "segments")
    assert fastsparse_core.report().rows == ()
    assert "Recording starts with" in str(fastsparse_core.report())
