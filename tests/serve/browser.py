"""A page in Chromium, driven through the pipe of its DevTools."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import patience

_FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-pipe",
]
_KEYS = {"Enter": ("Enter", 13, "\r"), "Escape": ("Escape", 27, ""), "Tab": ("Tab", 9, "")}


def chromium() -> str:
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        pytest.skip("no chromium, chromium-browser or google-chrome on this machine")
    return path


class Page:
    """Its console's errors and messages of its policy are in `errors`."""

    def __init__(self, commands: int, answers: int):
        self._commands, self._answers = commands, os.fdopen(answers, "rb", buffering=0)
        self._buffer, self._number, self._session = b"", 0, ""
        self.errors: list[str] = []
        target = self._send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._send(f"{domain}.enable")

    def open(self, address: str, width: int = 1200, height: int = 900, dark: bool = False, before: str = "") -> None:
        """before: a script that runs before the page's own."""
        phone = width < 600
        self._send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        self._send("Emulation.setTouchEmulationEnabled", enabled=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._send("Emulation.setEmulatedMedia", features=[scheme])
        if before:
            self._send("Page.addScriptToEvaluateOnNewDocument", source=before)
        self._send("Page.navigate", url=address)
        self.until("document.readyState === 'complete' && location.protocol !== 'about:'")

    def value(self, script: str) -> object:
        """Of an expression, awaited if it is a promise."""
        answer = self._send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def until(self, script: str) -> None:
        def told() -> object:
            return script, self.value("document.body.innerText"), self.errors

        patience.wait_until(lambda: self.value(script), told=told)

    def type(self, text: str) -> None:
        """At the focus, as from a keyboard."""
        self._send("Input.insertText", text=text)

    def press(self, key: str, shift: bool = False) -> None:
        name, code, text = _KEYS[key]
        event = {"key": name, "code": name, "windowsVirtualKeyCode": code, "modifiers": 8 * shift}
        self._send("Input.dispatchKeyEvent", type="keyDown", text=text, **event)
        self._send("Input.dispatchKeyEvent", type="keyUp", **event)

    def click(self, selector: str) -> None:
        """The middle of an element, as a mouse does."""
        box = self.value(f"document.querySelector({json.dumps(selector)}).getBoundingClientRect().toJSON()")
        x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
        for kind in ("mousePressed", "mouseReleased"):
            self._send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def screenshot(self, file: Path) -> None:
        file.write_bytes(base64.b64decode(self._send("Page.captureScreenshot")["data"]))

    def _send(self, method: str, **params: object) -> dict:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer)
                return answer["result"]
            self._note(answer)

    def _next(self) -> dict:
        while b"\0" not in self._buffer:
            data = self._answers.read(1 << 16)
            assert data, "the browser ended"
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def _note(self, event: dict) -> None:
        params = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"]))
        elif event.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"]["text"])


@contextlib.contextmanager
def browsing(folder: Path) -> Iterator[Page]:
    """A browser with its own profile in `folder`."""
    theirs_in, commands = os.pipe()
    answers, theirs_out = os.pipe()
    # The DevTools pipe is descriptors 3 and 4.
    line = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'
    process = subprocess.Popen(
        ["bash", "-c", line, "bash", chromium(), *_FLAGS, f"--user-data-dir={folder / 'user'}"],
        pass_fds=[theirs_in, theirs_out],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(theirs_in)
    os.close(theirs_out)
    try:
        yield Page(commands, answers)
    finally:
        os.close(commands)  # ends it
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
