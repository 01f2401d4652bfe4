"""Prompts and answers that are texts, without a chat template: ids and masks as TRL makes them, and what is refused.

TRL adds the text of EOS to an answer that does not end with it, tokenizes the prompt, and the prompt with the answer,
and learns the tokens from the first one on in which they differ, of a pair in the same place (`_prepare_dataset` of its
trainers for SFT, DPO and KTO; its reward trainer learns no tokens, and has the same ids).
"""

import itertools
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chats import CHATML, write_tokenizer
from commands import command
from corpora import documents_of, prepare
from tokenizer_shapes import PIECES, SHAPES

from jaxopt_llm.config import DataConfig
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.data.reading.skipped import Skipped
from jaxopt_llm.data.tokens import tokenizer_files
from jaxopt_llm.data.tokens.corpus import open_all_documents
from jaxopt_llm.data.tokens.pieces import TokenStream
from jaxopt_llm.data.tokens.tokenizer import load_tokenizer

transformers = pytest.importorskip("transformers")
Row = dict[str, Any]
Learned = list[tuple[list[int], list[bool]]]


def read(path: Path, config: DataConfig) -> tuple[Learned, TokenStream, Skipped]:
    """Return the ids and the mask of each document, their stream, and what was skipped."""
    given = replace(config, paths=(str(path),))
    stream, skipped = open_all_documents(given, load_tokenizer(given))
    starts = stream.document_starts(0, stream.size).tolist()
    documents = documents_of(stream)
    masks = [stream.read_mask(at, len(ids)).tolist() for at, ids in zip(starts, documents, strict=True)]
    return list(zip(documents, masks, strict=True)), stream, skipped


def write(path: Path, rows: list[Row]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def some_texts(eos: str) -> list[tuple[str, str, str]]:
    """Return prompts, each with two answers, with and without blanks between them, of all kinds of characters."""
    choose = random.Random(3)

    def some() -> str:
        parts = [choose.choice(choose.choice(PIECES[:-1])) for _ in range(choose.randrange(1, 8))]
        return choose.choice(("", " ", "\n")) + choose.choice(("", " ")).join(parts) + choose.choice(("", " ", "\n"))

    found = [("Q: 1+1?\nA:", " It is 2.", " It is 3."), ("Which", f" one{eos}", " two"), ("a", "", " b")]
    return found + [(some(), some(), f"{some()}x") for _ in range(60)]


def as_trl(tokenizer: Any, prompt: str, *answers: str) -> Learned:
    """Return the ids and masks of a prompt with an answer, or with each of a pair, as TRL 1.16 makes them."""
    answers = tuple(text if text.endswith(tokenizer.eos_token) else text + tokenizer.eos_token for text in answers)
    first, *whole = (tokenizer(text)["input_ids"] for text in (prompt, *(prompt + answer for answer in answers)))
    begin = min(
        sum(1 for _ in itertools.takewhile(lambda two: two[0] == two[1], zip(first, ids, strict=False)))
        for ids in whole
    )
    return [(ids, [at >= begin for at in range(len(ids))]) for ids in whole]


# A tokenizer that adds an end to every text: TRL then has two of them. Split special tokens have no EOS there.
ELSE = ("unigram", "pieces", "extra", "split special")


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape not in ELSE])
def test_ids_and_masks_are_those_of_trl(shape: str, tmp_path: Path) -> None:
    folder = SHAPES[shape](tmp_path)
    theirs, config = transformers.AutoTokenizer.from_pretrained(folder), DataConfig(tokenizer=str(folder))
    texts = some_texts(theirs.eos_token)
    single = [{"prompt": prompt, "completion": answer} for prompt, answer, _ in texts]
    judged = [{**row, "label": number % 2 == 0} for number, row in enumerate(single)]
    pairs = [{"prompt": prompt, "chosen": chosen, "rejected": rejected} for prompt, chosen, rejected in texts]
    of_answers = [each for prompt, answer, _ in texts for each in as_trl(theirs, prompt, answer)]
    of_pairs = [each for prompt, *answers in texts for each in as_trl(theirs, prompt, *answers)]
    for content, rows, wanted in (
        ("pairs", single, of_answers),
        ("preference", pairs, of_pairs),
        ("unpaired", judged, of_answers),
        ("chat", pairs, of_pairs),
    ):
        found, stream, skipped = read(write(tmp_path / "a.jsonl", rows), replace(config, content=content))
        assert skipped.describe() == [] and bool(stream.pairs) == (content != "pairs")
        assert (found[::2] if content == "unpaired" else found) == wanted  # without mismatched answers


def test_a_token_that_begins_in_the_prompt_is_learned_with_the_answer(tmp_path: Path) -> None:
    """Of a pair from the same place on."""
    folder = SHAPES["gpt 2"](tmp_path)
    rows = [{"prompt": "The ", "chosen": "the", "rejected": "\nthe"}]
    config = DataConfig(tokenizer=str(folder), content="preference")
    found, *_ = read(write(tmp_path / "a.jsonl", rows), config)
    tokenizer = load_tokenizer(config)
    learned = [tokenizer.decode(np.array(ids)[mask]) for ids, mask in found]
    assert learned == [" the", " \nthe"]


TEXTS = {"prompt": "Q: 1+1?\nA:", "chosen": " It is 2.", "rejected": " No é."}
MESSAGES = {"prompt": [{"role": "user", "content": "q"}], "completion": [{"role": "assistant", "content": "a"}]}


def test_bytes_have_no_template(tmp_path: Path) -> None:
    """And no text of EOS: its id follows, also an empty answer."""
    rows = [TEXTS, {**TEXTS, "rejected": ""}]
    found, _, skipped = read(write(tmp_path / "a.jsonl", rows), DataConfig(content="preference"))
    expected = []
    for row in rows:
        for side in ("chosen", "rejected"):
            prompt, answer = row["prompt"].encode(), row[side].encode()
            mask = [False] * (1 + len(prompt)) + [True] * (len(answer) + 1)
            expected.append(([256, *prompt, *answer, 257], mask))
    assert found == expected
    assert skipped.describe_notes() == [
        "prompts and answers: 2 rows have texts, which are joined without a chat template"
    ]


def test_texts_of_a_tokenizer_with_a_template_are_turns_unless_none_is_chosen(tmp_path: Path) -> None:
    with_template, without = (write_tokenizer(tmp_path / str(each is None), each) for each in (CHATML, None))
    path = write(tmp_path / "a.jsonl", [TEXTS] * 3)
    turns, _, skipped = read(path, DataConfig(content="preference", tokenizer=str(with_template)))
    assert "prompts and answers: 3 rows have texts, which are turns of the chat template" in skipped.describe_notes()[0]
    none = DataConfig(content="preference", tokenizer=str(with_template), chat_template="none")
    joined, stream, _ = read(path, none)
    bare, *_ = read(path, replace(none, tokenizer=str(without), chat_template=""))
    assert joined == bare != turns
    # A prepared folder holds the same, and trains without a template.
    folder = prepare(tmp_path / "prepared", path, none)
    again, prepared, skipped = read(folder, DataConfig(tokenizer=str(with_template)))
    assert again == joined and prepared.pairs == stream.pairs and skipped.read["joined"] == 0


def test_a_mismatched_answer_is_joined_to_the_prompt(tmp_path: Path) -> None:
    rows = [{"prompt": f"{letter}?", "completion": f" {letter}", "label": 1} for letter in "ab"]
    found, stream, _ = read(write(tmp_path / "a.jsonl", rows), DataConfig(content="unpaired"))
    texts = [bytes(ids[1:-1]).decode() for ids, _ in found]
    assert texts == ["a? a", "a? b", "b? b", "b? a"] and stream.pairs == "unpaired"
    assert all((ids[0], ids[-1]) == (256, 257) and mask == [False] * 3 + [True] * 3 for ids, mask in found)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (MESSAGES, "with messages, which need a chat template (name one with --data.chat-template)"),
        (
            {**MESSAGES, "prompt": "q"},
            "with a prompt that is a text, and a completion that is none (write both as texts",
        ),
        ({**MESSAGES, "completion": "a"}, "with a completion that is a text, and a prompt that is none (write both as"),
        (
            {**MESSAGES, "prompt": json.dumps(MESSAGES["prompt"]), "completion": "a"},
            "with a completion that is a text, and a prompt that is none",
        ),
        ({"prompt": "q", "completion": "a", "system": "s"}, "with the field system, which needs a chat template"),
        ({"prompt": "q", "completion": "a", "tools": "[]"}, "with the field tools, which needs a chat template"),
        ({"messages": MESSAGES["prompt"]}, "without the fields of the form pairs"),
    ],
)
def test_a_row_that_needs_a_template_is_told(row: Row, message: str, tmp_path: Path) -> None:
    config = DataConfig(content="pairs", tokenizer=str(write_tokenizer(tmp_path / "t", None)))
    path = write(tmp_path / "a.jsonl", [{"prompt": "q", "completion": "a"}, row])
    with pytest.raises(InputError) as error:
        read(path, config)
    assert f"a.jsonl, line 2: {message}" in str(error.value) and "\n" not in str(error.value)
    found, _, skipped = read(path, replace(config, malformed="skip"))
    assert len(found) == 1 and [*skipped.counts.values()] == [1]


def test_messages_still_need_a_template(tmp_path: Path) -> None:
    tokenizer = str(write_tokenizer(tmp_path / "t", None))
    path = write(tmp_path / "a.jsonl", [{"messages": [*MESSAGES["prompt"], *MESSAGES["completion"]]}])
    for content, template, message in (
        ("messages", "", "has no chat template"),
        ("messages", "none", "data.chat_template=none: messages need a template"),
        ("chat", "", "line 1: with messages, which need a chat template"),
    ):
        with pytest.raises(InputError, match=message):
            read(path, DataConfig(content=content, tokenizer=tokenizer, chat_template=template))  # type: ignore[arg-type]


@pytest.mark.parametrize(("template", "adds"), [("", True), ("none", True), ("chat.jinja", False)])
def test_an_exported_tokenizer_adds_the_bos_of_the_training(template: str, adds: bool, tmp_path: Path) -> None:
    """A template would write its own."""
    (tmp_path / "chat.jinja").write_text(CHATML)
    folder = write_tokenizer(tmp_path / "t", CHATML if template == "none" else None)
    name = str(tmp_path / template) if template == "chat.jinja" else template
    config = DataConfig(content="pairs", tokenizer=str(folder), bos="<|bos|>", chat_template=name)
    (tmp_path / "out").mkdir()
    tokenizer_files.write_tokenizer(config, load_tokenizer(config), tmp_path / "out")
    ids = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")("a")["input_ids"]
    assert (ids[0] == load_tokenizer(config).bos) == adds


@pytest.mark.slow
def test_pairs_of_texts_are_trained_on_without_a_template(tmp_path: Path) -> None:
    """By the command: DPO with adapters of a model whose tokenizer has none."""
    rows = [{"prompt": f"{n}+1=", "chosen": f" {n + 1}", "rejected": f" {n}"} for n in range(40)]
    path = write(tmp_path / "a.jsonl", rows)
    options = ("--model.layers", 1, "--model.width", 16, "--model.mlp-width", 16, "--model.head-dim", 8)
    options += ("--data.paths", path, "--data.content", "preference", "--training.objective", "dpo", "--lora.rank", 2)
    options += ("--training.steps", 2, "--training.batch-size", 8, "--training.sequence-length", 64)
    found = command("train", "--config", "quickstart.py", *options, "--run.directory", tmp_path / "run")
    assert found.returncode == 0, found.stderr
    assert "prompts and answers: 40 rows have texts, which are joined without a chat template" in found.stdout
    first = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert abs(first["loss"] - np.log(2)) < 1e-2
