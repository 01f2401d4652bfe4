"""Prompts without answers: their tokens, and the columns that functions get."""

import json
from pathlib import Path
from typing import Any

import corpora
import numpy as np
import pytest
from chats import write_tokenizer

from jaxopt_llm.config import Config, DataConfig, RolloutsConfig
from jaxopt_llm.core import json_files
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.data.rows.prompts import AnswerReader, Prompt
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


def read_answers(folder: Path, rows: list[dict[str, Any]], **settings: Any) -> list[list[int]]:
    """Return the tokens of each prompt with those of the answer of its row."""
    config = Config(data=DataConfig(**settings), rollouts=RolloutsConfig(share=0.5))
    found = AnswerReader(config, load_tokenizer(config.data))
    prompts = [Prompt(np.array(ids, np.int32), row) for _, ids, row in read(folder, rows, **settings)]
    return [[*prompt.ids.tolist(), *found(prompt).tolist()] for prompt in prompts]


def test_an_answer_of_a_row_continues_its_prompt_as_a_document_does(tmp_path: Path) -> None:
    """A text is a text with BOS and EOS. A conversation is that of data.content=pairs, up to the end of its turn."""
    texts = [{"prompt": f"{n}+1=", "completion": str(n + 1)} for n in range(5)]
    expected = [[256, *f"{row['prompt']}{row['completion']}".encode(), 257] for row in texts]
    assert read_answers(tmp_path, texts, tokenizer="bytes") == expected
    tokenizer = str(write_tokenizer(tmp_path / "tokenizer"))
    said = [" hello again", "x", "a longer answer\nof two lines"]
    rows = [{"prompt": ASKED, "completion": text} for text in said[:2]]
    rows.append({"prompt": ASKED, "completion": [{"role": "assistant", "content": said[2]}]})
    found = read_answers(tmp_path, rows, tokenizer=tokenizer)
    config = DataConfig(paths=(str(tmp_path / "prompts.jsonl"),), content="pairs", tokenizer=tokenizer)
    (source,) = open_corpus(config, load_tokenizer(config), holds_out=False).sources
    whole, names = corpora.documents_of(source.training), load_tokenizer(config)
    for answered, document, text in zip(found, whole, said, strict=True):
        assert answered == document[: len(answered)] and names.decode(answered).endswith(text)
        assert names.decode(document[len(answered) :]).strip() == "" and names.decode(answered[-1:]) == ""


def test_a_token_that_joins_prompt_and_answer_is_divided(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(DataConfig(tokenizer=str(write_tokenizer(tmp_path / "tokenizer"))))
    asked, whole = tokenizer.encode([b"::", b"::)"])
    assert whole[: len(asked)].tolist() != asked.tolist(), "the tokenizer joins them"
    (found,) = read_answers(tmp_path, [{"prompt": "::", "completion": ")"}], tokenizer=str(tmp_path / "tokenizer"))
    assert tokenizer.decode(found) == "::)" and found[-1] == tokenizer.eos


@pytest.mark.parametrize("row", [{}, {"completion": ""}, {"completion": [{"role": "assistant", "content": "a"}]}])
def test_a_row_without_an_answer_is_refused(tmp_path: Path, row: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"share=0.5: the row of the prompt 'ab' has no answer in a column completion"):
        read_answers(tmp_path, [{"prompt": "ab", **row}], tokenizer="bytes")


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
