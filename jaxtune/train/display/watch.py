"""A local server that shows runs while they train, on the loopback address only. It answers no page of another site, so
that none can read runs through the browser.
"""

from __future__ import annotations

import http.server
import json
import threading
import urllib.parse
from collections.abc import Sequence
from pathlib import Path

from jaxtune.system.loopback import HOST, refusal
from jaxtune.train.display.run_figures import JsonObject, RunFiles
from jaxtune.train.display.run_page import page
from jaxtune.train.log import metrics as m


def server(runs: Sequence[Path], port: int = 0) -> http.server.ThreadingHTTPServer:
    """A server of the page at "/" and its figures as JSON at "/runs", which runs in serve_forever.

    ValueError: the port is not available.
      runs: folders; a run may start later.
      port: 0: a free one.
    """

    files = [RunFiles(run) for run in runs]
    reading = threading.Lock()  # each request has its own thread
    served: list[JsonObject] = []
    version = 0

    def figures(page_version: str) -> JsonObject:
        """{"version", "runs"}; without "runs" if the page has this version."""
        nonlocal served, version
        with reading:
            run_figures = [_figures_of(run_files) for run_files in files]
            if run_figures != served:
                served, version = run_figures, version + 1
            return (
                {"version": str(version)} if page_version == str(version) else {"version": str(version), "runs": served}
            )

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            """ "/runs?seen=VERSION" gives figures; 403 for a request of another site."""
            url = urllib.parse.urlsplit(self.path)
            if refusal(self.headers.get("Host"), self.headers.get("Origin")) is not None:
                self.send_error(403)
            elif url.path == "/":
                self._answer(page("watch", None), "text/html")
            elif url.path == "/runs":
                page_version = urllib.parse.parse_qs(url.query).get("seen", [""])[0]
                self._answer(json.dumps(figures(page_version)), "application/json")
            else:
                self.send_error(404)

        def _answer(self, text: str, kind: str) -> None:
            data = text.encode("utf-8", "replace")
            self.send_response(200)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(data)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format, *args):
            pass  # the page sends a request every two seconds, and lines for them would hide the printed address

    try:
        return http.server.ThreadingHTTPServer((HOST, port), Handler)
    except (OSError, OverflowError) as error:
        raise ValueError(f"--port {port} is not available ({error}): choose another, or 0 for a free one") from None


def _figures_of(run: RunFiles) -> JsonObject:
    """The figures of a run, or {"name", "folder", "error"}, so that one run's errors do not hide the others."""
    named = {"name": run.folder.resolve().name, "folder": str(run.folder)}
    if not (run.folder / m.JSONL).is_file():
        return named | {"error": f"This run has not started: there is no {m.JSONL} yet."}
    try:
        return run.page()
    except Exception as error:  # one run's files may contain anything; the other runs are still shown
        return named | {"error": f"It cannot be shown: {type(error).__name__}: {error}"}
