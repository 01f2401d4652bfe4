"""Prompts without answers: their tokens, and the columns that functions get."""

import json
from pathlib import Path
from typing import Any

import pytest
from chats import write_tokenizer

from jaxopt_llm.config import DataConfig
from jaxopt_llm.core import json_files
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.data.tokens.corpus import open_corpus
from jaxopt_llm.data.tokens.tokenizer import load_tokenizer

ASKED = [{"role": "user", "content": "hello"}]


def read(folder: Path, rows: list[dict[str, Any]], **settings: Any) -> list[tuple[str, list[int], dict[str, Any]]]:
    """Return text, tokens and row of each prompt."""
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DataConfig(paths=(str(folder / "prompts.jsonl"),), content="prompt", **settings)
    tokenizer = load_tokenizer(config)
    (source,) = open_corpus(config, tokenizer, holds_out=False).sources
    found = [(ids.tolist(), json_files.parse(row)) for ids, row in source.training.read_prompts()]
    return [(tokenizer.decode(ids), ids, row) for ids, row in found]


def test_a_text_begins_as_documents_do_and_does_not_end(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}+1=", "answer": str(n + 1), "label": True, "level": {"hard": n}} for n in range(5)]
    found = read(tmp_path, rows)
    assert [(ids, row) for _, ids, row in found] == [([256, *row["prompt"].encode()], row) for row in rows]


def test_messages_are_rendered_up_to_the_answer(tmp_path: Path) -> None:
    tokenizer = str(write_tokenizer(tmp_path / "tokenizer"))
    rows = [{"question": ASKED, "answer": 1}, {"question": "a text", "answer": 2}]
    chat, text = read(tmp_path, rows, tokenizer=tokenizer, columns=("prompt=question",))
    ends = load_tokenizer(DataConfig(tokenizer=tokenizer)).eos_ids
    assert chat[0].startswith("user\nhello") and chat[0].endswith("assistant\n"), chat[0]
    assert chat[2] == {"prompt": ASKED, "answer": 1} and text[0] == "a text"
    assert text[1][-1] not in ends


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"answer": 1}, "without a prompt"),
        ({"prompt": 3}, "neither a text nor a list of messages"),
        ({"prompt": [{"role": "user"}]}, "neither a text nor a list of messages"),
        ({"prompt": [*ASKED, {"role": "assistant", "content": "hi"}]}, "a prompt that ends with an answer"),
    ],
)
def test_what_is_no_prompt_is_refused(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        read(tmp_path, [{"prompt": "a"}, row])
