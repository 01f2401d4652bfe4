"""Conversations in every form and file format, and rows that are rejected."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from chats import CHATML, Messages, conversation
from test_corpus import prepare

from jaxopt_llm.config import DataConfig
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.data import prepared, source
from jaxopt_llm.data.corpus import open_all_documents, open_corpus
from jaxopt_llm.data.packing import PackedRows
from jaxopt_llm.data.tokenizer import load_tokenizer

CHATS = [conversation(number)[:2] for number in range(12)]


@pytest.fixture
def config(tmp_path: Path) -> DataConfig:
    (tmp_path / "chat.jinja").write_text(CHATML)
    return DataConfig(content="chat", chat_template=str(tmp_path / "chat.jinja"), held_out=0.3)


def pair(messages: Messages) -> dict[str, Any]:
    return {"prompt": messages[0]["content"], "completion": messages[1]["content"]}


def sharegpt(messages: Messages) -> dict[str, Any]:
    names = {"user": "human", "assistant": "gpt"}
    return {"conversations": [{"from": names[m["role"]], "value": m["content"]} for m in messages]}


def parts(messages: Messages) -> dict[str, Any]:
    """Return a row with contents in text parts, and fields that are null."""
    halves = [[m["content"][:3], m["content"][3:]] for m in messages]
    contents = [[{"type": "text", "text": half} for half in each] for each in halves]
    return {
        "messages": [{"role": m["role"], "name": None, "content": c} for m, c in zip(messages, contents, strict=True)],
        "tools": None,
    }


FORMS = {"messages": lambda messages: {"messages": messages}, "pairs": pair, "sharegpt": sharegpt, "parts": parts}


def write(path: Path, rows: list[Any]) -> Path:
    if path.suffix == ".parquet":
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=5)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path: Path, config: DataConfig) -> tuple[list[list[int]], str]:
    """Return tokens and mask of the training and held-out documents, and the hash of the corpus."""
    corpus = open_corpus(replace(config, paths=(str(path),)), load_tokenizer(config))
    streams = (corpus.sources[0].training, corpus.held_out)
    found = [array.tolist() for each in streams for array in (each.read(0, each.size), each.read_mask(0, each.size))]
    return found, corpus.sha256


def text(path: Path, config: DataConfig) -> tuple[str, dict[str, int]]:
    stream, skipped = open_all_documents(replace(config, paths=(str(path),)), load_tokenizer(config))
    return load_tokenizer(config).decode(stream.read(0, stream.size).tolist()), dict(skipped)


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_and_format_is_the_same_conversations(
    form: str, suffix: str, config: DataConfig, tmp_path: Path
) -> None:
    expected, _ = read(write(tmp_path / "expected.jsonl", [FORMS["messages"](each) for each in CHATS]), config)
    path = write(tmp_path / f"a.{suffix}", [{"id": 1, **FORMS[form](each)} for each in CHATS])
    found, sha256 = read(path, config)
    assert found == expected and len(expected[2]) > 0
    named, same = read(path, replace(config, content="messages" if form == "parts" else form))
    assert (named, same) == (found, sha256)
    with pytest.raises(InputError, match="no column 'text'.*or read conversations with data.content=chat"):
        read(path, DataConfig())


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_preparing_in_shards_gives_the_same_tokens(
    suffix: str, config: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / f"a.{suffix}", [FORMS["sharegpt"](each) for each in CHATS])
    expected, _ = read(path, config)
    monkeypatch.setattr(source, "PART_BYTES", 300)
    monkeypatch.setattr(prepared, "SHARD_BYTES", 700)
    folder = prepare(tmp_path / "prepared", path, config)
    assert len(prepared.read_shard_records(folder)) > 2
    assert read(folder, DataConfig(held_out=0.3))[0] == expected


def test_a_mixture_with_prepared_text(config: DataConfig, tmp_path: Path) -> None:
    chats = write(tmp_path / "a.jsonl", [FORMS["messages"](each) for each in CHATS])
    texts = write(tmp_path / "texts.jsonl", [{"text": f"{number}" * 200} for number in range(12)])
    ready = prepare(tmp_path / "prepared", texts, DataConfig())
    both = replace(config, paths=(str(chats), str(ready)), weights=(1.0, 1.0))
    corpus = open_corpus(both, load_tokenizer(both))
    first, second = (PackedRows(each.training, 150, 258) for each in corpus.sources)
    held_out = PackedRows(corpus.held_out, 150, 258)
    assert first.summary and not second.summary  # text is split, unless it is joined with conversations
    assert "are longer than a row and cut" in held_out.summary
    assert second[0].loss_mask.sum() == 150 and 0 < first[0].loss_mask.sum() < 75


def test_the_corpus_hash_covers_what_is_learnt(config: DataConfig, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [FORMS["messages"](each) for each in CHATS])
    plain, sha256 = read(path, config)
    own = tmp_path / "own.jinja"
    own.write_text(CHATML.replace("{{ message.content }}", "{% generation %}{{ message.content }}{% endgeneration %}"))
    marked, other = read(path, replace(config, chat_template=str(own)))
    assert marked[0] == plain[0] and marked[1] != plain[1]
    assert other != sha256


@pytest.mark.parametrize("form", ["sharegpt", "messages"])
def test_a_leading_system_field_is_the_systems_turn(form: str, config: DataConfig, tmp_path: Path) -> None:
    rows = [{**FORMS[form](CHATS[1]), "system": "Be kind."}]
    assert (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user" in text(write(tmp_path / "a.jsonl", rows), config)[0]
    )


GOOD = {"messages": CHATS[1]}
BAD: dict[str, tuple[Any, str]] = {
    "two systems": (
        {"messages": [{"role": "system", "content": "x"}], "system": "y"},
        "both a system field and a",
    ),
    "another form": (pair(CHATS[1]), "without the fields of the form messages"),
    "no object": ([1], "without the fields of the form messages"),
    "no list": ({"messages": "hello"}, "messages is not a list"),
    "no role": ({"messages": [{"content": "x"}]}, "a message has no role"),
    "no message": ({"messages": ["x"]}, "a message has no role"),
    "no content": ({"messages": [{"role": "user"}]}, "the content of a message of role user is not text"),
    "an image": (
        {"messages": [{"role": "user", "content": [{"type": "image", "image": "x"}]}]},
        "a part of a message is not text",
    ),
    "no assistant": ({"messages": CHATS[1][:1]}, "it has no assistant message"),
    "a preference": ({**GOOD, "chosen": "a", "rejected": "b"}, "it holds a preference pair"),
    "tools": ({**GOOD, "tools": "{"}, "tools is not valid JSON"),
}


@pytest.mark.parametrize("case", BAD)
def test_malformed_conversations_are_rejected_or_counted(case: str, config: DataConfig, tmp_path: Path) -> None:
    row, message = BAD[case]
    path = write(tmp_path / "a.jsonl", [GOOD, row, GOOD])
    with pytest.raises(InputError, match=rf"a.jsonl, byte \d+: .*{message}.*data.malformed to skip"):
        text(path, config)
    assert text(path, replace(config, malformed="skip"))[1] == {"not a conversation": 1}


def test_pairs_of_lists_are_rejected_with_a_remedy(config: DataConfig, tmp_path: Path) -> None:
    lists = {"prompt": CHATS[1][:1], "completion": CHATS[1][1:]}
    with pytest.raises(InputError, match="put lists of messages into one field, messages"):
        text(write(tmp_path / "a.jsonl", [pair(CHATS[1]), lists]), config)


def test_half_a_character_and_deep_lists(config: DataConfig, tmp_path: Path) -> None:
    half = json.dumps({"messages": [CHATS[1][0], {"role": "assistant", "content": "\ud83d!"}]})
    deep = '{"messages": ' + "[" * 900 + "]" * 900 + "}"
    path = tmp_path / "a.jsonl"
    path.write_text(f"{json.dumps(GOOD)}\n{half}\n{deep}\n")
    found, skipped = text(path, replace(config, malformed="replace"))
    assert "\N{REPLACEMENT CHARACTER}!" in found
    assert skipped == {"not UTF-8, replaced": 1, "not a conversation": 1}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "a"}, "the fields text match no form of conversations.*data.content"),
        (
            {"prompt": "a", "chosen": "b", "rejected": "c"},
            "fields chosen, prompt, rejected match no form",
        ),
        ({**GOOD, **pair(CHATS[1])}, r"match several forms of conversations .messages, pairs.*data.content"),
    ],
)
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_fields_of_no_form_or_of_several(
    row: dict[str, Any], message: str, suffix: str, config: DataConfig, tmp_path: Path
) -> None:
    path = write(tmp_path / f"a.{suffix}", [row, row])
    for malformed in ("error", "skip"):
        with pytest.raises(InputError, match=f"a.{suffix}.*{message}"):
            text(path, replace(config, malformed=malformed))


def test_a_message_from_an_unknown_role(config: DataConfig, tmp_path: Path) -> None:
    row = {"conversations": [{"from": "narrator", "value": "x"}]}
    with pytest.raises(InputError, match="a message is from 'narrator'; it must be from one of human, "):
        text(write(tmp_path / "a.jsonl", [row]), config)


def test_text_files_hold_no_conversations(config: DataConfig, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello")
    with pytest.raises(InputError, match="a.txt: data.content=chat requires JSONL or Parquet files"):
        text(tmp_path / "a.txt", config)
    (tmp_path / "empty.jsonl").write_text("")
    assert text(tmp_path / "empty.jsonl", config) == ("", {})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"chat_template": "x"}, "data.content=chat"),
        ({"date": "2026-01-31"}, "data.content=chat"),
        ({"content": "chat", "paths": ("a",), "date": "31.1.2026"}, "data.date=31.1.2026: not a date"),
        ({"content": "chat"}, "data.paths"),
    ],
)
def test_conflicting_settings(settings: dict[str, Any], message: str) -> None:
    (problem,) = DataConfig(**settings).problems()
    assert message in problem
