"""Files that are no whole trace get an error that names them and says what would do."""

from __future__ import annotations

import gzip

import pytest
from programs import capture_on_cpu, torch_trace

from jaxtune.profile import TraceError, show


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


def test_the_latest_of_several_is_read(tmp_path):
    import os

    old, new = tmp_path / "1" / "a.pt.trace.json", tmp_path / "2" / "b.pt.trace.json"
    for file, steps in ((old, 1), (new, 3)):
        file.parent.mkdir()
        torch_trace(steps=steps).write(file)
    os.utime(old, (1, 1))
    assert len(show(tmp_path).steps_ms) == 3
