"""A real headless Chromium, driven by the DevTools protocol over a pipe: no port, no library.

https://chromedevtools.github.io/devtools-protocol/ ; messages are JSON, each ended by a zero byte.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any


def find_chromium() -> str | None:
    """The browser's program: CHROMIUM, or Debian's or another's by name."""
    names = (os.environ.get("CHROMIUM"), "chromium", "chromium-browser", "google-chrome", "chrome")
    return next((found for name in names if name and (found := shutil.which(name))), None)


class Browser:
    """One page. Console messages and errors are collected in `problems`."""

    def __init__(self, program: str):
        self.problems: list[str] = []
        self.requests: list[str] = []
        self._home = tempfile.mkdtemp(prefix="chromium-")
        mine_read, theirs_write = os.pipe()
        theirs_read, mine_write = os.pipe()
        options = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--disable-background-networking",
            "--hide-scrollbars",
            "--remote-debugging-pipe",
            f"--user-data-dir={self._home}",
        ]
        shell = f'exec "$0" "$@" 3<&{theirs_read} 4>&{theirs_write}'
        self._process = subprocess.Popen(
            ["bash", "-c", shell, program, *options, "about:blank"],
            pass_fds=(theirs_read, theirs_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_read)
        os.close(theirs_write)
        self._read, self._write, self._buffer, self._last = mine_read, mine_write, b"", 0
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command; events that arrive meanwhile are noted."""
        self._last += 1
        message: dict[str, Any] = {"id": self._last, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._message(300.0)
            if answer.get("id") == self._last:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]

    def _message(self, timeout: float) -> dict[str, Any]:
        deadline = time.monotonic() + timeout
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "chromium does not answer"
            data = os.read(self._read, 1 << 20)
            assert data, "chromium has gone"
            self._buffer += data
        line, self._buffer = self._buffer.split(b"\0", 1)
        message: dict[str, Any] = json.loads(line)
        self._note(message)
        return message

    def _note(self, message: dict[str, Any]) -> None:
        method, params = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.problems.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.problems.append(" ".join(str(a.get("value", a.get("description"))) for a in params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.problems.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    def open(self, path: Path, width: int, height: int = 900, dark: bool = False) -> None:
        """Loads a file at a window size and waits until its charts are drawn."""
        self.resize(width, height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=path.resolve().as_uri())
        self.wait(
            "document.readyState === 'complete' && document.documentElement.dataset.drawn !== undefined"
        )

    def resize(self, width: int, height: int) -> None:
        """The window's inner size; a phone's, below 600 pixels."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression; promises are waited for."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, expression: str, timeout: float = 300.0) -> None:
        """Until an expression is true."""
        deadline = time.monotonic() + timeout
        while not self.evaluate(expression):
            assert time.monotonic() < deadline, f"never true: {expression}; problems: {self.problems}"
            time.sleep(0.05)

    def click(self, selector: str) -> None:
        """A real mouse click in the middle of an element."""
        element = f"document.querySelector({json.dumps(selector)})"
        self.evaluate(f"{element}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
        box = self.evaluate(
            f"(() => {{const b = {element}.getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2]}})()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)

    def close(self) -> None:
        """Ends the browser."""
        self._session = None
        try:
            self.call("Browser.close")
        except AssertionError:
            self._process.kill()
        self._process.wait(timeout=30)
        os.close(self._read)
        os.close(self._write)
        shutil.rmtree(self._home, ignore_errors=True)
