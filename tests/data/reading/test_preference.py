"""Rows with a chosen and a rejected answer, which become two documents: TRL's shapes, malformed rows, and corpora."""

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import templates
from chats import CHATML, Messages, write_tokenizer
from commands import command
from corpora import documents_of, prepare
from test_conversation import write

from jaxopt_llm.config import DataConfig, EvaluationConfig
from jaxopt_llm.core import json_files
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.data.reading import source
from jaxopt_llm.data.reading.storage import PLAN
from jaxopt_llm.data.tokens import prepared
from jaxopt_llm.data.tokens.corpus import Corpus, open_all_documents, open_corpus, open_validation_sets
from jaxopt_llm.data.tokens.pieces import TokenStream
from jaxopt_llm.data.tokens.tokenizer import load_tokenizer

Row = dict[str, Any]


def user(text: str) -> Row:
    return {"role": "user", "content": text}


def assistant(text: str) -> Row:
    return {"role": "assistant", "content": text}


SYSTEM = {"role": "system", "content": "Be kind."}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "f"}}]}
RESULT = {"role": "tool", "content": "seven"}
HUMAN = "\n\nHuman: Do you?\n\nAssistant:"
LONGER = [SYSTEM, user("q"), assistant("x"), user("r")]

# A row, its prompt, and the chosen and the rejected answer. Without the field `prompt`, or with a prompt that is a text
# beside lists, TRL's maybe_extract_prompt takes the common beginning as the prompt, in lists up to the last message.
SHAPES: dict[str, tuple[Row, Messages, Messages, Messages]] = {
    "texts": (
        {"prompt": "q", "chosen": "a", "rejected": "b"},
        [user("q")],
        [assistant("a")],
        [assistant("b")],
    ),
    "lists": (
        {"prompt": LONGER, "chosen": [assistant("a")], "rejected": [assistant("b")]},
        LONGER,
        [assistant("a")],
        [assistant("b")],
    ),
    "answers of several turns": (
        {
            "prompt": [user("q")],
            "chosen": [assistant("a"), user("r"), assistant("c")],
            "rejected": [assistant("a"), user("r"), assistant("d")],
        },
        [user("q")],
        [assistant("a"), user("r"), assistant("c")],
        [assistant("a"), user("r"), assistant("d")],
    ),
    "a text and lists": (
        {"prompt": "q", "chosen": [assistant("a")], "rejected": [assistant("b")]},
        [user("q")],
        [assistant("a")],
        [assistant("b")],
    ),
    "a list and texts": (
        {"prompt": LONGER, "chosen": "a", "rejected": "b"},
        LONGER,
        [assistant("a")],
        [assistant("b")],
    ),
    "conversations": (
        {"chosen": [*LONGER, assistant("a")], "rejected": [*LONGER, assistant("b"), user("s"), assistant("c")]},
        LONGER,
        [assistant("a")],
        [assistant("b"), user("s"), assistant("c")],
    ),
    "a conversation that the other one continues": (
        {"chosen": [user("q"), assistant("a"), user("r"), assistant("b")], "rejected": [user("q"), assistant("a")]},
        [user("q")],
        [assistant("a"), user("r"), assistant("b")],
        [assistant("a")],
    ),
    "conversations that differ in a question": (
        {"chosen": [user("q"), assistant("x"), user("r"), assistant("a")], "rejected": [user("q"), assistant("b")]},
        [user("q")],
        [assistant("x"), user("r"), assistant("a")],
        [assistant("b")],
    ),
    "ultrafeedback": (
        {
            "prompt": "q",
            "prompt_id": "1f",
            "chosen": [user("q"), assistant("a")],
            "rejected": [user("q"), assistant("b")],
            "messages": [user("q"), assistant("a")],
            "score_chosen": 8.5,
            "score_rejected": 4.0,
        },
        [user("q")],
        [assistant("a")],
        [assistant("b")],
    ),
    "conversations after a system message": (
        {
            "prompt": " q\n",
            "chosen": [SYSTEM, user("q"), assistant("a")],
            "rejected": [SYSTEM, user("q"), assistant("b")],
        },
        [SYSTEM, user("q")],
        [assistant("a")],
        [assistant("b")],
    ),
    "conversations that repeat a list": (
        {"prompt": LONGER, "chosen": [*LONGER, assistant("a")], "rejected": [*LONGER, assistant("b")]},
        LONGER,
        [assistant("a")],
        [assistant("b")],
    ),
    "other names": (
        {
            "chosen": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}],
            "rejected": [user("q"), assistant("b")],
        },
        [user("q")],
        [assistant("a")],
        [assistant("b")],
    ),
    "single messages": (
        {"prompt": LONGER, "chosen": {"from": "gpt", "value": "a"}, "rejected": {"from": "gpt", "value": "b"}},
        LONGER,
        [assistant("a")],
        [assistant("b")],
    ),
    "a call after the prompt": (
        {"prompt": [user("q"), CALL], "chosen": [RESULT, assistant("a")], "rejected": [RESULT, assistant("b")]}
        | {"chosen": [user("q"), CALL, RESULT, assistant("a")], "rejected": [user("q"), CALL, RESULT, assistant("b")]},
        [user("q"), CALL, RESULT],
        [assistant("a")],
        [assistant("b")],
    ),
    "plain texts": (
        {"chosen": "The sky is blue.", "rejected": "The sky is green."},
        [user("The sky is")],
        [assistant(" blue.")],
        [assistant(" green.")],
    ),
    "transcripts": (
        {"chosen": f"{HUMAN} Yes, I do.", "rejected": f"{HUMAN} No."},
        [user(HUMAN)],
        [assistant(" Yes, I do.")],
        [assistant(" No.")],
    ),
    # TRL's rule ends these prompts after "can" and "ca": within a word, and often within a token.
    "texts that differ behind a word": (
        {"chosen": f"{HUMAN} I can.", "rejected": f"{HUMAN} I can't."},
        [user(f"{HUMAN} I")],
        [assistant(" can.")],
        [assistant(" can't.")],
    ),
    "texts that differ within a word": (
        {"chosen": "A: cat", "rejected": "A: car"},
        [user("A:")],
        [assistant(" cat")],
        [assistant(" car")],
    ),
    "a text that the other one continues": (
        {"chosen": "A: Yes.", "rejected": "A: Yes. No."},
        [user("A: Yes.")],
        [assistant("")],
        [assistant(" No.")],
    ),
}
IN_TABLES = [case for case, (row, *_) in SHAPES.items() if all(isinstance(value, str) for value in row.values())]


@pytest.fixture
def config(tmp_path: Path) -> DataConfig:
    (tmp_path / "chat.jinja").write_text(CHATML)
    return DataConfig(content="preference", chat_template=str(tmp_path / "chat.jinja"), held_out=0.3)


def read_all(path: Path, config: DataConfig) -> tuple[TokenStream, list[tuple[list[int], list[bool]]]]:
    """Return all documents: as a stream, and each as tokens with its mask."""
    stream, _ = open_all_documents(replace(config, paths=(str(path),)), load_tokenizer(config))
    bounds = [*stream.document_starts(0, stream.size).tolist(), stream.size]
    sizes = [(a, b - a) for a, b in itertools.pairwise(bounds)]
    return stream, [(stream.read(*each).tolist(), stream.read_mask(*each).tolist()) for each in sizes]


def as_conversations(prompt: Messages, *answers: Messages) -> list[Row]:
    """Return each answer as a conversation of which only the answer is learned."""
    context = [{**message, "weight": 0} if message["role"] == "assistant" else message for message in prompt]
    return [{"messages": [*context, *answer]} for answer in answers]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize("case", SHAPES)
def test_a_row_is_the_chosen_and_then_the_rejected_conversation(
    case: str, suffix: str, config: DataConfig, tmp_path: Path
) -> None:
    row, *expected = SHAPES[case]
    path = write(tmp_path / f"a.{suffix}", [row, row])
    conversations = write(tmp_path / "b.jsonl", as_conversations(*expected) * 2)
    stream, documents = read_all(path, config)
    others, same = read_all(conversations, replace(config, content="messages"))
    assert documents == same and len(documents) == 4
    assert stream.pairs and not others.pairs
    detected, again = read_all(path, replace(config, content="chat"))
    assert again == documents and detected.pairs


@pytest.mark.parametrize("case", IN_TABLES)
def test_tables_hold_texts(case: str, config: DataConfig, tmp_path: Path) -> None:
    row, *_ = SHAPES[case]
    expected = read_all(write(tmp_path / "a.jsonl", [row]), config)[1]
    for name, more in (("a.csv", {"system": "", "tools": ""}), ("a.json", {})):
        assert read_all(write(tmp_path / name, [{**row, **more}]), config)[1] == expected
    optional = write(tmp_path / "b.csv", [{"prompt": "", **row}])  # an empty prompt is an absent one
    assert read_all(optional, config)[1] == expected


@pytest.mark.parametrize("case", [case for case in SHAPES if case not in IN_TABLES])
def test_tables_hold_lists_as_json(case: str, config: DataConfig, tmp_path: Path) -> None:
    row, *_ = SHAPES[case]
    expected = read_all(write(tmp_path / "a.jsonl", [row]), config)[1]
    row = {name: [value] if isinstance(value, dict) else value for name, value in row.items()}
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in row.items()}
    assert read_all(write(tmp_path / "a.csv", [texts]), config)[1] == expected
    of_pandas = {name: value if isinstance(value, str) else str(value) for name, value in row.items()}
    with pytest.raises(InputError, match="a CSV made by pandas has Python's syntax; save it as Parquet or JSONL"):
        read_all(write(tmp_path / "b.csv", [of_pandas]), config)


@pytest.mark.parametrize(
    "text",
    ['[{"role": "nurse", "name": "Ann"}]', '[{"from": "A", "to": "B"}]', '[{"role": "x"', "[{'value': 3}]", "[]"],
)
def test_an_answer_may_be_json(text: str, config: DataConfig, tmp_path: Path) -> None:
    _, documents = read_all(write(tmp_path / "a.jsonl", [{"prompt": "q", "chosen": text, "rejected": "b"}]), config)
    assert f"assistant\n{text}<|im_end|>" in load_tokenizer(config).decode(documents[0][0])


def test_fields_beside_the_answers(config: DataConfig, tmp_path: Path) -> None:
    """Scores and the copy of a conversation are counted as not read. System, tools and arguments are both answers'."""
    row, *_ = SHAPES["ultrafeedback"]
    tool = {"type": "function", "function": {"name": "f"}}
    path = write(
        tmp_path / "a.jsonl", [row, {**row, "system": "Be brief.", "tools": [tool], "chat_template_kwargs": {}}]
    )
    given = replace(config, paths=(str(path),), content="chat")
    _, skipped = open_all_documents(given, load_tokenizer(given))
    unread = "messages (2 rows), prompt_id (2 rows), score_chosen (2 rows), score_rejected (2 rows)"
    assert skipped.describe() == [] and sorted(skipped.describe_unread()[17:].split(", ")) == unread.split(", ")
    _, documents = read_all(path, config)
    texts = [load_tokenizer(config).decode(tokens) for tokens, _ in documents]
    assert [("Tools:" in text, "system\nBe brief." in text) for text in texts] == [(False, False)] * 2 + [
        (True, True)
    ] * 2


def test_columns_with_other_names(config: DataConfig, tmp_path: Path) -> None:
    row, *_ = SHAPES["texts"]
    expected = read_all(write(tmp_path / "a.jsonl", [row]), config)[1]
    path = write(tmp_path / "b.jsonl", [{"question": "q", "answer_j": "a", "answer_k": "b"}])
    for content in ("preference", "chat"):
        columns = ("prompt=question", "chosen=answer_j", "rejected=answer_k")
        assert read_all(path, replace(config, content=content, columns=columns))[1] == expected


Q, A, B = user("q"), assistant("a"), assistant("b")
BAD: dict[str, tuple[Row, str]] = {
    "one answer": ({"prompt": "q", "chosen": "a"}, "without the fields of the form preference (chosen, rejected)"),
    "a conversation": ({"messages": [Q, A]}, "without the fields of the form preference (chosen, rejected)"),
    "the same answers": (
        {"prompt": "q", "chosen": "a", "rejected": "a"},
        "with a chosen answer that equals the rejected",
    ),
    "no common message": (
        {"chosen": [user("r"), A], "rejected": [Q, B]},
        "without a prompt, and with answers that have no",
    ),
    "only answers": (
        {"chosen": [A], "rejected": [B]},
        "without a prompt, and with answers that have no common beginning (--data.columns prompt=COLUMN",
    ),
    "a prompt by another name": (
        {"question": "Which?", "chosen": "The first one", "rejected": "The second one"},
        "without a prompt (--data.columns prompt=question reads it from that column",
    ),
    "no common word": (
        {"chosen": "Yes", "rejected": "Yesterday"},
        "without a prompt, and with answers that have no",
    ),
    "a text and a list": (
        {"chosen": "q a", "rejected": [Q, B]},
        "without a prompt, and with answers that have no",
    ),
    "another prompt": (
        {"prompt": "r", "chosen": [Q, A], "rejected": [Q, B]},
        "with a prompt that is not in its conversations (--data.columns prompt= leaves it unread)",
    ),
    "another list": (
        {"prompt": [Q, A, Q], "chosen": [Q, A], "rejected": [Q, B]},
        "with a prompt that is not in its conversations",
    ),
    "no answer": (
        {"prompt": "q", "chosen": [], "rejected": [B]},
        "without an assistant message (the chosen answer has no",
    ),
    "a question": (
        {"chosen": [Q, A], "rejected": [Q, user("r")]},
        "without an assistant message (the rejected answer has user",
    ),
    "an unlearned side": (
        {"prompt": "q", "chosen": [A], "rejected": [{**B, "weight": 0}]},
        "without an assistant message that is learned",
    ),
    "a number": ({"prompt": "q", "chosen": 1, "rejected": "b"}, "with a field chosen that is neither text nor a list"),
    "a bad message": ({"prompt": "q", "chosen": "a", "rejected": ["b"]}, "with a message without a role"),
    "a margin": ({"prompt": "q", "chosen": "a", "rejected": "b", "margin": 1}, "with the field margin, which judges"),
    "images": ({"prompt": "q", "chosen": "a", "rejected": "b", "images": ["x"]}, "with the field images, which is not"),
    "what the template rejects": (
        {"prompt": "q", "chosen": "a", "rejected": "forbidden"},
        "the chat template CHAT rejects the conversation (no such word)",
    ),
    "what the template leaves out": (
        {"prompt": "q", "chosen": [{**A, "reasoning_content": "hm"}], "rejected": "b"},
        "with reasoning that the chat template leaves out",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_row_with_a_malformed_side_is_left_out_as_a_whole(case: str, config: DataConfig, tmp_path: Path) -> None:
    row, message = BAD[case]
    template = tmp_path / "chat.jinja"
    fails = "{% for m in messages if m.content == 'forbidden' %}{{ raise_exception('no such word') }}{% endfor %}"
    template.write_text(fails + CHATML)
    good, *_ = SHAPES["texts"]
    path = write(tmp_path / "a.jsonl", [good, row, good])
    message = message.replace("CHAT", str(template))
    with pytest.raises(InputError, match=rf"a.jsonl, line 2: {re.escape(message)}.*data.malformed to skip"):
        read_all(path, config)
    given = replace(config, malformed="skip", paths=(str(path),))
    stream, skipped = open_all_documents(given, load_tokenizer(given))
    only = read_all(write(tmp_path / "b.jsonl", [good, good]), config)[1]
    assert documents_of(stream) == [tokens for tokens, _ in only] and len(only) == 4
    assert [*skipped.counts.values()] == [1] and "a.jsonl, line 2" in skipped.describe()[0]


def test_a_side_without_a_learned_token_leaves_out_the_pair(config: DataConfig, tmp_path: Path) -> None:
    """Generation blocks may be empty."""
    block = "{% generation %}{{ message.content if message.content != 'x' }}{% endgeneration %}"
    body = f"{{% if message.role == 'assistant' %}}{block}{{% else %}}{{{{ message.content }}}}{{% endif %}}"
    source = f"{{% for message in messages %}}{{{{ message.role }}}}: {body}\n{{% endfor %}}"
    (tmp_path / "chat.jinja").write_text(source + "{{ messages | length }}{{ messages[-1].content[:0] }}")
    rows = [{"prompt": "q", "chosen": "a", "rejected": ""}, {"prompt": "q", "chosen": "a", "rejected": "b"}]
    path = write(tmp_path / "a.jsonl", rows)
    given = replace(config, paths=(str(path),))
    stream, skipped = open_all_documents(given, load_tokenizer(given))
    assert stream.documents == 2 and dict(skipped.counts) == {"without assistant tokens": 1}


@pytest.mark.parametrize("name", templates.TEMPLATES)
def test_published_templates_write_one_document_a_side(name: str, tmp_path: Path) -> None:
    """It is the conversation up to its last turn, with that turn as the model is served."""
    eos = {"eos_token": templates.EOS[name]} if name in templates.EOS else {}
    folder = write_tokenizer(tmp_path / name, templates.TEMPLATES[name], templates.SPECIAL, **eos)
    given = DataConfig(tokenizer=str(folder), content="preference", date="2026-01-31")
    prompt = [user("one"), assistant("ein"), user("two")]
    row = {"prompt": prompt, "chosen": "zwei", "rejected": "drei"}
    stream, documents = read_all(write(tmp_path / "a.jsonl", [row] * 2), given)
    rows = as_conversations(prompt, [assistant("zwei")], [assistant("drei")])
    _, expected = read_all(write(tmp_path / "b.jsonl", rows * 2), replace(given, content="messages"))
    assert documents == expected and len(documents) == 4 and stream.pairs
    tokenizer = load_tokenizer(given)
    for (tokens, mask), answer in zip(documents, ["zwei", "drei"] * 2, strict=True):
        learned = tokenizer.decode([token for token, counts in zip(tokens, mask, strict=True) if counts])
        assert answer in learned and "ein" not in learned.replace(answer, "")


def test_turns_of_an_answer_that_the_template_rewrites_are_refused(tmp_path: Path) -> None:
    """Each of them would need a document of its own."""
    folder = write_tokenizer(tmp_path / "qwen", templates.QWEN_3, templates.SPECIAL)
    given = DataConfig(tokenizer=str(folder), content="preference")
    first = assistant("<think>\nhm\n</think>\n\nein")
    row = {"prompt": "one", "chosen": [first, user("two"), assistant("zwei")], "rejected": "x"}
    path = write(tmp_path / "a.jsonl", [row])
    refused = "line 1: with an answer of several turns that the chat template rewrites .--data.learn-turns last learns"
    with pytest.raises(InputError, match=refused):
        read_all(path, given)
    _, documents = read_all(path, replace(given, learn_turns="last"))
    assert len(documents) == 2
    skips = replace(given, malformed="skip", paths=(str(path),))
    assert open_all_documents(skips, load_tokenizer(given))[1].counts.total() == 1
    row["chosen"][0] = {**first, "weight": 0}
    assert read_all(write(tmp_path / "b.jsonl", [row]), given)[1] == documents
    plain = write_tokenizer(tmp_path / "plain", templates.QWEN_2_5, templates.SPECIAL)
    row["chosen"][0] = assistant("ein")
    _, ((tokens, mask), _) = read_all(write(tmp_path / "c.jsonl", [row]), replace(given, tokenizer=str(plain)))
    learned = load_tokenizer(replace(given, tokenizer=str(plain))).decode(
        [token for token, counts in zip(tokens, mask, strict=True) if counts]
    )
    assert "ein" in learned and "zwei" in learned and "two" not in learned


# ---- Corpora.


def numbered_rows(count: int) -> list[Row]:
    return [
        {"prompt": f"question {n}", "chosen": f"yes {n}" * (n % 5 + 1), "rejected": f"no {n}"} for n in range(count)
    ]


def open_at(config: DataConfig, *paths: Path, **settings: Any) -> Corpus:
    given = replace(config, paths=tuple(map(str, paths)), **settings)
    return open_corpus(given, load_tokenizer(given))


def texts_of(stream: TokenStream, config: DataConfig) -> list[str]:
    return [load_tokenizer(config).decode(tokens) for tokens in documents_of(stream)]


@pytest.mark.parametrize("share", [0.01, 0.1, 0.5, 0.9, 0.999])
def test_the_held_out_split_keeps_pairs(share: float, config: DataConfig, tmp_path: Path) -> None:
    rows = numbered_rows(40)
    corpus = open_at(config, write(tmp_path / "a.jsonl", rows), held_out=share)
    numbers = []
    for stream in (corpus.sources[0].training, corpus.held_out):
        texts = texts_of(stream, config)
        assert texts and stream.pairs and len(texts) == stream.documents
        for chosen, rejected in zip(texts[::2], texts[1::2], strict=True):
            (number,) = re.findall(r"question (\d+)<", chosen)
            assert f"question {number}<" in rejected and f"yes {number}" in chosen and f"no {number}<" in rejected
            numbers.append(int(number))
    assert sorted(numbers) == [*range(40)] and corpus.pairs


@pytest.mark.parametrize("content", ["preference", "chat"])
def test_a_prepared_corpus_is_the_same_pairs(
    content: Any, config: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.jsonl", numbered_rows(40))
    direct = open_at(config, path)
    monkeypatch.setattr(source, "PART_BYTES", 300)
    monkeypatch.setattr(prepared, "SHARD_BYTES", 700)
    folder = prepare(tmp_path / "prepared", path, replace(config, content=content))
    assert len(prepared.read_shard_records(folder)) > 2
    for given in (config, DataConfig(held_out=0.3), replace(config, content="chat")):
        opened = open_at(given, folder)
        assert opened.pairs and opened.held_out.pairs
        for ours, theirs in (
            (opened.held_out, direct.held_out),
            (opened.sources[0].training, direct.sources[0].training),
        ):
            assert ours.read(0, ours.size).tolist() == theirs.read(0, theirs.size).tolist()
            assert ours.read_mask(0, ours.size).tolist() == theirs.read_mask(0, theirs.size).tolist()
            assert ours.document_starts(0, ours.size).tolist() == theirs.document_starts(0, theirs.size).tolist()
    prepared.verify_corpus(folder, 1)
    plan = json_files.parse((folder / PLAN).read_bytes())
    prepared.ShardMerger(folder, prepared.describe_arrays(config, plan["dtype"])).finish(
        plan
    )  # as if it had been killed before
    assert open_at(config, folder).pairs


def test_a_prepared_corpus_of_conversations_is_no_pairs(config: DataConfig, tmp_path: Path) -> None:
    rows = [{"messages": [user(f"q {n}"), assistant("a")]} for n in range(8)]
    folder = prepare(tmp_path / "prepared", write(tmp_path / "a.jsonl", rows), replace(config, content="chat"))
    assert not open_at(config, folder).pairs


def test_pairs_and_other_documents_do_not_mix(
    config: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither in one folder, nor as two sources, nor in a prepared corpus."""
    (tmp_path / "both").mkdir()
    pairs = write(tmp_path / "both" / "a.jsonl", numbered_rows(12))
    rows = [{"messages": [user(f"q {n}"), assistant("a")]} for n in range(12)]
    chats = write(tmp_path / "both" / "b.jsonl", rows)
    text = prepare(
        tmp_path / "text", write(tmp_path / "t.jsonl", [{"text": f"t {n}"} for n in range(12)]), DataConfig()
    )
    given = replace(config, content="chat")
    mixed = (
        r"data.paths: .*a.jsonl holds pairs of a chosen and a rejected answer, and .*(b.jsonl|text) does not; name only"
    )
    for paths, weights in (
        ((pairs, chats), (1.0, 2.0)),
        ((pairs, chats), ()),
        ((pairs, text), (1.0, 0.0)),
        ((pairs.parent,), ()),
    ):
        with pytest.raises(InputError, match=mixed):
            open_at(given, *paths, weights=weights)
    with pytest.raises(InputError, match=mixed):
        open_all_documents(replace(given, paths=(str(pairs.parent),)), load_tokenizer(given))
    sets = EvaluationConfig(paths=(f"x={pairs.parent}",))
    with pytest.raises(InputError, match=mixed.replace("data", "evaluation").replace(": ", f" {pairs.parent}: ")):
        open_validation_sets(sets, given, load_tokenizer(given))
    refused = "--input: 24 of the first 36 documents are of pairs .*; prepare the two kinds of files apart"
    with pytest.raises(InputError, match=refused):
        prepare(tmp_path / "prepared", pairs.parent, given)
    monkeypatch.setattr(prepared, "SHARD_BYTES", 300)
    with pytest.raises(InputError, match=r"--input: 24 of the first \d+ documents are of pairs"):
        prepare(tmp_path / "shards", pairs.parent, given)
    both = open_at(config, pairs, prepare(tmp_path / "ready", pairs, config), weights=(1.0, 1.0))
    assert both.pairs and [each.training.pairs for each in both.sources] == ["preference"] * 2


def test_an_answer_without_tokens_is_refused(
    config: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pairs are found by counting documents, so none may be empty."""
    path = write(tmp_path / "a.jsonl", numbered_rows(3))
    tokenizer = load_tokenizer(config)
    encode = tokenizer.encode_with_offsets

    def forget(texts: list[bytes]) -> list[Any]:
        sizes = [0 if b"no 1" in text else None for text in texts]
        return [(ids[:size], at[:size]) for size, (ids, at) in zip(sizes, encode(texts), strict=True)]

    monkeypatch.setattr(tokenizer, "encode_with_offsets", forget)
    with pytest.raises(InputError, match="a.jsonl, line 2: the tokenizer makes no token of the rejected answer"):
        open_all_documents(replace(config, paths=(str(path),)), tokenizer)


def test_the_commands_show_and_prepare_pairs(tmp_path: Path) -> None:
    """A preview counts pairs. Both commands name what they leave out."""
    folder = write_tokenizer(tmp_path / "tokenizer", CHATML)
    row = {"chosen": [SYSTEM, user("q"), assistant("a"), user("r"), assistant("b")], "score_chosen": 2.0}
    row["rejected"] = [*row["chosen"][:4], assistant("c")]
    path = write(tmp_path / "a.jsonl", [row, {**row, "chosen": row["rejected"]}, row, {"prompt": "s", **row}, row])
    given = ("prepare", "--input", path, "--content", "chat", "--tokenizer", folder)
    shown = command(*given, "--malformed", "skip", "--preview", 2)
    assert (shown.returncode, shown.stderr) == (0, "")
    documents = shown.stdout.split("--- ")[1:]
    assert [each.split(":")[0] for each in documents] == [
        f"{path}, line {line}, {side}" for line in (1, 3) for side in ("chosen", "rejected")
    ]
    for each, answer in zip(documents, "bcbc", strict=True):
        assert "assistant\na<|im_end|>" in each and each.count("⟦") == 1 and f"⟦{answer}<|im_end|>⟧" in each
    assert "skipped: 1 with a chosen answer that equals the rejected one (first: " in documents[-1]
    done = command(*given, "--malformed", "skip", "--workers", 1, "--output", tmp_path / "prepared")
    assert done.returncode == 0 and "6 documents, " in done.stdout
    assert "1 with a prompt that is not in its conversations (first: " in done.stdout
    assert "fields not read: score_chosen (5 rows)" in done.stdout
