"""jaxtune report and jaxtune watch: the figures of runs, the page that draws them in a browser, and how runs end."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request

import pytest

from jaxtune import cli
from jaxtune.train.display import watch
from jaxtune.train.display.run_figures import RunFiles
from jaxtune.train.evaluation.held_out_answers import answers_to_show
from jaxtune.train.folder.run_state import RunState, read_state, recorded_state
from jaxtune.train.log import metrics
from jaxtune.train.log.metrics import read_metrics
from tests import patience

HOSTILE = "</pre></script><script>document.title = 'gone'</script><!--"


@pytest.fixture
def run(tmp_path):
    return made_run(tmp_path / "runs" / "mine")


def made_run(folder, rate=1e-3):
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
            "grad_norm": 1.0,
            "learning_rate": rate / n,
            "targets": 17,
            "tokens_per_second": 100.0 * n,
            "peak_memory_bytes": 2e9,
            "skipped": 0,
            "steps": 2,
            "step_seconds": 4.5,
            "data_wait_seconds": 1.0,
            "rewards/short/mean": 0.5,
        }
        for n in range(1, 8)
    ]
    lines += [
        {"step": 4, "time": 1041.0, "eval_loss": 1.5, "eval_seconds": 7.0},
        {"step": 7, "time": 9075.0, "eval_loss": 1.25},
    ]
    lines[4]["loss"] = "nan"
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"torn')
    config = {"model": {"path": HOSTILE}, "optim": {"learning_rate": rate}, "precision": "bf16"}
    (folder / "config.yaml").write_text(json.dumps(config))
    samples = [{"question": "2 + 2?", "expected": "4", "given": HOSTILE}]
    after = [{"question": "2 + 2?", "expected": "4", "given": "4"}]
    results = {
        "before": {"exact_match": 0.0, "rows": 1, "samples": samples},
        "after": {"exact_match": 1.0, "rows": 1, "samples": after},
    }
    (folder / "results.json").write_text(json.dumps(results))
    (folder / "state.json").write_text(json.dumps({"state": "failed", "why": "out of memory", "total_steps": 9}))
    return folder


def chart(page, key):
    return next(each for each in page["charts"] if each["key"] == key)


def test_the_figures_are_what_the_run_wrote(run):
    page = RunFiles(run).page()
    assert dict(page["facts"]) == {
        "steps": "7",
        "time": "1 min 15 s",
        "training loss": "4.0000 to 0.5714",
        "evaluation loss": "1.5000 to 1.2500",
        "exact match before training": "0.0 % of 1",
        "exact match after training": "100.0 % of 1",
        "speed, median": "400 tokens/s",
        "peak memory": "2.00 GB",
    }
    assert (page["state"], page["why"], page["step"], page["total"]) == ("failed", "out of memory", 7, 9)
    loss = chart(page, "loss")
    assert loss["line"]["x"] == [1, 2, 4, 5, 6, 7] and loss["dots"] == {"x": [4, 7], "y": [1.5, 1.25]}  # no NaN
    keys = ["loss", "rewards/short/mean", "grad_norm", "learning_rate", "tokens_per_second", "peak_memory_bytes"]
    assert [each["key"] for each in page["charts"]] == keys
    assert page["plan"] == ["plan: no <gate>", "  up"]
    assert page["samples"] == [{"question": "2 + 2?", "expected": "4", "before": HOSTILE, "given": "4"}]
    assert page["settings"] == {
        "model.path": json.dumps(HOSTILE),
        "optim.learning_rate": "0.001",
    }  # bf16 is the default


def test_evaluations_of_other_rows_and_the_last_one_that_failed(run):
    """The first and the last loss are of the same rows, whatever they are; so are the points that are drawn."""
    text = (run / "metrics.jsonl").read_text().removesuffix('{"torn')
    for step, loss, rows in ((8, 9.0, "before"), (9, 2.0, "now"), (10, 1.75, "now")):
        text += json.dumps({"step": step, "time": 1.0, "eval_loss": loss, "eval_rows": rows}) + "\n"
    (run / "metrics.jsonl").write_text(text)
    page = RunFiles(run).page()
    assert dict(page["facts"])["evaluation loss"] == "1.5000 to 1.7500"
    assert chart(page, "loss")["dots"]["x"] == [4, 7, 9, 10]
    (run / "metrics.jsonl").write_text(re.sub(r'"eval_loss": 1.75', '"eval_loss": "nan"', text))
    assert dict(RunFiles(run).page()["facts"])["evaluation loss"] == "1.5000 to nan"


def test_a_run_that_has_just_begun_has_a_page(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "time": 1.0}\n')
    page = RunFiles(tmp_path).page()
    assert (page["charts"], page["samples"], page["plan"], page["settings"]) == ([], [], [], {})
    assert page["facts"] == [["steps", "0"], ["time", "0 s"]] and page["state"] == "unknown"


def test_a_folder_without_a_run_is_refused(run, tmp_path, capsys):
    assert cli.main(["report", str(run), str(tmp_path)]) == 2
    assert "is not a run's folder: there is no metrics.jsonl in it" in capsys.readouterr().err


def test_a_page_of_several_runs_is_none_of_theirs(run, capsys, monkeypatch):
    runs = run.parent
    made_run(runs / "deep" / "other")
    monkeypatch.chdir(runs)
    assert cli.main(["report", "mine"]) == 0
    own = (run / "report.html").read_bytes()
    for _ in range(2):  # a page of ours is replaced
        assert cli.main(["report", "mine", "deep/other"]) == 0
    assert (run / "report.html").read_bytes() == own
    assert capsys.readouterr().out.splitlines()[-1] == "wrote comparison.html"
    assert "<title>mine, other - jaxtune</title>" in (runs / "comparison.html").read_text()
    (runs / "comparison.html").write_text("<title>a page of another program</title>")
    assert cli.main(["report", "mine", "deep/other"]) == 2
    assert "comparison.html is no page of jaxtune report: --output names another" in capsys.readouterr().err


def test_the_numbers_of_runs_as_a_table(run, tmp_path):
    other = made_run(tmp_path / "runs" / "other", rate=2e-3)
    file = tmp_path / "numbers.csv"
    assert cli.main(["report", str(run), str(other), "--csv", str(file)]) == 0
    rows = list(csv.DictReader(file.read_text().splitlines()))
    lines = read_metrics(run / "metrics.jsonl")
    assert [row["run"] for row in rows] == ["mine"] * len(lines) + ["other"] * len(lines)
    for row, line in zip(rows, lines + lines, strict=True):
        numbers = {key: value for key, value in line.items() if isinstance(value, int | float)}
        rate = 2.0 if row["run"] == "other" else 1.0
        for key in numbers.keys() & {"learning_rate"}:
            numbers[key] *= rate
        read = {key: float(value) for key, value in row.items() if value and key != "run"}
        assert read.keys() == numbers.keys()
        assert all(read[key] == pytest.approx(value, nan_ok=True) for key, value in numbers.items())


@pytest.mark.parametrize(
    ("objective", "key"),
    [(None, "loss"), ({"name": "sft"}, "loss"), ("grpo", "loss/grpo"), ({"name": "dpo"}, "loss/dpo")],
)
def test_losses_of_other_objectives_have_charts_of_their_own(run, objective, key):
    config = json.loads((run / "config.yaml").read_text())
    (run / "config.yaml").write_text(json.dumps(config | ({"objective": objective} if objective else {})))
    page = RunFiles(run).page()
    assert [each["key"] for each in page["charts"]][:2] == [key, "rewards/short/mean"]  # before the gradient's norm


# ---- in a browser


@pytest.fixture(scope="module")
def browser():
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        pytest.skip("no chromium, chromium-browser or google-chrome on this machine")
    return path


def opened(browser, tmp_path, address, *options):
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
    command = [browser, *flags, f"--user-data-dir={tmp_path / 'user'}", *options, address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patience.SECONDS)
    assert done.returncode == 0, done.stderr
    return done.stdout


def found(pattern, text):
    match = re.search(pattern, text, re.S)
    assert match is not None, pattern
    return match[0]


@pytest.mark.full
def test_a_report_of_two_runs_in_a_browser(run, tmp_path, browser, capsys):
    other = made_run(tmp_path / "runs" / "other", rate=2e-3)
    file = tmp_path / "page.html"
    assert cli.main(["report", str(run), str(other), "--output", str(file)]) == 0
    assert capsys.readouterr().out == f"wrote {file}\n"
    page = file.read_text()
    loads = re.sub(r"fetch\(`runs", "", page)  # which only the page of watch asks for
    assert HOSTILE not in page and not re.search(r"https?://(?!www\.w3\.org)|src=|@import|fetch\(", loads)
    dom = opened(browser, tmp_path, file.as_uri(), "--dump-dom", "--window-size=1200,1400")
    assert "<title>mine, other - jaxtune</title>" in dom  # the script in a sample and in the settings did not run
    loss = found(r'<figure data-key="loss">.*?</figure>', dom)
    lines = re.findall(r'class="curve"[^>]* d="([^"]*)"', loss)
    assert len(lines) == 2 and len(re.findall("<circle", loss)) == 4  # both runs over each other; two evaluations each
    heights = [float(point.split()[1]) for point in re.split("[ML]", lines[0])[1:]]
    assert heights == sorted(heights) and len(heights) == 6  # the loss falls, so the line goes down the page
    assert 'class="joined"' not in loss  # two evaluations are not joined
    assert dom.count('<figure data-key="') == 6 and dom.count('class="state bad">failed') == 2
    assert "step 7 of 9" in dom and '<div class="why bad">out of memory</div>' in dom
    settings = found(r'<table id="settings">.*?</table>', dom)
    assert (
        "optim.learning_rate" in settings and "0.002" in settings and "model.path" not in settings
    )  # only what differs
    assert '<td class="good">4</td>' in dom and '<td class="bad">&lt;/pre&gt;' in dom
    # A curve that does not move lies in the middle of its chart, between round numbers.
    ticks = re.findall(r'class="ytick">([^<]*)<', found(r'data-key="grad_norm".*?</figure>', dom))
    assert "1" in ticks and all(0.9 <= float(tick) <= 1.1 for tick in ticks)


@pytest.mark.full
def test_thirteen_runs_look_different_and_their_numbers_are_saved(tmp_path, browser):
    runs = [made_run(tmp_path / "runs" / f"r{n:02}") for n in range(13)]
    config = {"model": {"path": "m"}, "objective": {"name": "grpo"}}
    (runs[12] / "config.yaml").write_text(json.dumps(config))
    file = tmp_path / "page.html"
    cli.main(["report", *map(str, runs), "--output", str(file)])
    # What the button saves is read where it becomes a file.
    probe = """<script>
URL.createObjectURL = (blob) => {
  blob.text().then((text) => { document.querySelector("#note").textContent = text; });
  return "#";
};
document.querySelector("#numbers").click();
</script>"""
    file.write_text(file.read_text().replace("</body>", probe + "</body>"))
    dom = opened(browser, tmp_path, file.as_uri(), "--dump-dom", "--virtual-time-budget=3000")
    norm = found(r'<figure data-key="grad_norm">.*?</figure>', dom)
    looks = re.findall(r'class="curve" stroke="([^"]*)" stroke-dasharray="([^"]*)"', norm)
    assert len(looks) == len(set(looks)) == 13
    for key, curves in (("loss", 12), ("loss/grpo", 1)):
        assert found(f'<figure data-key="{key}">.*?</figure>', dom).count('class="curve"') == curves
    saved = list(csv.DictReader(found(r'(?<=<div id="note">)run,.*?(?=</div>)', dom).splitlines()))
    losses = [row for row in saved if row["run"] == "r03" and row["metric"] == "loss"]
    assert [row["value"] for row in losses if row["kind"] == "evaluation"] == ["1.5", "1.25"]
    assert [int(row["step"]) for row in losses if row["kind"] == "training"] == [1, 2, 4, 5, 6, 7]


@pytest.mark.parametrize("size", ["1280,1600", "390,2600"])
def test_a_screenshot_has_no_width_to_scroll(run, tmp_path, browser, size):
    file = tmp_path / "page.html"
    cli.main(["report", str(run), "--output", str(file)])
    probe = (
        "<script>document.title = document.documentElement.scrollWidth - document.documentElement.clientWidth</script>"
    )
    file.write_text(file.read_text().replace("</body>", probe + "</body>"))
    dom = opened(browser, tmp_path, file.as_uri(), "--dump-dom", f"--window-size={size}")
    assert "<title>0</title>" in dom
    shot = tmp_path / "shot.png"
    opened(browser, tmp_path, file.as_uri(), f"--screenshot={shot}", f"--window-size={size}")
    assert shot.stat().st_size > 20_000


def test_watch_serves_what_changes_and_nothing_to_others(run, tmp_path, browser):
    later = tmp_path / "later"
    with watch.server([run, later]) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://{watch.HOST}:{server.server_port}/"

        def runs(seen=""):
            with urllib.request.urlopen(f"{address}runs?seen={seen}", timeout=patience.SECONDS) as answer:
                return json.load(answer)

        first = runs()
        assert [each["name"] for each in first["runs"]] == ["mine", "later"]
        assert first["runs"][1]["error"].startswith("This run has not started")
        assert runs(first["version"]) == {"version": first["version"]}
        dom = opened(browser, tmp_path, address, "--dump-dom", "--virtual-time-budget=1500")
        assert dom.count("<figure") == 6 and "This run has not started" in dom
        made_run(later)
        assert "error" not in runs(first["version"])["runs"][1]
        stranger = urllib.request.Request(address, headers={"Host": "example.com"})
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(stranger, timeout=patience.SECONDS)
        server.shutdown()


# ---- how a run ends


def test_how_a_run_ended_is_recorded(tmp_path):
    with recorded_state(tmp_path, 9, (TimeoutError,)):
        assert json.loads((tmp_path / "state.json").read_text())["state"] == "running"
    assert read_state(tmp_path) == RunState("finished", "", 9)
    for error, state in (
        (TimeoutError("SIGTERM after step 3"), RunState("stopped", "SIGTERM after step 3", 9)),
        (KeyboardInterrupt(), RunState("stopped", "KeyboardInterrupt", 9)),
        (ValueError("rows ran out"), RunState("failed", "rows ran out", 9)),
    ):
        with pytest.raises(type(error)), recorded_state(tmp_path, 9, (TimeoutError,)):
            raise error
        assert read_state(tmp_path) == state


def test_a_state_that_cannot_be_written_ends_no_run(tmp_path, caplog):
    (tmp_path / "state.json").mkdir()
    with recorded_state(tmp_path, 9, ()):
        pass
    assert "state.json was not written" in caplog.text and read_state(tmp_path) == RunState("unknown")


def test_a_run_whose_process_is_gone_was_killed(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (tmp_path / "state.json").write_text('{"state": "running", "why": "", "total_steps": 9}')
    (tmp_path / "checkpoints").mkdir()
    lock = tmp_path / "checkpoints" / "run.lock"
    lock.write_text(json.dumps({"pid": process.pid, "host": socket.gethostname()}))
    try:
        assert read_state(tmp_path).name == "running"
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    assert read_state(tmp_path).name == "killed" and "killed" in read_state(tmp_path).why
    lock.write_text(json.dumps({"pid": process.pid, "host": "another"}))  # of which this machine cannot tell
    assert read_state(tmp_path).name == "running"
    lock.unlink()
    assert read_state(tmp_path).name == "killed"


@pytest.mark.parametrize(
    "text", ["", "7", "[]", "{}", '{"state": "dancing", "why": 1, "total_steps": "x"}', "[" * 9999]
)
def test_a_strange_state_is_unknown(tmp_path, text):
    (tmp_path / "state.json").write_text(text)
    assert read_state(tmp_path).name == "unknown"


def test_the_time_left_is_that_of_the_steps_left(run):
    (run / "state.json").write_text('{"state": "running", "why": "", "total_steps": 107}')
    (run / "checkpoints").mkdir()
    (run / "checkpoints" / "run.lock").write_text(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}))
    page = RunFiles(run).page()
    assert (page["state"], page["left"]) == ("running", "7 min 30 s")  # 100 steps of 4.5 s


@pytest.mark.full
def test_a_long_run_is_no_delay(tmp_path, monkeypatch):
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for n in range(1, 100_001):
            file.write(f'{{"step": {n}, "loss": {1 / n}, "learning_rate": 1e-4, "step_seconds": 1.0}}\n')
    files = RunFiles(tmp_path)
    files.page()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 100001, "loss": 0.5}\n')
    read, parsed = [], metrics.parsed
    monkeypatch.setattr(metrics, "parsed", lambda text: (read.append(text), parsed(text))[1])
    assert files.page()["step"] == 100_001
    assert len(read) == 1  # the new line


def test_samples_show_what_went_wrong():
    answers = [(str(n), "yes", "no" if n in (6, 8) else "yes") for n in range(10)]
    assert [question for question, *_ in answers_to_show(answers, 4)] == ["0", "1", "6", "8"]
    assert [question for question, *_ in answers_to_show(answers, 3)] == ["0", "1", "6"]
    assert answers_to_show(answers[:3], 5) == answers[:3] and len(answers_to_show(answers, 9)) == 9
    wrong = [(str(n), "yes", "no") for n in range(6)]
    assert answers_to_show(wrong, 4) == wrong[:4]
