"""A local server that shows runs while they train, side by side on one page: what `jaxtune report` shows, kept up to
date.

The server is the standard library's. It listens on the loopback address only, and answers no page of another site
(system/loopback.py), so that none can read runs through the browser.
"""

from __future__ import annotations

import html
import http.server
import threading
from collections.abc import Sequence
from pathlib import Path

from jaxtune.system.loopback import HOST, refusal
from jaxtune.train.display import metrics as m
from jaxtune.train.display.run_page import STYLE, Run

_SECONDS = 2
_SCRIPT = """
let shown = "";
async function look() {
  const note = document.querySelector("#note");
  try {
    const text = await (await fetch("runs")).text();
    note.textContent = "";
    if (text !== shown) document.querySelector("main").innerHTML = shown = text;
  } catch { note.textContent = "jaxtune watch has ended: the figures stay as they were"; }
}
look();
setInterval(look, SECONDS * 1000);
""".replace("SECONDS", str(_SECONDS))
_PAGE = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<link rel="icon" href="data:,"><title>jaxtune watch</title><style>{STYLE}
main {{ max-width: none; display: grid; gap: 28px; grid-template-columns: repeat(auto-fit, minmax(340px, 1fr)); }}
main .grid {{ grid-template-columns: repeat(auto-fit, minmax(320px, 1fr)); }} section {{ min-width: 0; }}
td {{ overflow-wrap: anywhere; }} #note {{ color: var(--second); padding: 0 20px; }}
</style></head><body><p id="note"></p><main></main><script>{_SCRIPT}</script></body></html>
"""


def server(runs: Sequence[Path], port: int = 0) -> http.server.ThreadingHTTPServer:
    """A server, not yet running (serve_forever), of a page with these runs' folders; port 0 takes a free one.

    Raises:
      ValueError: the port is not available.
    """

    pages = [Run(run, f"run{i}-") for i, run in enumerate(runs)]
    drawing = threading.Lock()  # each request has its own thread

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            if refusal(self.headers.get("Host"), self.headers.get("Origin")) is not None:
                self.send_error(403)
            elif self.path == "/":
                self._answer(_PAGE)
            elif self.path == "/runs":
                with drawing:
                    sections = [f"<section>{_of(page)}</section>" for page in pages]
                self._answer("\n".join(sections))
            else:
                self.send_error(404)

        def _answer(self, text: str) -> None:
            data = text.encode("utf-8", "replace")
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
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


def _of(page: Run) -> str:
    """The HTML of one run, or a sentence if it has no metrics yet or cannot be read."""
    begin = f"<h1>{html.escape(page.folder.name)}</h1>"
    if not (page.folder / m.JSONL).is_file():
        return f'{begin}<p class="soft">This run has not started: there is no {m.JSONL} yet.</p>'
    try:
        return page.body()
    except Exception as error:  # one run's files may contain anything; the other runs are still shown
        return f'{begin}<p class="soft">It cannot be shown: {html.escape(f"{type(error).__name__}: {error}")}</p>'
