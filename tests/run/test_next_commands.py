"""The commands that a run prints at its end."""

from pathlib import Path
from typing import Any, get_args

import chats
import pytest
import toy

from jaxopt_llm.config import Config
from jaxopt_llm.config.data import Content
from jaxopt_llm.config.fields import replace_fields
from jaxopt_llm.run.messages import list_next_commands

LLAMA = {"model.pattern": ("global",), "model.positions": "rotary"}
CHATS = {"data.content": "chat", "data.chat_template": "chats.jinja", "lora.rank": 4}
PYTHON = "  python -m jaxopt_llm."


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, ["evaluate --checkpoint DIR", "generate --checkpoint DIR --prompt TEXT", "convert export"]),
        (
            CHATS,
            [
                "evaluate --checkpoint DIR",
                "generate --checkpoint DIR --chat",
                "convert merge --checkpoint DIR --to 'a run-merged'",
                "convert export --checkpoint DIR --to 'a run-exported'",
            ],
        ),
        # A PEFT folder has whole weights and tables of another size beside the adapters.
        (CHATS | {"training.trainable": ("*norm*",)}, ["evaluate", "generate", "convert merge", "convert export"]),
        (CHATS | {"model.resize_vocabulary": True}, ["evaluate", "generate", "convert merge", "convert export"]),
        ({"evaluation.every": 0}, ["evaluate --checkpoint DIR --data.paths FILE", "generate", "convert export"]),
        ({"model.pattern": ("sliding", "global_nope")}, ["evaluate", "generate"]),  # no class of transformers has it
    ],
)
def test_the_commands_are_those_of_the_kind_of_run(
    settings: dict[str, Any], expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = replace_fields(Config(model=toy.UNIFORM), {**LLAMA, "run.directory": "a run", **settings})
    head, *lines = list_next_commands(config)
    assert head == "next:" and len(lines) == len(expected)
    for line, beginning in zip(lines, expected, strict=True):
        assert line.startswith(PYTHON + beginning.replace("DIR", "'a run'"))


@pytest.mark.parametrize("content", get_args(Content))
def test_every_form_of_conversations_is_continued_as_a_conversation_if_there_is_a_template(
    content: str, tmp_path: Path
) -> None:
    """Bytes have none, and the tokenizer has one."""
    config = replace_fields(Config(model=toy.UNIFORM), {**LLAMA, "run.directory": "run", "data.content": content})
    of_tokenizer = {"data.tokenizer": str(chats.write_tokenizer(tmp_path / "tokenizer"))}
    for settings in ({}, of_tokenizer, {"data.chat_template": "chats.jinja"}, {"data.chat_template": "none"}):
        (line,) = (line for line in list_next_commands(replace_fields(config, settings)) if "generate" in line)
        is_chat = content not in ("text", "prompt") and settings and settings != {"data.chat_template": "none"}
        assert line.endswith(" --chat" if is_chat else " --prompt TEXT")
