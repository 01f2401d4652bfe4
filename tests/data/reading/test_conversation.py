"""Conversations in every form and file format, and rows that are rejected."""

import csv
import itertools
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from chats import CHATML, Messages, conversation
from corpora import prepare

from jaxopt_llm.config import DataConfig
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.data.reading import source
from jaxopt_llm.data.rows.packing import PackedRows
from jaxopt_llm.data.tokens import prepared
from jaxopt_llm.data.tokens.corpus import open_all_documents, open_corpus
from jaxopt_llm.data.tokens.tokenizer import load_tokenizer

CHATS = [conversation(number)[:2] for number in range(12)]


@pytest.fixture
def config(tmp_path: Path) -> DataConfig:
    (tmp_path / "chat.jinja").write_text(CHATML)
    return DataConfig(content="chat", chat_template=str(tmp_path / "chat.jinja"), held_out=0.3)


def pair(messages: Messages) -> dict[str, Any]:
    return {"prompt": messages[0]["content"], "completion": messages[1]["content"]}


def lists(messages: Messages) -> dict[str, Any]:
    """Return prompt and completion as lists. The prompt has no answer, of which nothing would be learned."""
    return {"prompt": messages[:1], "completion": messages[1:]}


def alpaca(messages: Messages) -> dict[str, Any]:
    return {"instruction": messages[0]["content"], "input": "", "output": messages[1]["content"]}


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


def json_text(messages: Messages) -> dict[str, Any]:
    return {"messages": json.dumps(messages), "tools": ""}


FORMS = {
    "messages": lambda messages: {"messages": messages},
    "pairs": pair,
    "lists": lists,
    "sharegpt": sharegpt,
    "alpaca": alpaca,
    "parts": parts,
}
NAMED = {"parts": "messages", "lists": "pairs"}
TABLE_FORMS = {"messages": json_text, "pairs": pair, "alpaca": alpaca}


def write(path: Path, rows: list[Any]) -> Path:
    if path.suffix == ".parquet":
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=5)
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            table = csv.DictWriter(file, list(rows[0]))
            table.writeheader()
            table.writerows(rows)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=1))
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
    return load_tokenizer(config).decode(stream.read(0, stream.size).tolist()), dict(skipped.counts)


@pytest.mark.parametrize("suffix", ["jsonl", "json", "parquet"])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_and_format_is_the_same_conversations(
    form: str, suffix: str, config: DataConfig, tmp_path: Path
) -> None:
    expected, _ = read(write(tmp_path / "expected.jsonl", [FORMS["messages"](each) for each in CHATS]), config)
    path = write(tmp_path / f"a.{suffix}", [{"id": 1, **FORMS[form](each)} for each in CHATS])
    found, sha256 = read(path, config)
    assert found == expected and len(expected[2]) > 0
    named, same = read(path, replace(config, content=NAMED.get(form, form)))
    assert (named, same) == (found, sha256)
    with pytest.raises(InputError, match="no column 'text'.*or read conversations with --data.content chat"):
        read(path, DataConfig())


@pytest.mark.parametrize("form", TABLE_FORMS)
def test_csv_holds_the_same_conversations(form: str, config: DataConfig, tmp_path: Path) -> None:
    """An empty field of an optional column counts as absent."""
    expected, _ = read(write(tmp_path / "expected.jsonl", [FORMS["messages"](each) for each in CHATS]), config)
    rows = [{"id": 1, **TABLE_FORMS[form](each), "system": "", "chosen": ""} for each in CHATS]
    found, sha256 = read(write(tmp_path / "a.csv", rows), config)
    assert found == expected
    assert read(tmp_path / "a.csv", replace(config, content=form)) == (found, sha256)
    with pytest.raises(InputError, match="a.csv: no column 'text'.*or read conversations with --data.content chat"):
        read(tmp_path / "a.csv", DataConfig())


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "parquet"])
def test_the_input_of_an_instruction_follows_it(suffix: str, config: DataConfig, tmp_path: Path) -> None:
    rows = [{"instruction": "Add.", "input": "1, 2", "output": "3"}, {"instruction": "Go.", "input": "", "output": ""}]
    answers = "<|im_start|>assistant\n{}<|im_end|>\n"
    expected = "<|im_start|>user\nAdd.\n\n1, 2<|im_end|>\n" + answers.format(3)
    expected += "<|im_start|>user\nGo.<|im_end|>\n" + answers.format("")
    assert text(write(tmp_path / f"a.{suffix}", rows), config) == (expected, {})
    without = [{key: value for key, value in row.items() if key != "input"} for row in rows[1:]]
    assert text(write(tmp_path / f"b.{suffix}", without), config)[0] in expected
    only_input = [{"instruction": "", "input": "Go.", "output": ""}]
    assert text(write(tmp_path / f"c.{suffix}", only_input), config)[0] in expected


def test_instructions_beside_conversations_do_not_count(config: DataConfig, tmp_path: Path) -> None:
    """Such files were read before the form alpaca existed."""
    rows = [{**FORMS["messages"](each), "instruction": "x", "output": "y"} for each in CHATS]
    expected, _ = read(write(tmp_path / "expected.jsonl", [FORMS["messages"](each) for each in CHATS]), config)
    assert read(write(tmp_path / "a.jsonl", rows), config)[0] == expected
    (tmp_path / "a.jsonl").write_text(json.dumps({"instruction": "x", "output": 1}))
    with pytest.raises(InputError, match=r"a.jsonl, line 1: with an instruction, input or output that is not text"):
        text(tmp_path / "a.jsonl", config)


def test_prompts_and_completions_may_mix_texts_and_lists(config: DataConfig, tmp_path: Path) -> None:
    rows = [
        {"prompt": CHATS[1][0]["content"], "completion": CHATS[1][1:]},
        {"prompt": CHATS[1][:1], "completion": CHATS[1][1]["content"]},
    ]
    expected = text(write(tmp_path / "expected.jsonl", [pair(CHATS[1])] * 2), config)
    assert text(write(tmp_path / "a.jsonl", rows), config) == expected
    as_json = [
        {name: each if isinstance(each, str) else json.dumps(each) for name, each in row.items()} for row in rows
    ]
    assert text(write(tmp_path / "a.csv", as_json), config) == expected
    for row, message in (
        ({"prompt": CHATS[1], "completion": []}, r"without an assistant message \(the completion has no message\)"),
        ({"prompt": 1, "completion": "x"}, "with a field prompt that is neither text nor a list of messages"),
        ({"prompt": ["x"], "completion": "x"}, "with a message without a role"),
    ):
        with pytest.raises(InputError, match=f"a.jsonl, line 1: {message}"):
            text(write(tmp_path / "a.jsonl", [row]), config)


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
        "with both a system field and a",
    ),
    "a system of parts": ({**GOOD, "system": [{"type": "text", "text": "x"}]}, "with a system field that is not text"),
    "another form": (pair(CHATS[1]), "without the fields of the form messages"),
    "no object": ([1], "not a JSON object"),
    "no list": ({"messages": "hello"}, "with messages other than a list or its JSON text"),
    "no role": ({"messages": [{"content": "x"}]}, "with a message without a role"),
    "nothing learned": (
        {"messages": [CHATS[1][0], {**CHATS[1][1], "weight": 0}]},
        "without an assistant message that is learned",
    ),
    "no message": ({"messages": ["x"]}, "with a message without a role"),
    "no content": ({"messages": [{"role": "user"}]}, "with a message whose content is not text"),
    "an image": (
        {"messages": [{"role": "user", "content": [{"type": "image", "image": "x"}]}]},
        "with a part of a message that is not text",
    ),
    "no assistant": ({"messages": CHATS[1][:1]}, "without an assistant message"),
    "a preference": (
        {**GOOD, "chosen": "a", "rejected": "b"},
        "with a preference pair (chosen, rejected) instead of one conversation (--data.content preference and "
        "--training.objective dpo train on it",
    ),
    "tools": ({**GOOD, "tools": "{"}, "with tools other than a list or its JSON text"),
}


@pytest.mark.parametrize("case", BAD)
def test_malformed_conversations_are_rejected_or_counted(case: str, config: DataConfig, tmp_path: Path) -> None:
    row, message = BAD[case]
    path = write(tmp_path / "a.jsonl", [GOOD, row, GOOD])
    with pytest.raises(InputError, match=rf"a.jsonl, line 2: {re.escape(message)}.*data.malformed to skip"):
        text(path, config)
    (skipped,) = text(path, replace(config, malformed="skip"))[1].items()
    assert skipped[0].startswith(message.split(" (")[0]) and skipped[1] == 1


def test_half_a_character_and_deep_lists(config: DataConfig, tmp_path: Path) -> None:
    half = json.dumps({"messages": [CHATS[1][0], {"role": "assistant", "content": "\ud83d!"}]})
    deep = '{"messages": ' + "[" * 900 + "]" * 900 + "}"
    path = tmp_path / "a.jsonl"
    path.write_text(f"{json.dumps(GOOD)}\n{half}\n{deep}\n")
    found, skipped = text(path, replace(config, malformed="replace"))
    assert "\N{REPLACEMENT CHARACTER}!" in found
    assert skipped == {"not UTF-8, replaced": 1, "not valid JSON": 1}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"text": "a"},
            ": the fields match no form of conversations, and no other file .* as text with --data.content text",
        ),
        (
            {"prompt": "a", "response": "b"},
            "match no form .*; name the columns of a form with --data.columns FIELD=COLUMN .*pairs: completion, p",
        ),
        (
            {**GOOD, **pair(CHATS[1])},
            r"match several forms of conversations; set --data.content to one of them: messages, pairs",
        ),
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


@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "csv"])
def test_texts_stand_beside_conversations_of_several_forms(suffix: str, config: DataConfig, tmp_path: Path) -> None:
    """Files of one corpus, with and without weights, and of one prepared folder. All tokens of a text are learned."""
    folder, tokenizer = tmp_path / "mixed", load_tokenizer(config)
    folder.mkdir()
    write(folder / "a.jsonl", [{"messages": each} for each in CHATS])
    write(folder / "b.jsonl", [pair(each) for each in CHATS])
    write(folder / f"c.{suffix}", [{"text": f"plain {n}", "id": n} for n in range(6)])
    paths, of = tuple(str(each) for each in sorted(folder.iterdir())), tmp_path / "mixed" / "*"
    ready = prepare(tmp_path / "prepared", of, config)
    for given in (paths, (str(of),), (str(ready),)):
        stream, skipped = open_all_documents(replace(config, paths=given), tokenizer)
        texts = 0 if given == (str(ready),) else 6
        assert skipped.read["texts"] == texts and (
            not texts or "texts: 6 rows have no form" in skipped.describe_notes()[-1]
        )
        starts = [*stream.document_starts(0, stream.size).tolist(), stream.size]
        assert len(starts) == 2 * len(CHATS) + 6 + 1
        for first, last in itertools.pairwise(starts):
            content = tokenizer.decode(stream.read(first, last - first))
            assert bool(stream.read_mask(first, last - first).all()) == content.startswith("plain ")
            assert content.startswith(("plain ", "<|im_start|>"))
            ends = stream.read(last - 1, 1).tolist() == [tokenizer.eos]
            assert ends == content.startswith("plain ")
    corpus = open_corpus(replace(config, paths=paths, weights=(2, 1, 1)), tokenizer)
    assert [each.training.holds("mask") for each in corpus.sources] == [True, True, False]
    with pytest.raises(InputError, match="no other file has one"):
        open_corpus(replace(config, paths=paths[2:]), tokenizer)
    pairs = write(tmp_path / "d.jsonl", [{"prompt": "p", "chosen": "a", "rejected": "b"}])
    mixed = r"d.jsonl holds pairs of a chosen and a rejected answer, and .*c\.\w+ does not"
    with pytest.raises(InputError, match=mixed):
        open_corpus(replace(config, paths=(paths[2], str(pairs))), tokenizer)


def test_a_message_from_an_unknown_role(config: DataConfig, tmp_path: Path) -> None:
    row = {"conversations": [{"from": "narrator", "value": "x"}]}
    with pytest.raises(
        InputError, match="with a message from an unknown sender .it is from 'narrator'; it must be from one of human, "
    ):
        text(write(tmp_path / "a.jsonl", [row]), config)


def test_text_files_hold_no_conversations(config: DataConfig, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello")
    with pytest.raises(InputError, match="a.txt: data.content=chat requires JSONL, JSON, CSV, Parquet or Arrow"):
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
