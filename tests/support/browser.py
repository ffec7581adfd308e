"""A headless Chromium, spoken to through a pipe: no driver, no port, no other package.

`make test` installs it (`make browser-tools`). Its DevTools protocol is JSON that ends with a null byte, on
the descriptors 3 and 4: https://chromedevtools.github.io/devtools-protocol/.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"),
    *("--no-first-run", "--no-default-browser-check", "--disable-extensions", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--remote-debugging-pipe"),
)
REPLY_TIMEOUT_S = 60.0


def find_browser() -> str | None:
    """Where the browser is."""
    return next((path for name in _NAMES if (path := shutil.which(name))), None)


class Browser:
    """One browser with one tab."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to_browser, self._from_browser = to_browser, from_browser
        self._buffer = b""
        self._message_id = self._width = 0
        self._session: str | None = None
        self._events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Page.setLifecycleEventsEnabled", enabled=True)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Ask for something and wait for the answer."""
        self._message_id += 1
        message: dict[str, Any] = {"id": self._message_id, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to_browser, json.dumps(message).encode() + b"\0")
        while True:
            told = self._read()
            if told.get("id") == self._message_id:
                assert "error" not in told, f"{method}: {told['error']}"
                result: dict[str, Any] = told["result"]
                return result
            self._events.append(told)

    def open(self, path: Path, *, width: int = 1280, height: int = 900, scheme: str = "light") -> None:
        """Show a page, as wide and in the colours that are said, and wait until it is loaded."""
        self._width = width
        self._resize(height)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)
        self._events = []
        this = self.call("Page.navigate", url=path.absolute().as_uri())[
            "loaderId"
        ]  # the page before may be late
        while not any(_is_loaded(one, this) for one in self._events):
            self._events.append(self._read())

    def evaluate(self, expression: str) -> Any:
        """What a line of JavaScript gives."""
        told = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in told, told
        return told["result"].get("value")

    @property
    def problems(self) -> list[str]:
        """What the page has logged or raised, and whom it has asked for anything, since it was opened."""
        found = []
        for one in self._events:
            method, told = one.get("method"), one.get("params", {})
            if method in {"Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"}:
                found.append(json.dumps(told))
            elif method == "Network.requestWillBeSent":
                url = told["request"]["url"]
                if not url.startswith(("file:", "data:")):
                    found.append(url)
        return found

    def screenshot(self, path: Path) -> None:
        """Make a picture of the whole page."""
        for _ in range(2):  # what comes into sight gets its own height
            height = min(int(self.evaluate("document.documentElement.scrollHeight")), 8000)
            self._resize(height)
        data = self.call("Page.captureScreenshot")["data"]
        path.write_bytes(base64.b64decode(data))

    def _resize(self, height: int) -> None:
        mobile = self._width < 600
        size = {"width": self._width, "height": height, "deviceScaleFactor": 1, "mobile": mobile}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def _read(self) -> dict[str, Any]:
        until = time.monotonic() + REPLY_TIMEOUT_S
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._from_browser], [], [], max(0.0, until - time.monotonic()))
            data = os.read(self._from_browser, 1 << 20) if ready else b""
            assert data, "the browser has ended, or says nothing any more"
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\0")
        told: dict[str, Any] = json.loads(line)
        return told


def _is_loaded(event: dict[str, Any], loader: str) -> bool:
    """Whether it says that what this loader loads is there."""
    told = event.get("params", {})
    is_end = event.get("method") == "Page.lifecycleEvent" and told["name"] == "load"
    return is_end and told["loaderId"] == loader


def _move_descriptors(*descriptors: int) -> list[int]:
    """The same, where they are not in the way of 3 and 4."""
    moved = [fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, 10) for one in descriptors]
    for one in descriptors:
        os.close(one)
    return moved


@contextmanager
def start_browser(directory: Path) -> Iterator[Browser]:
    """Start a browser whose profile lies in ``directory``, and end it."""
    path = find_browser()
    assert path is not None, "no Chromium: run `make browser-tools`, or install chromium"
    commands, from_us = _move_descriptors(*os.pipe())
    to_us, answers = _move_descriptors(*os.pipe())
    command = [path, *_FLAGS, f"--user-data-dir={directory}", "about:blank"]
    placed = ["bash", "-c", f'exec "$@" 3<&{commands} 4>&{answers}', "bash", *command]  # sh knows one digit
    log = open(directory / "browser.log", "wb")  # noqa: SIM115  closed below, with the process
    process = subprocess.Popen(
        placed, pass_fds=(commands, answers), stdin=subprocess.DEVNULL, stdout=log, stderr=log
    )
    os.close(commands)
    os.close(answers)
    try:
        yield Browser(from_us, to_us)
    finally:
        os.close(from_us)  # which ends it
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(to_us)
        log.close()
