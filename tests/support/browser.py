"""Chromium without a window: what a page does in a real browser."""

import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed")


def open_page(page: Path) -> tuple[str, list[str]]:
    """Open a page from disk and return its elements after its scripts have run, and the lines of its console.

    The console also has a line for each address that the browser refuses to load.
    """
    assert CHROMIUM is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", "--enable-logging=stderr", "--window-size=1400,2400"]
        command += ["--virtual-time-budget=10000", "--dump-dom", page.as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout, re.findall(r"^.*CONSOLE.*$", done.stderr, re.MULTILINE)
