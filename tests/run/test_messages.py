"""Warnings before the first step."""

import json
from pathlib import Path

import pytest
from chats import CHATML, conversation, write_tokenizer
from test_loop import tiny

from jaxopt_llm.config.fields import replace_fields
from jaxopt_llm.distributed.process_group import SINGLE_PROCESS
from jaxopt_llm.run.messages import list_warnings
from jaxopt_llm.run.setup import prepare_run

ENDLESS = "{% for m in messages %}{{ '### ' + m.role + ':\\n' + m.content + '\\n\\n' }}{% endfor %}"


@pytest.mark.parametrize("template", [ENDLESS, CHATML])
def test_a_template_that_ends_no_turn_is_named(template: str, tmp_path: Path) -> None:
    folder, path = write_tokenizer(tmp_path / "tokenizer", template), tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"messages": conversation(number)}) + "\n" for number in range(20)))
    settings = {"data.paths": (str(path),), "data.content": "chat", "data.tokenizer": str(folder)}
    settings |= {"model.vocabulary_size": 512, "training.sequence_length": 128}
    setup = prepare_run(replace_fields(tiny(tmp_path / "run"), settings), SINGLE_PROCESS)
    told = [line for line in list_warnings(setup) if "does not learn where to stop" in line]
    assert len(told) == (template == ENDLESS)
    assert all(f"data.tokenizer={folder}: the chat template writes no special token" in line for line in told)
