import json

import pytest
import torch

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


def test_calls_inside_of_a_call_are_listed_and_not_counted(monkeypatch):
    monkeypatch.setenv("COLUMNS", "110")
    for _ in range(2):
        with call_report.inside("GATConv"):
            call_report.record("softmax", "segments")
            with call_report.inside("update_all"):
                call_report.record("scatter", "PyG", "the index is new")
        call_report.record("GATConv", "PyG", "explain mode")
    call_report.record("softmax", "segments")
    found = fastsparse_core.report()
    assert {(row.call, row.caller): count for row, count in found.rows} == {
        ("softmax", "GATConv"): 2,
        ("scatter", "update_all"): 2,
        ("GATConv", ""): 2,
        ("softmax", ""): 1,
    }
    assert "computed 1 of 3 calls" in str(found)
    assert "softmax in GATConv" in str(found)


def test_calls_of_a_symbolic_trace_do_not_count():
    def forward(x):
        call_report.record("scatter", "segments")
        return x + 1

    torch.fx.symbolic_trace(forward)
    assert not fastsparse_core.report().rows
    forward(torch.ones(1))
    assert len(fastsparse_core.report().rows) == 1


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


def timed_calls(monkeypatch, seconds):
    """Records two nested calls on a clock that goes on by some seconds each time it is read."""
    now = iter(range(100, 10**6, seconds))
    monkeypatch.setattr(call_report.time, "perf_counter", lambda: next(now))
    call_report.start_timing()

    @call_report.timed
    def inner():
        call_report.record("scatter", "segments")
        return "result"

    @call_report.timed
    def outer():
        out = inner()
        call_report.record("GCNConv", "spmm")
        return out

    return outer


def test_times_are_those_of_the_row_that_a_call_records(monkeypatch):
    assert timed_calls(monkeypatch, 2)() == "result"
    found = fastsparse_core.report()
    times = {row.call: found.times.host_ms[row] for row, _ in found.rows}
    assert times == {"scatter": 2000, "GCNConv": 6000}
    assert "host ms" in str(found)
    assert "GPU ms" not in str(found)
    page = json.loads(found.to_json())
    assert [row["host_ms"] for row in page["rows"]] == [2000, 6000]
    assert page["total_s"] == 6


def test_a_script_that_waits_for_batches_is_told(monkeypatch):
    original = torch.utils.data.DataLoader.__iter__
    call = timed_calls(monkeypatch, 1)
    for _ in torch.utils.data.DataLoader([1, 2, 3]):
        call()
    found = fastsparse_core.report()
    assert found.times.loading == 4
    assert found.advice == ()
    for _ in range(20):
        list(torch.utils.data.DataLoader([1, 2, 3]))
    (advice,) = fastsparse_core.report().advice
    assert advice.startswith("The script waits for batches in ")
    assert advice.endswith(": use the loaders of FastSparse, or more num_workers.")
    call_report.stop_recording()
    assert torch.utils.data.DataLoader.__iter__ is original


def test_a_gpu_that_waits_for_python_is_told(monkeypatch):
    timed_calls(monkeypatch, 1)()
    (row, _), *_ = fastsparse_core.report().rows
    times = call_report.Times(host_ms={row: 90.0}, gpu_ms={row: 100.0}, steps=10)
    (advice,) = call_report.CallReport(((row, 200),), times).advice
    assert "the 20 calls of a training step take the host 9.00 ms" in advice
    inner = call_report.Row("train.py:7", "scatter", "segments", caller="GCNConv")
    times.host_ms[inner] = times.gpu_ms[inner] = 80.0  # part of the time of `row`
    assert call_report.CallReport(((row, 200), (inner, 100)), times).advice == (advice,)
    times.host_ms[row] = 20.0
    assert call_report.CallReport(((row, 200), (inner, 100)), times).advice == ()


def test_optimizer_steps_are_counted_until_recording_stops():
    call_report.start_timing()
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    optimizer.step()
    call_report.stop_recording()
    optimizer.step()
    assert fastsparse_core.report().times.steps == 1


@pytest.mark.gpu
def test_events_are_read_when_the_report_is_made():
    call_report.start_timing()
    x = torch.rand(4000, 4000, device="cuda")

    @call_report.timed
    def product():
        call_report.record("product", "mm")
        return x @ x

    for _ in range(1000):
        product()
    ((row, count),) = fastsparse_core.report().rows
    assert count == 1000
    assert fastsparse_core.report().times.gpu_ms[row] > fastsparse_core.report().times.host_ms[row] > 0


def test_places_are_not_wrapped(monkeypatch):
    monkeypatch.setenv("COLUMNS", "110")
    row = call_report.Row(
        "graph_regression/train_model.py:1234", "AcceleratedConv", "k " * 40, "because " * 20
    )
    assert row.place in str(call_report.CallReport(((row, 3),)))


def test_long_reports_group_lines_and_fit_the_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "90")
    places = [f"/home/user/project/models/layers.py:{line}" for line in range(100, 140)]
    alike = [call_report.Row(place, "softmax", "PyG", "few edges " * 6, "Nothing " * 12) for place in places]
    rare = [call_report.Row("train.py:7", f"Layer{i}", "PyG", "a hook") for i in range(30)]
    times = call_report.Times(host_ms=dict.fromkeys(alike, 0.25))
    found = call_report.CallReport((*[(row, 5) for row in alike], *[(row, 1) for row in rare]), times)
    text = str(found)
    (line,) = (line for line in text.splitlines() if "softmax" in line and "│" in line)
    assert "200" in line
    assert "10.0" in line
    flat = " ".join(text.replace("│", " ").split())
    assert "and 39 more" in flat
    assert "The 70 rows of this report are grouped by call and reason. 11 lines with 11 calls are not" in flat
    assert max(map(len, text.splitlines())) <= 90
    assert len(text.splitlines()) < 50
    assert len(json.loads(found.to_json())["rows"]) == 70


def test_short_reports_show_every_line(monkeypatch):
    monkeypatch.setenv("COLUMNS", "110")
    rows = [(call_report.Row(f"train.py:{line}", "softmax", "PyG", "few edges"), 1) for line in range(20)]
    text = str(call_report.CallReport(tuple(rows)))
    assert all(f"train.py:{line} " in text for line in range(20))
    assert "grouped" not in text
