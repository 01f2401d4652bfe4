"""Completion in a shell: the printed script, loaded in bash."""

import shlex
import subprocess
from pathlib import Path

import pytest
from commands import command

from jaxopt_llm.__main__ import COMMANDS
from jaxopt_llm.config import fields

pytestmark = pytest.mark.core

# Calls the function that `complete` has registered, as bash does for the Tab key, and prints what it offers.
PRESS_TAB = """
source "$1"
shift
function=$(complete -p jaxopt-llm | sed 's/.*-F \\([^ ]*\\) .*/\\1/')
COMP_WORDS=(jaxopt-llm "$@")
COMP_CWORD=$#
"$function"
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    printed = command("completion", "bash")
    assert (printed.returncode, printed.stderr) == (0, "")
    path = tmp_path_factory.mktemp("completion") / "jaxopt-llm"
    path.write_text(printed.stdout)
    return path


def complete(script: Path, typed: str) -> set[str]:
    """Return what bash offers for the last word."""
    words = ["bash", "--norc", "-c", PRESS_TAB, "bash", str(script), *shlex.split(typed)]
    # Without a PATH for Python: completing must not start it.
    done = subprocess.run(words, capture_output=True, text=True, env={"PATH": "/usr/bin:/bin"}, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("tr", {"train"}),
        ("train --training.st", {"--training.steps"}),
        ("train --config quickstart.py --mesh.f", {"--mesh.fsdp"}),
        ("train --data.paths one two --mesh.f", {"--mesh.fsdp"}),
        ("train --lora.base ''", {"float", "int8", "nf4"}),
        ("plan --config quickstart_", {"quickstart_lora.py"}),
        ("evaluate --training.", {"--training.batch-size", "--training.sequence-length"}),
        ("generate --ad", {"--adapter"}),
        ("chat --ad", {"--adapter"}),
        ("convert merge --ad", {"--adapter"}),
        ("checkpoint v", {"verify"}),
        ("completion z", {"zsh"}),
    ],
)
def test_tab_offers(typed: str, offered: set[str], script: Path) -> None:
    assert complete(script, typed) == offered


def test_tab_offers_every_command_and_every_setting(script: Path) -> None:
    assert complete(script, "''") == set(COMMANDS)
    flags = complete(script, "train --")
    assert {f"--{name.replace('_', '-')}" for name in fields.FIELDS} <= flags


def test_zsh_and_other_shells() -> None:
    assert command("completion", "zsh").stdout.startswith("#compdef jaxopt-llm")
    refused = command("completion", "csh")
    assert refused.returncode == 2
    assert refused.stderr == "error: the shell is missing or unknown; usage: jaxopt-llm completion bash|zsh\n"
