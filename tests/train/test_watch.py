"""jaxtune watch: runs as they go, for this machine alone, seen by a browser."""

from __future__ import annotations

import http.client
import json
import shutil
import subprocess
import threading

import pytest

from jaxtune import cli
from jaxtune.train.display import watch
from tests import patience

HOSTILE = "<script>document.title = 'gone'</script>"


@pytest.fixture
def runs(tmp_path):
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()
        (folder / "config.yaml").write_text(f"output: '{HOSTILE}'\n")
        begin = json.dumps({"step": 0, "time": 0.0, "load_seconds": 1.0, "plan": [f"plan of the {folder.name}"]})
        (folder / "metrics.jsonl").write_text(begin + "\n" + "".join(line(n) for n in range(1, 6)))
    return [*folders, tmp_path / "to come"]


def line(step: int) -> str:
    return (
        json.dumps(
            {
                "step": step,
                "time": 10.0 * step,
                "loss": 4.0 / step,
                "learning_rate": 1e-3,
                "tokens_per_second": 100.0 * step,
                "peak_memory_bytes": 2e9,
            }
        )
        + "\n"
    )


@pytest.fixture
def port(runs):
    with watch.server(runs) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def get(port: int, path: str, host: str | None = None, **headers: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection(watch.HOST, port, timeout=patience.SECONDS)
    connection.request("GET", path, headers={"Host": host or f"localhost:{port}"} | headers)
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def test_the_figures_follow_the_runs(runs, port):
    status, text = get(port, "/runs")
    first, second, later = json.loads(text)["runs"]
    assert status == 200 and len(first["charts"]) == len(second["charts"]) == 4
    assert ["training loss", "4.0000 to 0.8000"] in second["facts"] and "This run has not started" in later["error"]
    with (runs[1] / "metrics.jsonl").open("a") as file:
        file.write(line(6))
    assert ["training loss", "4.0000 to 0.6667"] in json.loads(get(port, "/runs")[1])["runs"][1]["facts"]
    runs[2].mkdir()
    (runs[2] / "metrics.jsonl").write_text(line(1))
    assert "error" not in json.loads(get(port, "/runs")[1])["runs"][2]


def test_only_this_machine_is_answered(port):
    assert get(port, "/", "elsewhere.example:80")[0] == get(port, "/runs", f"127.0.0.1.example:{port}")[0] == 403
    assert get(port, "/runs", Origin="https://elsewhere.example")[0] == get(port, "/runs", Origin="null")[0] == 403
    assert get(port, "/runs", Origin=f"http://localhost:{port}")[0] == 200
    assert get(port, "/metrics.jsonl")[0] == get(port, "/../first/config.yaml")[0] == 404


def test_a_port_that_is_taken_is_said(runs, port, capsys):
    assert cli.main(["watch", str(runs[0]), "--port", str(port)]) == 2
    assert f"--port {port} is not available" in capsys.readouterr().err


def test_a_browser_shows_the_runs_over_each_other(port, tmp_path):
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        pytest.skip("no chromium, chromium-browser or google-chrome on this machine")
    command = [
        browser,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--dump-dom",
        f"--user-data-dir={tmp_path}/b",
        "--virtual-time-budget=3000",
        f"http://127.0.0.1:{port}/",
    ]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=patience.SECONDS, check=True).stdout
    assert "<title>watch - jaxtune</title>" in dom  # the script in the settings did not run
    assert dom.count('<section class="run">') == 3 and dom.count("<figure") == 4 and dom.count('class="curve"') == 8
    assert all(f"plan of the {name}" in dom for name in ("first", "second")) and "This run has not started" in dom
