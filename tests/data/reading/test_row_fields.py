"""Fields of rows and messages as published files have them: used, refused by name, or counted as not read."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from chats import CHATML
from corpora import prepare
from test_conversation import write

from jaxopt_llm.config import DataConfig
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.data.tokens.corpus import open_all_documents, open_corpus
from jaxopt_llm.data.tokens.tokenizer import load_tokenizer

USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
GOOD = {"messages": [USER, ANSWER]}


@pytest.fixture
def config(tmp_path: Path) -> DataConfig:
    (tmp_path / "chat.jinja").write_text(CHATML)
    return DataConfig(content="chat", chat_template=str(tmp_path / "chat.jinja"))


def learn(path: Path, config: DataConfig) -> tuple[str, list[str], str]:
    """Return the text of all documents, the texts that are learned, and the line about fields that are not read."""
    tokenizer = load_tokenizer(config)
    stream, skipped = open_all_documents(replace(config, paths=(str(path),)), tokenizer)
    ids, mask = stream.read(0, stream.size).tolist(), stream.read_mask(0, stream.size).tolist()
    spans: list[list[int]] = []
    for at, (token, learned) in enumerate(zip(ids, mask, strict=True)):
        if learned and (at == 0 or not mask[at - 1]):
            spans.append([])
        if learned:
            spans[-1].append(token)
    learned = [tokenizer.decode(each).rstrip().removesuffix("<|im_end|>") for each in spans]
    return tokenizer.decode(ids), learned, skipped.describe_unread()


def turns(*contents: str) -> str:
    """Return turns as the template writes them, from the user's and the assistant's texts in turn."""
    roles = ("user", "assistant")
    return "".join(f"<|im_start|>{roles[i % 2]}\n{text}<|im_end|>\n" for i, text in enumerate(contents))


FLAGS = {
    "openai": {"weight": 0},
    "a float": {"weight": 0.0},
    "axolotl": {"train": False},
    "axolotl's default": {"training": False},
    "llama-factory": {"loss_weight": 0.0},
    "ms-swift": {"loss": False},
    "one of two": {"weight": 1, "train": False},
}


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize("flag", FLAGS)
def test_a_flagged_answer_is_not_learned(flag: str, suffix: str, config: DataConfig, tmp_path: Path) -> None:
    """The text is the same. The flag of the other answer is null in Parquet, and then absent."""
    fields = FLAGS[flag]
    ones = {name: True if isinstance(value, bool) else 1 for name, value in fields.items()}
    messages = [
        USER,
        {**ANSWER, **fields},
        {"role": "user", "content": "Bye"},
        {"role": "assistant", "content": "Ciao"},
    ]
    sharegpt = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello", **fields}]
    expected = turns("Hi", "Hello", "Bye", "Ciao")
    rows = [
        {"messages": messages},
        {"messages": [*messages[:3], {**messages[3], **ones}]},
        {"messages": [{**USER, **{name: value for name, value in fields.items() if not value}}, *messages[1:]]},
    ]
    for row in rows:
        text, learned, unread = learn(write(tmp_path / f"a.{suffix}", [row, row]), config)
        assert (text, learned, unread) == (expected * 2, ["Ciao"] * 2, "")
    later = [{"from": m["role"], "value": m["content"]} for m in messages[2:]]
    text, learned, _ = learn(write(tmp_path / f"a.{suffix}", [{"conversations": [*sharegpt, *later]}]), config)
    assert (text, learned) == (expected, ["Ciao"])


def test_flags_in_prompts_completions_and_below_a_system_field(config: DataConfig, tmp_path: Path) -> None:
    first, second = [USER, ANSWER], [{"role": "assistant", "content": "B"}, {"role": "assistant", "content": "C"}]
    rows = [
        {"system": "S", "messages": [*first, USER, {**second[0], "weight": 0}]},
        {"system": "S", "messages": [USER, {**ANSWER, "weight": 0}, USER, second[0]]},
        {"prompt": [*first, USER], "completion": [{**second[0], "weight": 0}, USER, second[1]]},
        {"prompt": [USER, {**ANSWER, "weight": 1}, USER], "completion": second[:1]},
    ]
    for row, expected in zip(rows, (["Hello"], ["B"], ["C"], ["B"]), strict=True):
        assert learn(write(tmp_path / "a.jsonl", [row]), config)[1] == expected


def test_the_earlier_turns_of_an_instruction_are_learned(config: DataConfig, tmp_path: Path) -> None:
    """As in LLaMA-Factory, whose files have `history` and `system`."""
    row = {
        "instruction": "Sum",
        "input": "1, 2",
        "output": "3",
        "system": "Be brief.",
        "history": [["Hi", "Hello"], ["Add", "What?"]],
    }
    expected = "<|im_start|>system\nBe brief.<|im_end|>\n" + turns("Hi", "Hello", "Add", "What?", "Sum\n\n1, 2", "3")
    for suffix, history in (
        ("jsonl", row["history"]),
        ("parquet", row["history"]),
        ("csv", json.dumps(row["history"])),
    ):
        text, learned, unread = learn(write(tmp_path / f"a.{suffix}", [{**row, "history": history}]), config)
        assert (text, unread) == (expected, "") and learned == ["Hello", "What?", "3"]
    plain = {"instruction": "Sum", "output": "3", "history": []}
    assert learn(write(tmp_path / "a.jsonl", [plain]), config)[0] == turns("Sum", "3")
    for wrong in ([["a"]], [["a", 1]], "x", [["a", "b", "c"]]):
        with pytest.raises(InputError, match="line 1: with (a history that is not|history other than) a list"):
            learn(write(tmp_path / "a.jsonl", [{**plain, "history": wrong}]), config)


SHAREGPT = {
    "from and value": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}],
    "role and content": GOOD["messages"],
    "role and value": [{"role": "user", "value": "Hi"}, {"role": "assistant", "value": "Hello"}],
    "names of sharegpt as roles": [{"role": "human", "content": "Hi"}, {"role": "gpt", "content": "Hello"}],
    "a mixture": [{"from": "user", "value": "Hi"}, ANSWER],
}


@pytest.mark.parametrize("column", ["conversations", "messages"])
@pytest.mark.parametrize("words", SHAREGPT)
def test_messages_have_either_names_in_either_column(
    words: str, column: str, config: DataConfig, tmp_path: Path
) -> None:
    text, learned, unread = learn(write(tmp_path / "a.jsonl", [{column: SHAREGPT[words]}]), config)
    assert (text, unread) == (turns("Hi", "Hello"), "") and learned == ["Hello"]
    pair = {"prompt": SHAREGPT[words][:1], "completion": SHAREGPT[words][1:]}
    assert learn(write(tmp_path / "a.jsonl", [pair]), config)[:2] == (text, learned)


def test_function_calls_of_sharegpt(config: DataConfig, tmp_path: Path) -> None:
    """LLaMA-Factory's files have a sender function_call, and functions without an object around them."""
    call = {"name": "add", "arguments": {"a": 1}}
    function = {"name": "add", "description": "Adds", "parameters": {"type": "object", "properties": {}}}
    row = {
        "conversations": [
            {"from": "human", "value": "Add"},
            {"from": "function_call", "value": json.dumps(call)},
            {"from": "observation", "value": "1"},
            {"from": "gpt", "value": "It is 1"},
        ],
        "tools": json.dumps([function]),
    }
    whole = {"type": "function", "function": function}
    called = [{"type": "function", "function": call}]
    messages = [
        {"role": "user", "content": "Add"},
        {"role": "assistant", "tool_calls": called},
        {"role": "tool", "content": "1"},
        {"role": "assistant", "content": "It is 1"},
    ]
    expected = learn(write(tmp_path / "a.jsonl", [{"messages": messages, "tools": [whole]}]), config)
    assert '<call>{"name": "add", "arguments": {"a": 1}}</call>' in expected[0] and len(expected[1]) == 2
    assert learn(write(tmp_path / "a.jsonl", [row]), config) == expected
    for value, problem in (("add(1)", "with a function_call that is not JSON"), ("[]", "with a function_call without")):
        bad = {"conversations": [{"from": "function_call", "value": value}]}
        with pytest.raises(InputError, match=f"line 1: {problem}"):
            learn(write(tmp_path / "a.jsonl", [bad]), config)


def test_a_role_that_the_template_does_not_name_is_a_sender(config: DataConfig, tmp_path: Path) -> None:
    """ms-swift's files have it. The text of a call is never the text of a message of another role."""
    call = {"name": "add", "arguments": {"a": 1, "b": None}}
    called = {"role": "assistant", "tool_calls": [{"type": "function", "function": call}]}
    answers = [{"role": "assistant", "content": "It is 1"}]
    known = {"role": "tool", "content": "1"}
    template = tmp_path / "strict.jinja"
    template.write_text(CHATML.replace("message.role +", "('result' if message.role == 'tool' else message.role) +"))
    strict = replace(config, chat_template=str(template))
    expected = learn(write(tmp_path / "a.jsonl", [{"messages": [USER, called, known, *answers]}]), strict)
    assert len(expected[1]) == 2 and '<call>{"name": "add"' in expected[0] and "user\n" in expected[0]
    for content in (json.dumps(call), call, [call]):
        spoken = [{"role": "function_call", "content": content}, {"role": "observation", "content": "1"}]
        row = {"messages": [USER, *spoken, *answers]}
        assert learn(write(tmp_path / "a.jsonl", [row]), strict) == expected
    # A template that names no role of tools writes the role as it is, and one that names the role gets it.
    observed = [USER, {"role": "observation", "content": "1"}, *answers]
    path = write(tmp_path / "a.jsonl", [{"messages": observed}])
    assert "<|im_start|>observation\n1" in learn(path, config)[0]
    template.write_text(CHATML.replace("message.role +", "('seen' if message.role == 'observation' else 'tool') +"))
    assert "<|im_start|>seen\n1" in learn(path, strict)[0]


def test_tool_calls_as_json_text(config: DataConfig, tmp_path: Path) -> None:
    calls = [{"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": None}}}]
    expected, found = (
        learn(write(tmp_path / "a.jsonl", [{"messages": [USER, {"role": "assistant", "tool_calls": each}]}]), config)
        for each in (calls, json.dumps(calls))
    )
    assert found == expected and found[1] == ['<call>{"name": "add", "arguments": {"a": 1, "b": null}}</call>']
    plain = {**ANSWER, "tool_calls": ""}
    assert learn(write(tmp_path / "a.jsonl", [{"messages": [USER, plain]}]), config)[1] == ["Hello"]
    for wrong, problem in (
        ("add", "with tool_calls other than a list or its JSON text"),
        ({"name": "add"}, "with tool_calls other than a list or its JSON text"),
        (["add"], "with tool_calls that are not objects"),
    ):
        with pytest.raises(InputError, match=f"line 1: {problem}"):
            learn(write(tmp_path / "a.jsonl", [{"messages": [USER, {**ANSWER, "tool_calls": wrong}]}]), config)


@pytest.mark.parametrize("content", [{"text": "x"}, 1, False])
def test_a_content_beside_calls_is_text(content: Any, config: DataConfig, tmp_path: Path) -> None:
    calls = [{"type": "function", "function": {"name": "add", "arguments": {}}}]
    row = {"messages": [USER, {"role": "assistant", "content": content, "tool_calls": calls}]}
    with pytest.raises(InputError, match="line 1: with a message whose content is not text"):
        learn(write(tmp_path / "a.jsonl", [row]), config)


def test_a_tool_and_its_parameters_as_json_text(config: DataConfig, tmp_path: Path) -> None:
    """Axolotl's files have them, because the types of parameters differ between rows."""
    parameters = {"type": "object", "properties": {}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": each}} for each in (parameters, "")]
    tools[1]["function"]["parameters"] = json.dumps(parameters)
    expected, found = (learn(write(tmp_path / "a.jsonl", [{**GOOD, "tools": [tool]}]), config) for tool in tools)
    assert found == expected and '"parameters": {"type": "object"' in found[0]
    texts = [json.dumps(tools[0])]  # a whole tool, for the same reason
    assert learn(write(tmp_path / "a.jsonl", [{**GOOD, "tools": texts}]), config) == expected
    with pytest.raises(InputError, match="line 1: with a tool other than an object or its JSON text"):
        learn(write(tmp_path / "a.jsonl", [{**GOOD, "tools": ["add"]}]), config)
    tools[1]["function"]["parameters"] = "object"
    with pytest.raises(InputError, match="line 1: with parameters other than an object"):
        learn(write(tmp_path / "a.jsonl", [{**GOOD, "tools": [tools[1]]}]), config)


def test_arguments_of_the_template_in_a_row(config: DataConfig, tmp_path: Path) -> None:
    """As TRL passes them. One that the template does not read is counted."""
    template = tmp_path / "thinking.jinja"
    template.write_text("{% if enable_thinking is defined %}<{{ enable_thinking }}>{% endif %}\n" + CHATML)
    config = replace(config, chat_template=str(template))
    row = {**GOOD, "chat_template_kwargs": {"enable_thinking": False, "mood": "good"}, "parallel_tool_calls": False}
    text, _, unread = learn(write(tmp_path / "a.jsonl", [row, row, GOOD]), config)
    assert text == ("<False>" + turns("Hi", "Hello")) * 2 + turns("Hi", "Hello")
    assert unread == "fields not read: mood of chat_template_kwargs (2 rows), parallel_tool_calls (2 rows)"
    written = {**GOOD, "chat_template_kwargs": json.dumps({"enable_thinking": True})}
    assert "<True>" in learn(write(tmp_path / "a.jsonl", [written]), config)[0]
    for arguments, problem in (
        (
            {"messages": []},
            "the chat template .* rejects the conversation .the arguments of the row have names that are reserved",
        ),
        ([1], "with chat_template_kwargs other than an object"),
    ):
        with pytest.raises(InputError, match=f"line 1: {problem}"):
            learn(write(tmp_path / "a.jsonl", [{**GOOD, "chat_template_kwargs": arguments}]), config)


PAIR = {"prompt": "Hi", "completion": "Hello"}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "openai's preferences": (
        {**GOOD, "rejected": [ANSWER]},
        "with a preference pair (chosen, rejected) instead of one conversation (--",
    ),
    "an unpaired preference": ({**PAIR, "label": False}, "with the field label, which judges answers"),
    "a judged conversation": ({**GOOD, "label": True}, "with the field label, which judges answers"),
    "llama-factory's feedback": ({**GOOD, "kto_tag": True}, "with the field kto_tag, which judges answers"),
    "ms-swift's preferences": ({**GOOD, "rejected_response": "x"}, "with the field rejected_response, which judges"),
    "a reward's margin": ({**PAIR, "margin": 0.5}, "with the field margin, which judges"),
    "images": ({**GOOD, "images": ["a.png"]}, "with the field images, which is not text"),
    "audio": ({**GOOD, "audios": ["a.wav"]}, "with the field audios, which is not text"),
    "tokens": ({**GOOD, "input_ids": [1]}, "with the field input_ids, which belongs to rows of tokens"),
    "a mask": ({**GOOD, "assistant_masks": [1]}, "with the field assistant_masks, which belongs to rows of tokens"),
    "openai's old functions": (
        {**GOOD, "functions": [{"name": "f"}]},
        "with the field functions, write tools instead",
    ),
    "mistral's system": (
        {**GOOD, "system_prompt": "x"},
        "with the field system_prompt, which is read with --data.columns sy",
    ),
    "mistral's last": ({**GOOD, "only_last": True}, "with the field only_last, which --data.learn-turns last"),
    "a row's weight": ({**GOOD, "weight": 0.5}, "with the field weight, which gives the whole row a weight"),
    "half a weight": ({"messages": [USER, {**ANSWER, "weight": 0.5}]}, "with a message whose weight is neither 0 nor"),
    "a word": ({"messages": [USER, {**ANSWER, "train": "no"}]}, "with a message whose train is neither 0 nor 1"),
    "a learned question": ({"messages": [{**USER, "train": True}, ANSWER]}, "with train on a message that is not the"),
    "offsets": (
        {"messages": [USER, {**ANSWER, "train_detail": [{"begin_offset": 0, "end_offset": 2, "train": False}]}]},
        "with a message that has the field train_detail, which trains on parts of a message",
    ),
    "parts": (
        {"messages": [USER, {"role": "assistant", "content": [{"type": "text", "text": "x", "train": False}]}]},
        "with a part of a message that has train or weight of its own",
    ),
    "openai's old call": (
        {"messages": [USER, {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}]},
        "with a message that has the field function_call, write tool_calls instead",
    ),
    "a refusal": (
        {"messages": [USER, {"role": "assistant", "content": "", "refusal": "No."}]},
        "with a message that has the field refusal, which is not part of the content",
    ),
    "ollama's images": (
        {"messages": [{**USER, "images": ["x"]}, ANSWER]},
        "with a message that has the field images, which is not text",
    ),
    "another sender": (
        {"conversations": [{"from": "bing", "value": "x"}]},
        "with a message from an unknown sender (it is from 'bing'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_field_with_a_meaning_elsewhere_is_refused_by_name(case: str, config: DataConfig, tmp_path: Path) -> None:
    row, message = REFUSED[case]
    good = {**PAIR} if "prompt" in row else {"conversations": GOOD["messages"]} if "conversations" in row else GOOD
    path = write(tmp_path / "a.jsonl", [good, row])
    with pytest.raises(InputError, match=rf"a.jsonl, line 2: {re.escape(message)}.*data.malformed to skip") as error:
        learn(path, config)
    assert learn(path, replace(config, malformed="skip"))[0] == turns("Hi", "Hello")
    if ignored := re.search(r"--data.columns (\w+=) leaves it unread", str(error.value)):
        text, _, unread = learn(path, replace(config, columns=(ignored[1],)))
        assert text == turns("Hi", "Hello") * 2 and unread == f"fields not read: {ignored[1][:-1]} (1 row)"


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_empty_values_have_no_meaning(suffix: str, config: DataConfig, tmp_path: Path) -> None:
    empty = {"images": [], "functions": None, "system_prompt": "", "weight": 1, "only_last": False, "rejected": None}
    empty |= {"system": "", "tools": "", "chat_template_kwargs": ""}
    row = {**GOOD, **empty}
    if suffix == "parquet":
        row.pop("rejected")
    text, _, unread = learn(write(tmp_path / f"a.{suffix}", [row]), config)
    assert (text, unread) == (turns("Hi", "Hello"), "")


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "parquet"])
@pytest.mark.parametrize("content", ["chat", "text"])
def test_fields_that_nothing_reads_are_counted(content: Any, suffix: str, config: DataConfig, tmp_path: Path) -> None:
    """The counts are those of the values, in every format and after preparing."""
    name = "text" if content == "text" else "prompt"
    config = replace(config, content=content) if content == "chat" else DataConfig()
    others = {} if content == "text" else {"completion": "Hello"}
    rows = [{"id": each, name: each, **others, "source": "s" if each == "b" else None} for each in "abc"]
    path = write(tmp_path / f"a.{suffix}", rows)
    expected = "fields not read: id (3 rows), source (1 row)"
    given = replace(config, paths=(str(path),), held_out=0.5)
    assert open_all_documents(given, load_tokenizer(config))[1].describe_unread() == expected
    corpus = open_corpus(given, load_tokenizer(config))
    assert corpus.skipped.describe_unread() == expected and "not read" not in str(corpus)
    records = (prepare(tmp_path / "prepared", path, config) / "shards.jsonl").read_text().splitlines()
    assert [json.loads(record)["unread"] for record in records] == [{"id": 3, "source": 1}]


def test_fields_of_messages_count_if_the_template_lacks_their_name(config: DataConfig, tmp_path: Path) -> None:
    """A template may read any field of a message, so each is passed to it."""
    rows = [{"messages": [{**USER, "name": "Ann"}, {**ANSWER, "prefix": True, "mood": "m"}]}, GOOD]
    path = write(tmp_path / "a.jsonl", rows)
    text, _, unread = learn(path, config)
    names = [f"{name} of a message (1 row)" for name in ("name", "prefix", "mood")]
    assert text == turns("Hi", "Hello") * 2
    assert unread.startswith("fields not read: ") and {*unread[17:].split(", ")} == {*names}
    template = tmp_path / "reads.jinja"
    template.write_text(CHATML.replace("{{ message.content }}", "{{ message.prefix }}{{ message.content }}"))
    text, _, unread = learn(path, replace(config, chat_template=str(template)))
    assert "assistant\nTrueHello" in text and "prefix" not in unread and "mood" in unread


def test_a_label_that_names_a_class_and_parts_with_values(config: DataConfig, tmp_path: Path) -> None:
    answer = {"role": "assistant", "content": [{"type": "text", "value": "He"}, {"type": "text", "text": "llo"}]}
    text, _, unread = learn(write(tmp_path / "a.jsonl", [{"messages": [USER, answer], "label": 3}]), config)
    assert (text, unread) == (turns("Hi", "Hello"), "fields not read: label (1 row)")


def test_many_names_are_counted_together(config: DataConfig, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{**GOOD, f"field{number:04}": 1} for number in range(1100)])
    unread = learn(path, config)[2]
    assert unread.startswith("fields not read: other fields (100 rows), field0000 (1 row), ")
    assert unread.endswith(", and 989 more")


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "parquet"])
def test_columns_may_have_other_names(suffix: str, config: DataConfig, tmp_path: Path) -> None:
    """Names may also be exchanged. A column whose name another column has taken is not read."""
    expected = learn(write(tmp_path / "expected.jsonl", [{**PAIR, "system": "S"}]), config)[:2]
    row = {"question": "Hi", "response": "Hello", "system_prompt": "S", "system": "not this", "n": 1}
    path = write(tmp_path / f"a.{suffix}", [row])
    named = replace(config, columns=("prompt=question", "completion=response", "system=system_prompt"))
    text, learned, unread = learn(path, named)
    assert (text, learned) == expected and unread == "fields not read: system (1 row), n (1 row)"
    exchanged = {"prompt": "Hello", "completion": "Hi", "system": "S"}
    columns = ("prompt=completion", "completion=prompt")
    path = write(tmp_path / f"b.{suffix}", [exchanged])
    assert learn(path, replace(config, columns=columns))[:2] == expected
    assert learn(path, replace(config, columns=columns, content="pairs"))[:2] == expected


def test_a_column_of_messages_and_of_tools(config: DataConfig, tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    expected = learn(write(tmp_path / "expected.jsonl", [{**GOOD, "tools": [tool]}]), config)
    path = write(tmp_path / "a.jsonl", [{"dialog": GOOD["messages"], "functions": [tool]}])
    named = replace(config, columns=("messages=dialog", "tools=functions"))
    assert "Tools:" in expected[0] and learn(path, named) == expected


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet"])
def test_a_column_that_no_row_has(suffix: str, config: DataConfig, tmp_path: Path) -> None:
    """The message names the columns found. It is enough if a row of any file has the column."""
    path = write(tmp_path / f"a.{suffix}", [{"id": number, **PAIR, "prompt": str(number)} for number in range(4)])
    config = replace(config, columns=("tools=functions",), held_out=0.5)
    given = replace(config, paths=(str(path),))
    message = r"data.columns=tools=functions: no row has the column 'functions'; the columns are completion, id, prompt"
    with pytest.raises(InputError, match=message):
        open_corpus(given, load_tokenizer(config))
    tool = json.dumps([{"type": "function", "function": {"name": "f"}}])
    other = write(tmp_path / f"b.{suffix}", [{**PAIR, "functions": tool}])
    open_corpus(replace(given, paths=(str(path), str(other))), load_tokenizer(config))
    with pytest.raises(InputError, match="the fields completion, id match no form of conversations"):
        learn(path, replace(config, columns=("prompt=question",)))


def test_wrong_columns_are_problems() -> None:
    config = DataConfig(content="chat", paths=("a",))
    for columns, problem in (
        (("messages",), "data.columns: messages: write FIELD=COLUMN"),
        (("=x",), "data.columns: =x: write FIELD=COLUMN"),
        (
            ("turns=x",),
            "data.columns: turns=x: turns is not a field of a conversation; use one of chat_template_kwargs",
        ),
        (("text=x",), "data.columns: text=x: name the column of texts with data.text_field=x"),
        (("tools=x", "tools=y"), "a field is named twice"),
        (("images=",), ""),
    ):
        problems = replace(config, columns=columns).problems()
        assert [problem in each for each in problems] == [True] * bool(problem), problems
    assert len(replace(config, columns=("tools=x", "system=x")).problems()) == 2


def test_a_date_in_a_message_is_written_as_the_template_would(config: DataConfig, tmp_path: Path) -> None:
    """Tables have values that JSON lacks."""
    import datetime

    messages = [{**USER, "at": datetime.date(2026, 1, 31)}, ANSWER]
    template = tmp_path / "reads.jinja"
    template.write_text(CHATML.replace("message.role +", "message.role + (message.at or '') +"))
    text = learn(write(tmp_path / "a.parquet", [{"messages": messages}]), replace(config, chat_template=str(template)))[
        0
    ]
    assert "user2026-01-31\nHi" in text
    path = write(tmp_path / "b.parquet", [{"messages": [{**USER, "at": b"x"}, ANSWER]}])
    with pytest.raises(InputError, match="row 1: with bytes in a conversation"):
        learn(path, config)


CALL = {"type": "function", "function": {"name": "find", "arguments": {"city": None, "days": 2}}}
TOOL = {"type": "function", "function": {"name": "find", "parameters": {"default": None, "type": "object"}}}


def write_call(path: Path, **row: Any) -> Path:
    """Write a conversation in which a message has null fields, and a call and a tool have nulls within them."""
    answer = {"role": "assistant", "content": "", "name": None, "tool_calls": [CALL], **row.pop("answer", {})}
    user = {**USER, "name": None, "tool_calls": None}
    return write(path, [{"messages": [user, answer], "tools": [TOOL], "label": None, **row}])


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet"])
def test_a_null_that_somebody_wrote_is_learned(name: str, tmp_path: Path) -> None:
    """JSON holds it. A table has it for absent fields, except in JSON text."""
    template = tmp_path / "chat.jinja"
    template.write_text(
        "{{ (tools or []) | tojson }}{% for message in messages %}{% if message.role == 'assistant' %}"
        "{% generation %}{{ message.content }}{{ (message.tool_calls or []) | tojson }}{% endgeneration %}"
        "{% else %}{{ message | tojson }}{% endif %}{% endfor %}"
    )
    config = DataConfig(content="chat", chat_template=str(template))
    kept = not name.endswith(".parquet")
    user = json.dumps(USER)
    tool, call = json.dumps(TOOL), json.dumps(CALL)
    less_tool, less_call = tool.replace('"default": null, ', ""), call.replace('"city": null, ', "")
    expected = f"[{tool}]{user}[{call}]" if kept else f"[{less_tool}]{user}[{less_call}]"
    assert learn(write_call(tmp_path / name), config)[0] == expected
    texts = {"answer": {"tool_calls": f"[{call}]"}, "tools": f"[{tool}]"}
    assert learn(write_call(tmp_path / name, **texts), config)[0] == f"[{tool}]{user}[{call}]"


def test_arguments_as_json_text_keep_their_nulls(tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text(
        "{{ tools | tojson }}{% for message in messages %}{% generation %}{{ message.content }}"
        "{% for call in message.tool_calls or [] %}"
        "{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}{% endgeneration %}{% endfor %}"
    )
    config = DataConfig(content="chat", chat_template=str(template))
    text = json.dumps(CALL["function"]["arguments"])
    answer = {"tool_calls": [{"type": "function", "function": {"name": "find", "arguments": text}}]}
    for name in ("a.jsonl", "a.parquet"):
        assert learn(write_call(tmp_path / name, answer=answer), config)[0].endswith(f"]Hifind{text}")


@pytest.mark.parametrize("suffix", ["parquet", "csv", "jsonl"])
def test_a_column_that_does_not_exist_is_named_first(suffix: str, config: DataConfig, tmp_path: Path) -> None:
    rows = [{"dialog": json.dumps([USER, ANSWER]), "fns": "", "id": "1"}]
    path = write(tmp_path / f"a.{suffix}", rows)
    message = r"^data.columns: no column 'dialoog' among dialog, fns, id; .*: the fields dialog, fns, id match no form"
    with pytest.raises(InputError, match=message):
        learn(path, replace(config, columns=("messages=dialoog",)))
    assert learn(path, replace(config, columns=("messages=dialog",)))[0] == turns("Hi", "Hello")


def test_pythons_syntax_in_a_csv_is_explained(config: DataConfig, tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", [{"messages": str([USER, ANSWER])}])
    with pytest.raises(InputError, match=r"\(a CSV made by pandas has Python's syntax; save it as Parquet or JSONL\)"):
        learn(path, config)
