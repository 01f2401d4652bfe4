"""Progress lines of a search."""

import pytest

from jaxopt_llm.observe.progress import CompileLine


def report(monkeypatch: pytest.MonkeyPatch, terminal: str) -> None:
    monkeypatch.setenv("TTY_COMPATIBLE", terminal)
    with CompileLine(12) as line:
        line.announce(["fsdp 8", "data [8]"])
        line.advance()
        line.advance()
        line.announce(["tensor 8"])


def test_without_a_terminal_each_setting_has_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report(monkeypatch, "0")
    output, errors = capsys.readouterr()
    assert output == ""
    assert errors.splitlines() == [
        "compiling 1 of at most 12: fsdp 8",
        "compiling 2 of at most 12: data [8]",
        "compiling 3 of at most 12: tensor 8",
    ]


def test_on_a_terminal_one_line_is_rewritten(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report(monkeypatch, "1")
    output, errors = capsys.readouterr()
    assert output == "" and "2 of at most 12 compiled" in errors and "compiling tensor 8" in errors
    # The line is erased before it is written again, and at the end.
    assert "\x1b[2K" in errors and "of at most 12: " not in errors
