"""Files that are no whole trace get an error that names them and says what would do."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from programs import capture_on_cpu, torch_trace

from jaxtune.profile import TraceError, show
from jaxtune.profile.messages import XSpace


@pytest.fixture(scope="module")
def trace_file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reading") / "profile"
    capture_on_cpu(folder)
    return folder / "trace.xplane.pb.gz"


def refused(path, message):
    with pytest.raises(TraceError, match=message) as caught:
        show(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value).strip()


def test_nothing_there(tmp_path):
    refused(tmp_path / "no", "does not exist")
    refused(tmp_path, "holds no trace")
    (tmp_path / "notes.txt").write_text("x")
    refused(tmp_path, "but notes.txt")


def test_empty_files(tmp_path):
    for name in ("trace.xplane.pb", "trace.json"):
        (tmp_path / name).write_bytes(b"")
        refused(tmp_path / name, "is empty")


def test_foreign_file(tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"\x08\x00\x00\x00\x00\x00\x00\x00{}      ")
    refused(file, "is no trace")


@pytest.mark.full
@pytest.mark.parametrize("keep", [0.3, 0.9, 0.999])
def test_a_cut_gzip(tmp_path, trace_file, keep):
    data = trace_file.read_bytes()
    file = tmp_path / "trace.xplane.pb.gz"
    file.write_bytes(data[: int(keep * len(data))])
    refused(file, "cut or damaged")


@pytest.mark.parametrize("keep", [0.05, 0.5, 0.97])
def test_a_cut_xplane(tmp_path, trace_file, keep):
    data = gzip.decompress(trace_file.read_bytes())
    file = tmp_path / "trace.xplane.pb"
    file.write_bytes(data[: int(keep * len(data))])
    refused(file, "not a whole XPlane file|no device work")


def test_bytes_that_are_no_protobuf(tmp_path):
    file = tmp_path / "trace.xplane.pb"
    file.write_bytes(bytes(range(255, 0, -1)) * 20)
    refused(file, "not a whole XPlane file")


def test_a_damaged_record_beside_the_trace(tmp_path, trace_file):
    (tmp_path / trace_file.name).write_bytes(trace_file.read_bytes())
    (tmp_path / "profile.json").write_text("{")
    with pytest.raises(TraceError, match="profile.json is damaged"):
        show(tmp_path)


def test_the_peak_is_what_the_allocator_said(tmp_path, trace_file):
    """The trace of a CPU has no allocator: without a record, the largest program's buffers are all that is known."""
    (tmp_path / trace_file.name).write_bytes(trace_file.read_bytes())
    report = show(tmp_path)
    assert report.peak_memory_bytes == sum(row["bytes"] for row in report.buffers) > 123
    (tmp_path / "profile.json").write_text('{"peak_memory_bytes": 123}')
    assert show(tmp_path).peak_memory_bytes == 123


def test_the_latest_of_several_is_read(tmp_path):
    import os

    old, new = tmp_path / "1" / "a.pt.trace.json", tmp_path / "2" / "b.pt.trace.json"
    for file, steps in ((old, 1), (new, 3)):
        file.parent.mkdir()
        torch_trace(steps=steps).write(file)
    os.utime(old, (1, 1))
    assert len(show(tmp_path).steps_ms) == 3


# ---- made to hurt


@pytest.mark.parametrize("name", ["trace.xplane.pb.gz", "bomb.json.gz"])
def test_a_gzip_bomb_is_refused_before_it_fills_the_memory(tmp_path, name, monkeypatch):
    read = []
    real = gzip.GzipFile.read
    monkeypatch.setattr(gzip.GzipFile, "read", lambda self, size=-1: (read.append(size), real(self, size))[1])
    file = tmp_path / name
    file.write_bytes(gzip.compress(bytes(64 << 20), 9))  # 64 MB of zeros in 65 kB
    refused(file, r"is no trace: its [\d,]+ bytes unpack to more than 16,777,216, and traces grow less than 200 times")
    assert read and all(0 < size <= (16 << 20) + 1 for size in read)


def test_json_nested_too_deeply(tmp_path):
    file = tmp_path / "trace.json"
    file.write_bytes(b"[" * 100_000)
    refused(file, "not whole JSON|is damaged")


@pytest.fixture(scope="module")
def good_bytes(tmp_path_factory, trace_file):
    file = torch_trace().write(tmp_path_factory.mktemp("good") / "t.json")
    return {"trace.json": file.read_bytes(), "trace.xplane.pb": gzip.decompress(trace_file.read_bytes())}


EDITS = st.lists(
    st.tuples(
        st.floats(0, 1, exclude_max=True),  # where
        st.integers(0, 12),  # bytes taken out
        st.sampled_from(
            [b"", b"0", b"-", b"1e999", b"NaN", b"null", b"[]", b"{}", b'"x"', b"\xff", b"\x00", b"\x80\x80"]
        ),
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(EDITS, st.sampled_from(["trace.json", "trace.json", "trace.json", "trace.xplane.pb"]))
def test_damaged_bytes_are_read_or_refused(tmp_path, good_bytes, edits, name):
    data = bytearray(good_bytes[name])
    for where, size, new in edits:
        at = int(where * len(data))
        data[at : at + size] = new
    file = tmp_path / name
    file.write_bytes(data)
    try:
        show(file).to_text()
    except TraceError as error:
        assert str(file) in str(error)


def test_kernel_names_cannot_steer_the_terminal(tmp_path):
    trace = torch_trace()
    for row in trace.rows:
        if row["name"] == "nvjet_tst_128x256":
            row["name"] = "kernel\x1b[2J[/b]\u202e"
    text = show(trace.write(tmp_path / "t.json")).to_text(width=140)
    assert "\x1b" not in text and "\u202e" not in text and r"kernel\x1b[2J[/b]\u202e" in text


def test_what_a_trace_says_of_itself_stands_in_the_head(tmp_path):
    file = torch_trace().write(tmp_path / "t.json")
    content = json.loads(file.read_text())
    content = content if isinstance(content, dict) else {"traceEvents": content}
    file.write_text(json.dumps(content | {"what": "a model, bf16", "tokens_per_step": 4096}))
    report = show(file)
    lines = report.to_text().splitlines()
    assert lines[1] == "a model, bf16" and "tokens/s" in lines[2] and report.tokens_per_step == 4096
    assert "a model, bf16" in report.to_html()


def test_a_trace_that_names_no_program_is_one_step(tmp_path):
    """As one of copies alone; its work is not read as idle time."""
    file = Path(__file__).parent / "data" / "ours.xplane.pb.gz"
    space = XSpace.FromString(gzip.decompress(file.read_bytes()))
    for entry in (entry for plane in space.planes for entry in plane.stat_metadata):
        entry.value.name = entry.value.name.replace("hlo_module", "other")
    (tmp_path / "t.xplane.pb").write_bytes(space.SerializeToString())
    report, whole = show(tmp_path / "t.xplane.pb"), show(file)
    assert len(report.steps_ms) == 1 and report.step_ms >= sum(whole.steps_ms)
    named = {row.name: row.ms for row in report.categories}
    assert 0 < named["idle"] < 0.5 * report.step_ms and sum(named.values()) == pytest.approx(report.step_ms)


def test_idle_stands_in_the_table_of_scopes_however_many_there_are():
    report = show(Path(__file__).parent / "data" / "ours.xplane.pb.gz")
    assert len(report.scopes) > 20
    scopes = report.to_text().split("By scope")[1].split("Top kernels")[0].strip().splitlines()
    (idle,) = [row for row in report.scopes if row.name == "idle"]
    assert scopes[-1].split() == ["idle", f"{idle.ms:.2f}", f"{100 * idle.share:.1f}", "%"]
    assert " more)" in scopes[-2]
    assert not [row.name for row in report.scopes if row.name.count("contract") > 1]
