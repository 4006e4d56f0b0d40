"""jaxtune report: one page that needs no network, with what the run wrote, seen by a browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess

import pytest

from jaxtune import cli
from jaxtune.train.display.run_page import run_page

HOSTILE = "</pre><script>document.title = 'gone'</script>"


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "runs" / "mine"
    folder.mkdir(parents=True)
    lines = [
        {"step": 0, "time": 1000.0, "compile_seconds": 3.0, "plan": ["plan: keep all", "did not fit"]},
        {"step": 0, "time": 1000.0, "compile_seconds": 2.0, "plan": ["plan: no <gate>", "  up"]},
    ]
    lines += [
        {
            "step": n,
            "time": 1000.0 + 10 * n,
            "loss": 4.0 / n,
            "learning_rate": 1e-3 / n,
            "tokens_per_second": 100.0 * n,
            "peak_memory_bytes": 2e9,
            "skipped": 0,
            "steps": 2,
            "step_seconds": 4.5,
            "data_wait_seconds": 1.0,
        }
        for n in range(1, 8)
    ]
    lines += [
        {"step": 4, "time": 1041.0, "eval_loss": 1.5, "eval_seconds": 7.0},
        {"step": 7, "time": 9075.0, "eval_loss": 1.25},
    ]
    lines[4]["loss"] = "nan"
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"torn')
    (folder / "config.yaml").write_text(f"output: '{HOSTILE}'\n")
    samples = [{"question": "2 + 2?", "expected": "4", "given": HOSTILE}]
    after = [{"question": "2 + 2?", "expected": "4", "given": "4"}]
    results = {
        "before": {"exact_match": 0.0, "rows": 1, "samples": samples},
        "after": {"exact_match": 1.0, "rows": 1, "samples": after},
    }
    (folder / "results.json").write_text(json.dumps(results))
    return folder


def test_the_page_has_what_the_run_wrote(run, capsys):
    assert cli.main(["report", str(run)]) == 0
    page = (run / "report.html").read_text()
    assert capsys.readouterr().out == f"wrote {run / 'report.html'}\n"
    for fact in (
        "4.0000, 0.5714",
        "1.5000, 1.2500",
        "0.0 % before training, 100.0 % after training",
        "400 tokens/s",
        "2.00 GB",
        "<td>1:15</td>",
    ):
        assert fact in page, fact
    loss = re.search(r'<figure id="loss">.*?</figure>', page, re.S)[0]
    first, second = re.findall(r'<polyline class="\w+" points="([^"]*)"', loss)
    assert (len(first.split()), len(second.split())) == (6, 2)  # what is not finite is left out
    heights = [float(point.split(",")[1]) for point in first.split()]
    assert heights == sorted(heights)  # the loss falls, so the line goes down the page
    assert '<div id="plan"><p>plan: no &lt;gate&gt;</p><p class=in>up</p></div>' in page and "keep all" not in page
    assert HOSTILE not in page and not re.search(r"https?://(?!www\.w3\.org)", page)


def test_evaluations_of_other_rows_and_the_last_one_that_failed(run):
    """The first and the last loss are of the same rows, whatever they are."""
    with (run / "metrics.jsonl").open("a") as file:
        for step, loss, rows in ((8, 9.0, "before"), (9, 2.0, "now"), (10, 1.75, "now")):
            file.write("\n" + json.dumps({"step": step, "time": 1.0, "eval_loss": loss, "eval_rows": rows}))
    assert "<td>1.5000, 1.7500</td>" in run_page(run)
    text = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(re.sub(r'"eval_loss": 1.75', '"eval_loss": "nan"', text))
    assert "<td>1.5000, nan</td>" in run_page(run)


def test_a_run_that_has_just_begun_has_a_page(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "time": 1.0}\n')
    page = run_page(tmp_path)
    assert "<figure" not in page and "Samples" not in page and "Plan" not in page and 'id="facts"' in page


def test_a_folder_without_a_run_is_refused(tmp_path, capsys):
    assert cli.main(["report", str(tmp_path)]) == 2
    assert "is not a run's folder: there is no metrics.jsonl in it" in capsys.readouterr().err


def test_a_browser_shows_it_and_runs_nothing_of_it(run, tmp_path):
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        pytest.skip("no chromium, chromium-browser or google-chrome on this machine")
    cli.main(["report", str(run), "--output", str(tmp_path / "page.html")])
    command = [
        browser,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--dump-dom",
        f"--user-data-dir={tmp_path}/b",
        f"file://{tmp_path}/page.html",
    ]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True).stdout
    assert "<title>mine - jaxtune</title>" in dom  # the script in a sample and in the settings did not run
    assert dom.count("<figure") == 4 and dom.count('id="samples"') == 1
