"""Progress lines of a search and of a run."""

import re
import time

import pytest

from jaxopt_llm.observe.progress import CompileLine, ProgressLine


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


# ---- The line of a run.

RECORD = {"loss": 1.5, "grad_norm": 2.0, "learning_rate": 2e-4, "tokens_per_second": 12345.6}


def train(monkeypatch: pytest.MonkeyPatch, terminal: str) -> None:
    """Show a run of 12 steps that goes on from step 4, with a second for each step and a record for every third one."""
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setenv("TTY_COMPATIBLE", terminal)
    monkeypatch.setenv("COLUMNS", "80")
    with ProgressLine(12) as line:
        line.advance(4)
        line.start_training(4)
        for step in range(5, 13):
            now[0] += 1.0
            line.advance(step)
            numbers = RECORD | {"step": step} | ({"eval_loss": 1.75} if step == 12 else {})
            if step % 3 == 0:
                line.show(numbers)
            elif line.shows_steps:
                line.show_step(numbers)
        line.end()
        line.say("the end")


def test_without_a_terminal_the_first_step_and_each_record_have_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train(monkeypatch, "0")
    rest = "lr 2.0e-04  grad norm 2.000  12,346 tokens/s"
    assert capsys.readouterr().out.rstrip().splitlines() == [
        f"step  5/12  loss 1.5000  {rest}  0:00:07 left",
        f"step  6/12  loss 1.5000  {rest}  0:00:06 left",
        f"step  9/12  loss 1.5000  {rest}  0:00:03 left",
        f"step 12/12  loss 1.5000  held-out 1.7500  {rest}",
        "the end",
    ]


def test_on_a_terminal_every_step_is_in_the_line_and_evaluations_stay_above_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train(monkeypatch, "1")
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", capsys.readouterr().out)
    lines = [line.strip() for line in re.split(r"[\r\n]+", text) if line.strip()]
    assert lines[-1] == "the end"
    kept = [line for line in lines if "━" not in line]
    assert kept == ["step 12/12  loss 1.5000  held-out 1.7500  lr 2.0e-04  grad norm 2.000  12,346 tokens/s", "the end"]
    # Within 80 columns nothing is cut.
    assert all("…" not in line and len(line) <= 80 for line in lines if "━" in line)
    assert re.match(r"step 12/12 ━+ loss 1.5000  12,346 tokens/s$", lines[-2])


def test_a_loss_that_rounds_to_zero_has_no_sign(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressLine(12) as line:
        line.start_training(0)
        line.show(RECORD | {"step": 12, "loss": -1e-9})
    assert "loss 0.0000" in capsys.readouterr().out


def test_a_process_that_prints_nothing_reads_no_metrics_for_it() -> None:
    assert not ProgressLine(3, visible=False).shows_steps
    assert ProgressLine(3).shows_steps
