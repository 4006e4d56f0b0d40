"""A local server (made by `server`) that shows runs while they train, side by side on one page: what `jaxtune report`
shows, kept up to date.

The server is the standard library's. It listens on the loopback address only, and answers no page of another site
(system/loopback.py), so that none can read runs through the browser.
"""

from __future__ import annotations

import http.server
import json
import threading
import urllib.parse
from collections.abc import Sequence
from pathlib import Path

from jaxtune.system.loopback import HOST, refusal
from jaxtune.train.display import metrics as m
from jaxtune.train.display.run_figures import JsonObject, RunFiles
from jaxtune.train.display.run_page import page


def server(runs: Sequence[Path], port: int = 0) -> http.server.ThreadingHTTPServer:
    """Makes the server of `jaxtune watch`, which shows the runs on one page at "/", and their figures as JSON at
    "/runs". It runs when the caller calls its serve_forever.

    Args:
      runs: the runs' folders; a run may start later.
      port: the port on the loopback address; 0 takes a free one.
    Raises:
      ValueError: the port is not available.
    """

    files = [RunFiles(run) for run in runs]
    reading = threading.Lock()  # each request has its own thread
    served: list[JsonObject] = []
    version = 0

    def figures(seen: str) -> JsonObject:
        """{"version": a number as text, "runs": the figures of each run}. The version grows when the figures change;
        if `seen`, the version that the page has, is still the same, "runs" is left out."""
        nonlocal served, version
        with reading:
            found = [_of(one) for one in files]
            if found != served:
                served, version = found, version + 1
            return {"version": str(version)} if seen == str(version) else {"version": str(version), "runs": served}

    class Handler(http.server.BaseHTTPRequestHandler):
        """Answers one request for the page or for the runs' figures; http.server makes one for each."""

        def do_GET(self):
            """Answers GET: "/" is the page, "/runs?seen=VERSION" its figures as JSON. The status is 403 for a request
            that comes from another site, and 404 for any other path."""
            asked = urllib.parse.urlsplit(self.path)
            if refusal(self.headers.get("Host"), self.headers.get("Origin")) is not None:
                self.send_error(403)
            elif asked.path == "/":
                self._answer(page("watch", None), "text/html")
            elif asked.path == "/runs":
                seen = urllib.parse.parse_qs(asked.query).get("seen", [""])[0]
                self._answer(json.dumps(figures(seen)), "application/json")
            else:
                self.send_error(404)

        def _answer(self, text: str, kind: str) -> None:
            """Sends `text` with status 200 and the content type `kind`."""
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


def _of(run: RunFiles) -> JsonObject:
    """The JSON object of one run for the page: its figures (RunFiles.page), or, if it has no metrics yet or cannot be
    read, {"name", "folder", "error": a sentence that says so}. The server asks for it at each request for figures, so
    that one run's errors do not hide the other runs."""
    named = {"name": run.folder.resolve().name, "folder": str(run.folder)}
    if not (run.folder / m.JSONL).is_file():
        return named | {"error": f"This run has not started: there is no {m.JSONL} yet."}
    try:
        return run.page()
    except Exception as error:  # one run's files may contain anything; the other runs are still shown
        return named | {"error": f"It cannot be shown: {type(error).__name__}: {error}"}
