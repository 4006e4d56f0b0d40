"""`jaxtune profile`: output, files, exit codes, and mistakes in one line."""

from __future__ import annotations

import json

import pytest
from programs import torch_trace

from jaxtune.cli import main


@pytest.fixture
def traces(tmp_path):
    slow = torch_trace(slower={"nvjet_tst_256x128": 20.0})
    return str(torch_trace().write(tmp_path / "a.json")), str(slow.write(tmp_path / "b.json"))


def test_show(traces, tmp_path, capsys):
    page, tables = tmp_path / "out.html", tmp_path / "out.json"
    assert main(["profile", "show", traces[0], "--json", str(tables), "--html", str(page)]) == 0
    out = capsys.readouterr().out
    assert "By category" in out
    assert "The three largest losses" in out
    assert json.loads(tables.read_text())["step_ms"] == pytest.approx(0.38)
    assert page.read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(("limit", "code"), [(None, 0), ("3%", 1), ("5.2%", 1), ("5.3%", 0), ("50%", 0)])
def test_compare_fails_if_slower_by_more(traces, limit, code, capsys):
    more = [] if limit is None else ["--fail-if-slower", limit]
    assert main(["profile", "compare", *traces, *more]) == code  # 20 of 380 us: 5.26 %
    assert "0.02 ms slower" in capsys.readouterr().out
    assert main(["profile", "compare", *reversed(traces), *more]) == 0
    assert main(["profile", "compare", traces[0], traces[0], "--fail-if-slower", "0%"]) == 0


@pytest.mark.parametrize("limit", ["3", "x%", "-1%", "nan%"])
def test_a_limit_without_sense_is_refused(traces, limit, capsys):
    assert main(["profile", "compare", *traces, f"--fail-if-slower={limit}"]) == 2
    assert "write a percentage such as 3%" in capsys.readouterr().err


def test_a_file_that_is_no_trace_is_one_line(tmp_path, capsys):
    file = tmp_path / "x.json"
    file.write_text("{}")
    assert main(["profile", "show", str(file)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
