"""The forms that conversations come in: one meaning, whichever the form and the file's format; and what is none."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from chats import CHATML, Messages, conversation
from test_corpus import prepare

from jaxopt_llm.data import prepared, source
from jaxopt_llm.data.config import DataConfig
from jaxopt_llm.data.corpus import open_corpus, open_whole
from jaxopt_llm.data.packing import PackedRows
from jaxopt_llm.data.tokenizer import load_tokenizer
from jaxopt_llm.errors import InputError

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
    """Contents in parts of text, and fields that are null."""
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
    """Tokens and mask of what is trained on and of what is held out, and the hash of all."""
    corpus = open_corpus(replace(config, paths=(str(path),)), load_tokenizer(config))
    streams = (corpus.sources[0].training, corpus.held_out)
    found = [array.tolist() for each in streams for array in (each.read(0, each.size), each.mask(0, each.size))]
    return found, corpus.sha256


def text(path: Path, config: DataConfig) -> tuple[str, dict[str, int]]:
    stream, skipped = open_whole(replace(config, paths=(str(path),)), load_tokenizer(config))
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
    with pytest.raises(InputError, match="no column 'text'.*conversations are read with data.content chat"):
        read(path, DataConfig())


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_prepared_in_shards_they_are_the_same(
    suffix: str, config: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / f"a.{suffix}", [FORMS["sharegpt"](each) for each in CHATS])
    expected, _ = read(path, config)
    monkeypatch.setattr(source, "PART_BYTES", 300)
    monkeypatch.setattr(prepared, "SHARD_BYTES", 700)
    folder = prepare(tmp_path / "prepared", path, config)
    assert len(prepared.read_shards(folder)) > 2
    assert read(folder, DataConfig(held_out=0.3))[0] == expected


def test_a_mixture_with_prepared_text(config: DataConfig, tmp_path: Path) -> None:
    chats = write(tmp_path / "a.jsonl", [FORMS["messages"](each) for each in CHATS])
    texts = write(tmp_path / "texts.jsonl", [{"text": f"{number}" * 200} for number in range(12)])
    ready = prepare(tmp_path / "prepared", texts, DataConfig())
    both = replace(config, paths=(str(chats), str(ready)), weights=(1.0, 1.0))
    corpus = open_corpus(both, load_tokenizer(both))
    first, second = (PackedRows(each.training, 150, 258) for each in corpus.sources)
    held_out = PackedRows(corpus.held_out, 150, 258)
    assert first.packing and not second.packing  # text runs on, but where it is joined with conversations
    assert "are longer, and cut" in held_out.packing
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
    "two systems": ({"messages": [{"role": "system", "content": "x"}], "system": "y"}, "beside a system's turn"),
    "another form": (pair(CHATS[1]), "without the fields of messages"),
    "no object": ([1], "without the fields of messages"),
    "no list": ({"messages": "hello"}, "no list of messages"),
    "no role": ({"messages": [{"content": "x"}]}, "a message without a role"),
    "no message": ({"messages": ["x"]}, "a message without a role"),
    "no content": ({"messages": [{"role": "user"}]}, "of the user whose content is no text"),
    "an image": (
        {"messages": [{"role": "user", "content": [{"type": "image", "image": "x"}]}]},
        "with a part that is no text",
    ),
    "no assistant": ({"messages": CHATS[1][:1]}, "no turn of the assistant"),
    "a preference": ({**GOOD, "chosen": "a", "rejected": "b"}, "it has a preference"),
    "tools": ({**GOOD, "tools": "{"}, "tools that are no JSON"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_no_conversation_is_refused_or_counted(case: str, config: DataConfig, tmp_path: Path) -> None:
    row, said = BAD[case]
    path = write(tmp_path / "a.jsonl", [GOOD, row, GOOD])
    with pytest.raises(InputError, match=rf"a.jsonl, byte \d+: .*{said}.*data.malformed skip"):
        text(path, config)
    assert text(path, replace(config, malformed="skip"))[1] == {"no conversation": 1}


def test_pairs_of_lists_are_told_where_they_go(config: DataConfig, tmp_path: Path) -> None:
    lists = {"prompt": CHATS[1][:1], "completion": CHATS[1][1:]}
    with pytest.raises(InputError, match="lists of messages go into one field, messages"):
        text(write(tmp_path / "a.jsonl", [pair(CHATS[1]), lists]), config)


def test_half_a_character_and_deep_lists(config: DataConfig, tmp_path: Path) -> None:
    half = json.dumps({"messages": [CHATS[1][0], {"role": "assistant", "content": "\ud83d!"}]})
    deep = '{"messages": ' + "[" * 900 + "]" * 900 + "}"
    path = tmp_path / "a.jsonl"
    path.write_text(f"{json.dumps(GOOD)}\n{half}\n{deep}\n")
    found, skipped = text(path, replace(config, malformed="replace"))
    assert "\N{REPLACEMENT CHARACTER}!" in found
    assert skipped == {"not UTF-8, replaced": 1, "no conversation": 1}


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"text": "a"}, "the fields text are no conversations"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "the fields chosen, prompt, rejected are no conversations"),
        ({**GOOD, **pair(CHATS[1])}, "conversations as messages and as pairs"),
    ],
)
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_fields_of_no_form_or_of_several(
    row: dict[str, Any], said: str, suffix: str, config: DataConfig, tmp_path: Path
) -> None:
    path = write(tmp_path / f"a.{suffix}", [row, row])
    for malformed in ("error", "skip"):
        with pytest.raises(InputError, match=f"a.{suffix}.*{said}"):
            text(path, replace(config, malformed=malformed))


def test_a_message_from_nobody_known(config: DataConfig, tmp_path: Path) -> None:
    row = {"conversations": [{"from": "narrator", "value": "x"}]}
    with pytest.raises(InputError, match="a message from 'narrator', not from human, "):
        text(write(tmp_path / "a.jsonl", [row]), config)


def test_text_files_hold_no_conversations(config: DataConfig, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello")
    with pytest.raises(InputError, match="a.txt: data.content chat is read from JSONL and Parquet alone"):
        text(tmp_path / "a.txt", config)
    (tmp_path / "empty.jsonl").write_text("")
    assert text(tmp_path / "empty.jsonl", config) == ("", {})


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"chat_template": "x"}, "data.content chat"),
        ({"date": "2026-01-31"}, "data.content chat"),
        ({"content": "chat", "paths": ("a",), "date": "31.1.2026"}, "no day as in"),
        ({"content": "chat"}, "data.paths"),
    ],
)
def test_settings_that_do_not_go_together(settings: dict[str, Any], said: str) -> None:
    (problem,) = DataConfig(**settings).problems()
    assert said in problem
