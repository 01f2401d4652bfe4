"""End of a command: one line and an exit code, and a traceback only for a bug."""

import pytest

from jaxopt_llm.core import errors
from jaxopt_llm.core.errors import (
    CheckpointError,
    InputError,
    OutOfMemory,
    Preempted,
    ProcessLost,
    StorageFailed,
    TrainingDiverged,
)

DIED = "error: process 1 has died"


@pytest.mark.parametrize(
    "error, code, line",
    [
        (InputError("two\n lines"), 2, "error: two lines"),
        (OutOfMemory("no\n room", ("  16 GiB", "  8 GiB")), 2, "error: no room\n  16 GiB\n  8 GiB"),
        (TrainingDiverged("step 3"), 3, "error: step 3"),
        (CheckpointError("unreadable"), 4, "error: unreadable"),
        (Preempted(3), 75, "preempted at step 3; run again to continue"),
        (FileNotFoundError(2, "No such file", "a.txt"), 2, "error: there is no file a.txt"),
        (PermissionError(13, "Permission denied", "a.txt"), 2, "error: a.txt: Permission denied"),
        (OSError(28, "No space left on device"), 74, "error: No space left on device"),
        (OSError(30, "Read-only file system", "a.txt"), 74, "error: a.txt: Read-only file system"),
        (StorageFailed("full"), 74, "error: full"),
        (OSError("no address"), 2, "error: no address"),
        (ProcessLost("process 1 has died", 0), 5, f"{DIED}; there is no checkpoint yet: run again to start at step 0"),
        (ProcessLost("process 1 has died", 4), 5, f"{DIED}; run again to continue from the last checkpoint"),
        (BrokenPipeError(32, "Broken pipe"), 141, ""),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_one_line_and_a_code(error: BaseException, code: int, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    def main() -> int:
        raise error

    with pytest.raises(SystemExit) as stop:
        errors.run_command(main)
    assert stop.value.code == code
    assert capsys.readouterr().err == (line and line + "\n")


def test_a_bug_keeps_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError):
        errors.run_command(lambda: 1 // 0)


def test_a_command_names_its_own_flags() -> None:
    """Settings that the command has no flag for keep their names, and so do paths."""
    with (
        pytest.raises(
            OutOfMemory, match=r"^--eos x: set --text-field or --text-field, not data.other, in a/data.eos$"
        ) as got,
        errors.own_flags({"data.eos": "--eos", "data.text_field": "--text-field"}),
    ):
        raise OutOfMemory(
            "data.eos=x: set --data.text-field or data.text_field, not data.other, in a/data.eos", ("detail",)
        )
    assert got.value.details == ("detail",)


def test_the_flag_that_is_spelt_like_an_unknown_one_is_proposed() -> None:
    parser = errors.ArgumentParser()
    subcommand = parser.add_subparsers().add_parser("merge")
    subcommand.add_argument("--tokenizer")
    with pytest.raises(InputError, match="^unrecognized arguments: --tokeniser x; did you mean --tokenizer\\?$"):
        parser.parse_args(["merge", "--tokeniser", "x"])
    with pytest.raises(InputError, match="^unrecognized arguments: --other$"):
        parser.parse_args(["merge", "--other"])
