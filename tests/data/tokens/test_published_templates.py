"""Templates with the control flow of published ones: what is learned and refused, compared with transformers."""

import json
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import templates
from chats import write_tokenizer
from corpora import prepare
from templates import EOS, LEARNED, TEMPLATES

from jaxopt_llm.config import DataConfig
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.data.reading.files import find_files
from jaxopt_llm.data.reading.skipped import Skipped
from jaxopt_llm.data.reading.source import Document, read_documents, split_into_parts
from jaxopt_llm.data.tokens import sandbox
from jaxopt_llm.data.tokens.corpus import open_all_documents, open_corpus
from jaxopt_llm.data.tokens.template import Renderer, find_template
from jaxopt_llm.data.tokens.tokenizer import load_tokenizer

Row = dict[str, Any]
ADD = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"x": 1}}}


def user(content: str) -> Row:
    return {"role": "user", "content": content}


def assistant(content: str, **fields: Any) -> Row:
    return {"role": "assistant", "content": content, **fields}


def calling(arguments: Any, **fields: Any) -> Row:
    call = {"id": "c0", "type": "function", "function": {"name": "add", "arguments": arguments}}
    return {"role": "assistant", "tool_calls": [call], **fields}


SYSTEM = {"role": "system", "content": "Be kind."}
RESULT = {"role": "tool", "content": "seven", "tool_call_id": "c0"}
TWO = [user("one"), assistant("ein"), user("two"), assistant("zwei")]
REASONED = [
    user("one"),
    assistant("ein", reasoning_content="why1"),
    user("two"),
    assistant("zwei", reasoning_content="why2"),
]
ASKED = [user("one"), calling({"x": 1}), RESULT, assistant("It is seven.")]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write a tokenizer for each template."""
    folder = tmp_path_factory.mktemp("templates")
    written = {}
    for name, source in TEMPLATES.items():
        tokens = {"eos_token": EOS.get(name, "</s>"), "bos_token": "<s>"}
        written[name] = write_tokenizer(folder / name, source, templates.SPECIAL, **tokens)
    return written


def config(folder: Path, **settings: Any) -> DataConfig:
    return DataConfig(tokenizer=str(folder), content="chat", date="2026-01-31", **settings)


def read(row: Row, config: DataConfig, tmp_path: Path, skipped: Skipped | None = None) -> list[Document]:
    """Return the documents of one row."""
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    given, skipped = replace(config, paths=(str(tmp_path / "a.jsonl"),)), skipped or Skipped()
    (file,) = find_files(given.paths[0], given, "data.paths")
    (part,) = split_into_parts(file, given)
    (document,) = read_documents(part, given, skipped)
    renderer = Renderer(find_template(given, load_tokenizer(given)))
    return list(renderer.render(document, given, skipped))


def learned(documents: list[Document]) -> list[list[str]]:
    texts = [document.content.decode() for document in documents]
    return [[text[a:b] for a, b in each.spans or ()] for text, each in zip(texts, documents, strict=True)]


@pytest.mark.parametrize("name", TEMPLATES)
def test_two_turns_with_a_system_message(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    """Each answer is learned once, from the end of the generation prompt to the token that ends the turn."""
    messages = TWO if name == "GEMMA_2" else [SYSTEM, *TWO]
    documents = read({"messages": messages}, config(folders[name]), tmp_path)
    assert learned(documents) == LEARNED[name]
    assert all("Be kind." in each.content.decode() for each in documents) or name == "GEMMA_2"
    assert len({document.key for document in documents}) == 1


@pytest.mark.parametrize("name", TEMPLATES)
def test_only_the_last_turn_is_learned(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    """It is the last one that the row lets learn, and never needs a second document."""
    messages = TWO if name == "GEMMA_2" else [SYSTEM, *TWO]
    last = config(folders[name], learn_turns="last")
    assert learned(read({"messages": messages}, last, tmp_path)) == [LEARNED[name][-1][-1:]]
    if name == "QWEN_3":
        excluded = [*messages, user("three"), assistant("drei", weight=0)]
        ((answer,),) = learned(read({"messages": excluded}, last, tmp_path))
        assert "zwei" in answer and "ein" not in answer.replace("zwei", "")


@pytest.mark.parametrize("arguments", [{}, {"enable_thinking": False}], ids=["plain", "no-thinking"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_ids_are_those_of_transformers(
    name: str, arguments: Row, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A document is the conversation up to some turn, and what is learned follows the prompt for the turn."""
    transformers = pytest.importorskip("transformers")

    class Day(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return cls(2026, 1, 31)

    monkeypatch.setattr(transformers.utils.chat_template_utils, "datetime", Day)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(str(folders[name]))
    settings = config(folders[name], template_arguments=tuple(f"{k}={json.dumps(v)}" for k, v in arguments.items()))
    ours = load_tokenizer(settings)
    messages = TWO if name in ("GEMMA_2", "MISTRAL_3") else [SYSTEM, *TWO]

    def encode(messages: list[Row], **options: Any) -> list[int]:
        return list(theirs.apply_chat_template(messages, **options, **arguments)["input_ids"])

    documents = read({"messages": messages}, settings, tmp_path)
    counts = range(2, len(messages) + 1) if len(documents) > 1 else [len(messages)]
    expected = [encode(messages[:count]) for count in counts if messages[count - 1]["role"] == "assistant"]
    found = [ids.tolist() for ids in ours.encode([document.content for document in documents])]
    if added := {"GLM_4": "<|user|>", "APERTUS": "<|end|>"}.get(name):  # what would follow ends the answer
        expected = [[*ids, theirs.convert_tokens_to_ids(added)] for ids in expected]
    assert found == expected
    prompts = [
        encode(messages[:at], add_generation_prompt=True)
        for at in range(len(messages))
        if messages[at] in (TWO[1], TWO[3])
    ]
    if name not in ("R1_DISTILL", "MINIMAX", "COMMAND_R7B"):  # their prompts have reasoning that the answers do not
        starts = [begin for each in documents for begin, _ in each.spans or ()]
        texts = [each.content.decode() for each in documents for _ in each.spans or ()]
        ids = ours.encode([text[:begin].encode() for text, begin in zip(texts, starts, strict=True)])
        assert [each.tolist() for each in ids] == prompts


@pytest.mark.parametrize(
    ("name", "pieces"),
    [
        (
            "QWEN_3",
            [["<think>\nwhy1\n</think>\n\nein<|im_end|>"], ["<think>\nwhy2\n</think>\n\nzwei<|im_end|>"]],
        ),
        ("MINIMAX", [["why1\n</think>\n\nein[e["], ["why2\n</think>\n\nzwei[e["]]),
        ("LFM_2", [["<think>why1</think>ein<|im_end|>"], ["<think>why2</think>zwei<|im_end|>"]]),
        ("GLM_4", [["\n<think>why1</think>\nein<|user|>"], ["\n<think>why2</think>\nzwei<|user|>"]]),
        (
            "GPT_OSS",
            [
                [
                    f"<|channel|>analysis<|message|>{why}<|end|><|start|>assistant<|channel|>final<|message|>{answer}<|return|>"
                ]
                for why, answer in (("why1", "ein"), ("why2", "zwei"))
            ],
        ),
    ],
)
def test_reasoning_is_learned_where_the_template_writes_it(
    name: str, pieces: list[list[str]], folders: dict[str, Path], tmp_path: Path
) -> None:
    """The reasoning of an earlier turn is not in the document of a later one."""
    documents = read({"messages": REASONED}, config(folders[name]), tmp_path)
    assert learned(documents) == pieces
    assert "why1" not in documents[1].content.decode()
    thoughts = [
        {**each, "thinking": each["reasoning_content"]} if "reasoning_content" in each else each for each in REASONED
    ]
    for each in thoughts:
        each.pop("reasoning_content", None)
    assert read({"messages": thoughts}, config(folders[name]), tmp_path) == [
        replace(document, key=made.key)
        for document, made in zip(documents, read({"messages": thoughts}, config(folders[name]), tmp_path), strict=True)
    ]


@pytest.mark.parametrize(
    ("name", "pieces"),
    [
        ("MINISTRAL_3", ["<think>why1</think>ein</s>", "zwei</s>"]),
        ("APERTUS", ["<|middle|>why1<|message|>ein<|end|>", "zwei<|end|>"]),
    ],
)
def test_reasoning_is_written_where_the_template_reads_it(
    name: str, pieces: list[str], folders: dict[str, Path], tmp_path: Path
) -> None:
    """A row has it as a field or as a part of the content, and a template reads it as a field, a part or a block."""
    parts = [{"type": "thinking", "thinking": "why1"}, {"type": "text", "text": "ein"}]
    nested = [{**parts[0], "thinking": [{"type": "text", "text": "why1"}]}, parts[1]]
    for answer in (
        assistant("ein", thinking="why1"),
        {"role": "assistant", "content": parts},
        {"role": "assistant", "content": nested},
    ):
        messages = [user("one"), answer, *TWO[2:]]
        assert learned(read({"messages": messages}, config(folders[name]), tmp_path)) == [pieces]
    assert learned(read({"messages": messages[:2]}, config(folders["QWEN_3"]), tmp_path)) == [
        ["<think>\nwhy1\n</think>\n\nein<|im_end|>"]
    ]


def test_ids_of_reasoning_in_parts_are_those_of_transformers(folders: dict[str, Path], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(str(folders["MINISTRAL_3"]))
    parts = [{"type": "thinking", "thinking": "why1"}, {"type": "text", "text": "ein"}]
    messages = [user("one"), {"role": "assistant", "content": parts}]
    (document,) = read({"messages": messages}, config(folders["MINISTRAL_3"]), tmp_path)
    (ids,) = load_tokenizer(config(folders["MINISTRAL_3"])).encode([document.content])
    assert ids.tolist() == list(theirs.apply_chat_template(messages)["input_ids"])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([{"type": "thinking", "thinking": 1}], "with a part of a message whose thinking is not text"),
        (
            [{"type": "text", "text": "a"}, {"type": "thinking", "thinking": "b"}],
            "that is not text .its type is thinking",
        ),
        ([{"type": "thinking", "thinking": "b"}], "with both a part of type thinking and the field reasoning"),
    ],
)
def test_parts_of_reasoning_that_are_refused(
    content: list[Row], message: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    answer = dict(role="assistant", content=content, **{"reasoning": "c"} if "both" in message else {})
    with pytest.raises(InputError, match=message):
        read({"messages": [user("one"), answer]}, config(folders["MINISTRAL_3"]), tmp_path)


def test_reasoning_within_the_content(folders: dict[str, Path], tmp_path: Path) -> None:
    messages = [user("one"), assistant("<think>\nwhy1\n</think>\n\nein")]
    documents = read({"messages": messages}, config(folders["QWEN_3"]), tmp_path)
    assert learned(documents) == [["<think>\nwhy1\n</think>\n\nein<|im_end|>"]]
    with pytest.raises(
        InputError, match="line 1: with reasoning that the chat template leaves out: .*data.chat_template"
    ):
        read({"messages": messages}, config(folders["R1_DISTILL"]), tmp_path)
    with pytest.raises(InputError, match="line 1: with reasoning that the chat template leaves out"):
        read({"messages": REASONED}, config(folders["LLAMA_3_2"]), tmp_path)


@pytest.mark.parametrize(
    ("name", "pieces"),
    [
        ("QWEN_2_5", [['\n<call>{"name": "add", "arguments": {"x": 1}}</call><|im_end|>', "It is seven.<|im_end|>"]]),
        ("LLAMA_3_2", [['{"name": "add", "parameters": {"x": 1}}<|eot|>', "It is seven.<|eot|>"]]),
        ("MISTRAL_3", [['[CALLS][{"name": "add", "arguments": {"x": 1}}]</s>', " It is seven.</s>"]]),
        ("KIMI_K2", [['[CALLS]add{"x": 1}<|im_end|>', "It is seven.<|im_end|>"]]),
        ("MINIMAX", [["<invoke add><x>1[e[", "It is seven.[e["]]),
        ("GEMMA_4", [["[CALLS]add{x:1}[RESULTS]", "It is seven.</turn>"]]),
        ("COMMAND_R7B", [['[CALLS]add{"x": 1}<|/TURN|>', "<|message|>It is seven.<|/TURN|>"]]),
        (
            "GLM_4",
            [
                [
                    "\n<think></think>\n<call>add<key>x</key>1</call><|observation|>",
                    "\n<think></think>\nIt is seven.<|user|>",
                ]
            ],
        ),
        (
            "GPT_OSS",
            [[' to=add<|message|>{"x": 1}<|call|>', "<|channel|>final<|message|>It is seven.<|return|>"]],
        ),
        (
            "QWEN_3",
            [
                ['<think>\n\n</think>\n\n<call>{"name": "add", "arguments": {"x": 1}}</call><|im_end|>'],
                ["<think>\n\n</think>\n\nIt is seven.<|im_end|>"],
            ],
        ),
    ],
)
@pytest.mark.parametrize("form", ["object", "text"])
def test_calls_are_learned_with_their_arguments_as_json(
    name: str, pieces: list[list[str]], form: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    """OpenAI's files have the arguments as a JSON text. Nothing doubly encoded is learned."""
    messages = [user("one"), calling({"x": 1} if form == "object" else '{"x": 1}'), *ASKED[2:]]
    if name == "QWEN_2_5":
        pieces = [[piece.removeprefix("\n") for piece in each] for each in pieces]
    documents = read({"messages": messages, "tools": [ADD]}, config(folders[name]), tmp_path)
    assert learned(documents) == pieces


def test_a_call_without_a_result_has_its_end(folders: dict[str, Path], tmp_path: Path) -> None:
    """The token that would begin the result ends the call."""
    documents = read({"messages": ASKED[:2], "tools": [ADD]}, config(folders["GLM_4"]), tmp_path)
    assert learned(documents) == [["\n<think></think>\n<call>add<key>x</key>1</call><|observation|>"]]


@pytest.mark.parametrize("weight", [0, 1])
def test_blocks_of_turns_that_are_rewritten(weight: int, folders: dict[str, Path], tmp_path: Path) -> None:
    """A turn with reasoning is learned where the template writes it, and the others in the text of all turns."""
    messages = [
        *REASONED[:3],
        assistant("zwei", reasoning_content="why2", weight=weight),
        user("three"),
        assistant("drei"),
    ]
    documents = read({"messages": messages}, config(folders["LFM_2"]), tmp_path)
    first, second = ["<think>why1</think>ein<|im_end|>"], ["<think>why2</think>zwei<|im_end|>"]
    assert learned(documents) == [first, *[second] * weight, ["drei<|im_end|>"]]
    assert documents[-1].content.decode().count("<|im_start|>") == 6


@pytest.mark.parametrize("name", ["QWEN_3", "QWEN_2_5"])
def test_a_text_of_arguments_is_json(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    """It makes no difference whether the template writes a text as it is. An empty text means no arguments."""
    with pytest.raises(InputError, match="with arguments of a tool call that are not JSON"):
        read({"messages": [user("one"), calling("{city: Paris")]}, config(folders[name]), tmp_path)
    documents = read({"messages": [user("one"), calling("")]}, config(folders[name]), tmp_path)
    assert '"arguments": {}}' in "".join(*learned(documents))


@pytest.mark.parametrize(("name", "expected"), [("QWEN_2_5", []), ("ENDLESS", ["1 conversation"]), ("CLOSED", [])])
def test_turns_without_an_end_are_told(name: str, expected: list[str], tmp_path: Path) -> None:
    """A model would not learn where to stop. Rows are read nevertheless, as in transformers."""
    endless = "{% for m in messages %}{{ '### ' + m.role + ':\\n' + m.content + '\\n\\n' }}{% endfor %}"
    source = (TEMPLATES | {"ENDLESS": endless, "CLOSED": CLOSED})[name]
    folder, skipped = write_tokenizer(tmp_path / name, source, templates.SPECIAL, eos_token="</s>"), Skipped()
    assert read({"messages": TWO[:2]}, config(folder), tmp_path, skipped)
    copy = Skipped()
    copy.add_record(skipped.to_record([]), [])
    for each in (skipped, copy):
        told = each.describe_endless(config(folder))
        assert bool(told) == bool(expected) and each.describe_notes() == []
        assert all(f"data.tokenizer={folder}: the chat template writes no special token" in told for _ in expected)
        assert all(f"a learned turn of {count}, so a model does not learn where to stop" in told for count in expected)
    prepare(tmp_path / "ready", tmp_path / "a.jsonl", given := config(folder))
    _, read_again = open_all_documents(replace(given, paths=(str(tmp_path / "ready"),)), load_tokenizer(given))
    assert read_again.read["endless"] == skipped.read["endless"]


def test_conversations_of_several_documents_are_told(folders: dict[str, Path], tmp_path: Path) -> None:
    several = [user("one"), assistant("ein"), user("two"), assistant("zwei")]
    skipped = Skipped()
    for messages, name, notes in (
        (several[:2], "QWEN_3", []),
        (several, "QWEN_2_5", []),
        (several, "QWEN_3", ["1 conversation has 2 documents, each"]),
        ([*several, user("three"), assistant("drei")], "QWEN_3", ["2 conversations have 5 documents, each"]),
    ):
        read({"messages": messages}, config(folders[name]), tmp_path, skipped)
        copy = Skipped()
        copy.add_record(skipped.to_record([]), [])
        assert skipped.describe_notes() == copy.describe_notes()
        found = [note for note in skipped.describe_notes() if "documents" in note]
        assert len(found) == len(notes) and all(map(str.__contains__, found, notes))


def test_bytes_have_no_token_that_could_end_a_turn(tmp_path: Path) -> None:
    (tmp_path / "lines.jinja").write_text("{% for m in messages %}{{ m.content + '\n' }}{% endfor %}")
    skipped, path = Skipped(), str(tmp_path / "lines.jinja")
    assert read(
        {"messages": TWO[:2]}, DataConfig(content="chat", tokenizer="bytes", chat_template=path), tmp_path, skipped
    )
    assert skipped.describe_notes() == []


# Writes no token at the end of a turn. {} holds what it requires or rejects.
ENDLESS = """{}{{ tools | tojson if tools }}
{%- for m in messages %}<|{{ m.role }}|>
{{- m.content or '' }}
{%- for call in m.tool_calls or [] %}<call>{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
ROLES = ["<|user|>", "<|assistant|>", "<|system|>"]
NEEDS_SYSTEM = "{% if messages[0].role != 'system' %}{{ raise_exception('no system') }}{% endif %}"
NEEDS_ADD = "{% if tools and tools[0].function.name != 'add' %}{{ raise_exception('no add') }}{% endif %}"
NEEDS_BOTH = "{% if messages[0].content != 'Be kind.' %}{{ raise_exception('not kind') }}{% endif %}"


def ends(source: str, rows: list[Row], tokens: list[str] = ROLES) -> list[list[str]]:
    """Return what is learned of each row by one renderer."""
    renderer = sandbox.Renderer(sandbox.Template(Path(), source, {}, tuple(tokens), ""))
    conversations = [renderer.render(**row).documents for row in rows]
    return [[text[a:b] for text, spans in documents for a, b in spans] for documents in conversations]


@pytest.mark.parametrize(
    "check", ["", NEEDS_SYSTEM, NEEDS_ADD, NEEDS_SYSTEM + NEEDS_ADD], ids=["none", "system", "tool", "both"]
)
def test_an_ending_is_found_with_another_example(check: str) -> None:
    """The template may require a system message, or reject the tool of the example."""
    plain = {"messages": [SYSTEM, *TWO]}
    tooled = {**plain, "tools": [ADD]}
    source = ENDLESS.replace("{}", check, 1)
    expected = ["ein<|user|>", "zwei<|user|>"]
    assert ends(source, [plain]) == [expected]
    assert ends(source, [tooled]) == [expected]
    renderer = sandbox.Renderer(sandbox.Template(Path(), source, {}, tuple(ROLES), ""))
    assert renderer.find_turn_end() == "<|user|>"


@pytest.mark.parametrize("order", [1, -1])
def test_spans_do_not_depend_on_the_order_of_rows(order: int) -> None:
    """With tools, this template ends a turn with another token than without."""
    human = "<|{{ 'human' if tools and m.role == 'user' else m.role }}|>"
    source = ENDLESS.replace("{}", "", 1).replace("<|{{ m.role }}|>", human)
    plain, tooled = {"messages": TWO}, {"messages": TWO, "tools": [ADD]}
    found = ends(source, [plain, tooled][::order], [*ROLES, "<|human|>"])[::order]
    assert found == [["ein<|user|>", "zwei<|user|>"], ["ein<|human|>", "zwei<|human|>"]]


def test_a_turn_whose_end_cannot_be_found_is_refused() -> None:
    """No example is accepted, so that the last turn would be learned without an end. Another end is enough."""
    source = ENDLESS.replace("{}", NEEDS_BOTH, 1)
    row = {"messages": [SYSTEM, *TWO]}
    with pytest.raises(sandbox.Refused, match="no token that ends the turn is found"):
        ends(source, [row])
    ended = source.replace("{%- endfor %}\n{%- if", "{{ '<|end|>' if m.role == 'assistant' }}{%- endfor %}\n{%- if")
    assert ends(ended, [row], [*ROLES, "<|end|>"]) == [["ein<|end|>", "zwei<|end|>"]]
    assert ends(source, [{**row, "unlearned": [4]}]) == [["ein<|user|>"]]


@pytest.mark.parametrize(
    "check", ["", "{% if messages | length > 2 %}{{ raise_exception('one') }}{% endif %}"], ids=["any", "one turn"]
)
def test_a_turn_may_end_as_text(check: str) -> None:
    """Templates of one turn, and those without special tokens, have no token that ends it."""
    source = check + (
        "{% for m in messages %}{{ '### ' + m.role + ':\n' + m.content + '\n\n' }}{% endfor %}"
        "{{ '### assistant:\n' if add_generation_prompt }}"
    )
    assert ends(source, [{"messages": TWO[:2]}]) == [["ein\n\n"]]


# Writes the generation prompt in any case, and the answer after a result within the block of the call.
ACTIONS = """{%- for m in messages %}
    {%- if m.role == 'user' %}{{ '<|user|>' + m.content + '<|end|>' }}
    {%- elif m.role == 'tool' %}{{ '<result>' + m.content + '</result>' }}
    {%- else %}
        {{- '<|assistant|>' if loop.previtem.role != 'tool' }}
        {%- for call in m.tool_calls or [] %}{{ call.function.name + call.function.arguments | tojson }}{% endfor %}
        {{- m.content + '<|end|>' if m.content }}
    {%- endif %}
{%- endfor %}
{{- '<|assistant|>' }}"""


def test_a_turn_within_other_messages_is_refused() -> None:
    """An earlier place of the generation prompt is not the beginning of the turn. Blocks show it."""
    tokens = [*ROLES, "<|end|>"]
    assert ends(ACTIONS, [{"messages": TWO}], tokens) == [["ein<|end|>", "zwei<|end|>"]]
    with pytest.raises(sandbox.Refused, match="together with earlier messages.*put generation blocks"):
        ends(ACTIONS, [{"messages": ASKED}], tokens)
    copy = ACTIONS.replace("{%- for call", "{%- generation %}{%- for call").replace(
        "{%- endif %}\n{%- endfor", "{%- endgeneration %}{%- endif %}\n{%- endfor"
    )
    assert ends(copy, [{"messages": ASKED}], tokens) == [['add{"x": 1}', "It is seven.<|end|>"]]


# Writes a block after the last message, and one of two blocks around the end of each answer.
CLOSED = """{%- for m in messages %}
    {%- if m.role == 'user' %}{{ '<|user|>' + m.content + '<|end|>' }}
    {%- else %}{{ '<|assistant|>' }}{% generation %}{{ m.content }}{% endgeneration %}
        {{- '\\n' }}{% generation %}{{ '<|end|>' }}{% endgeneration %}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}
{%- else %}{% generation %}{{ '</s>' }}{% endgeneration %}{% endif %}"""


def test_weight_zero_leaves_out_the_blocks_of_its_message() -> None:
    """The number of blocks in the text up to a message is not the number of its first block."""
    assert ends(CLOSED, [{"messages": TWO}]) == [["ein", "<|end|>", "zwei", "<|end|>", "</s>"]]
    assert ends(CLOSED, [{"messages": TWO, "unlearned": [1]}]) == [["zwei", "<|end|>", "</s>"]]
    assert ends(CLOSED, [{"messages": TWO, "unlearned": [3]}]) == [["ein", "<|end|>"]]


def test_weight_zero_is_refused_where_its_blocks_are_not_known() -> None:
    """A block between two messages of the assistant may belong to either. Another block holds two messages."""
    beside = [user("one"), assistant("ein"), assistant("zwei")]
    around = "{% generation %}{% for m in messages[1:] %}{{ m.content }}{% endfor %}{% endgeneration %}"
    for source in (CLOSED, "{{ messages[0].content }}" + around):
        assert ends(source, [{"messages": beside, "unlearned": [1, 2]}]) == [[]]
        with pytest.raises(sandbox.Refused, match="which generation blocks are those of a message that is not learned"):
            ends(source, [{"messages": beside, "unlearned": [1]}])


def test_the_reason_is_what_the_template_says() -> None:
    """The template fails on a call without a content, and says that it has no tools if it has one."""
    source = (
        "{% for m in messages %}{{ raise_exception('no tools') if m.role == 'tool' }}{{ m.content + '' }}{% endfor %}"
    )
    with pytest.raises(sandbox.Refused, match="^no tools$"):
        ends(source, [{"messages": ASKED}])


def test_contents_are_tried_once() -> None:
    """A content that is absent is not tried as absent again."""
    tried = [
        [each[1].get("content", "absent") for each in sandbox._fill_contents([user("one"), message])]
        for message in (calling({}), calling({}, content=""))
    ]
    assert tried == [["absent", None, ""], ["", None, "", "absent"]]


def test_a_text_of_arguments_is_kept_where_the_template_writes_it(folders: dict[str, Path], tmp_path: Path) -> None:
    """This template cannot write an object, and tests for a null content. It has no place for tools."""
    for arguments in ('{"x":1}', {"x": 1}):
        messages = [user("one"), calling(arguments), RESULT, assistant("It is seven.")]
        documents = read({"messages": messages}, config(folders["R1_DISTILL"]), tmp_path)
        written = arguments if isinstance(arguments, str) else json.dumps(arguments)
        assert learned(documents) == [[f"[CALLS]add\n{written}[RESULTS]", "It is seven.</s>"]]
    messages = [user("one"), calling('{"x":1}'), RESULT, assistant("It is seven.")]
    documents = read({"messages": messages}, config(folders["QWEN_3"]), tmp_path)
    assert '"arguments": {"x":1}}' in documents[0].content.decode()


def test_reasoning_between_calls_is_one_document(folders: dict[str, Path], tmp_path: Path) -> None:
    """After the last question, the template keeps the reasoning, so that one text shows all turns as served."""
    messages = [
        user("one"),
        calling({"x": 1}, reasoning_content="why1"),
        RESULT,
        assistant("7", reasoning_content="why2"),
    ]
    documents = read({"messages": [*messages, user("two"), assistant("zwei")]}, config(folders["QWEN_3"]), tmp_path)
    assert [[piece.split("\n")[1] for piece in each] for each in learned(documents)] == [["why1", "why2"], [""]]


LOST: dict[str, tuple[str, Row, str]] = {
    "tools": ("R1_DISTILL", {"messages": TWO, "tools": [ADD]}, "with tools that"),
    "calls": ("GRANITE", {"messages": ASKED}, "with tool calls that"),
    "the second call": (
        "GPT_OSS",
        {"messages": [user("one"), {**calling({"x": 1}), "tool_calls": 2 * calling({"x": 1})["tool_calls"]}]},
        "with tool calls that",
    ),
    "a result": (
        "SMOLLM_3",
        {"messages": [user("one"), assistant("ein"), RESULT, assistant("zwei")]},
        "with a message that",
    ),
    "a developer": (
        "SMOLLM_3",
        {"messages": [{"role": "developer", "content": "Be kind."}, *TWO]},
        "with a message that",
    ),
    "text beside a call": (
        "LLAMA_3_2",
        {"messages": [user("one"), calling({"x": 1}, content="I add.")]},
        "with text beside tool calls that",
    ),
}


@pytest.mark.parametrize("case", LOST)
def test_what_the_template_leaves_out_is_refused(case: str, folders: dict[str, Path], tmp_path: Path) -> None:
    name, row, message = LOST[case]
    expected = f"a.jsonl, line 1: {message} the chat template leaves out.*name a template that has a place for it"
    with pytest.raises(InputError, match=expected):
        read(row, config(folders[name]), tmp_path)
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(each) + "\n" for each in ({"messages": TWO}, row)))
    settings = config(folders[name], malformed="skip", paths=(str(tmp_path / "b.jsonl"),))
    _, skipped = open_all_documents(settings, load_tokenizer(settings))
    assert skipped.describe() == [f"1 {message} the chat template leaves out (first: {tmp_path}/b.jsonl, line 2)"]


REFUSED: dict[str, tuple[str, list[Row], str]] = {
    "a system message": ("GEMMA_2", [SYSTEM, *TWO], "System role not supported"),
    "the assistant begins": ("QWEN_3", TWO[1:], "the assistant begins it, and there is no prompt"),
    "the assistant begins, and roles must alternate": ("MISTRAL_3", TWO[1:], "roles must alternate"),
    "a message of another role": ("COMMAND_R", [*TWO[:2], RESULT, TWO[3]], "has no attribute 'tool'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_row_that_the_template_refuses_is_malformed(case: str, folders: dict[str, Path], tmp_path: Path) -> None:
    name, messages, message = REFUSED[case]
    with pytest.raises(InputError, match=f"a.jsonl, line 1: the chat template .* rejects the conversation .*{message}"):
        read({"messages": messages}, config(folders[name]), tmp_path)
    assert read({"messages": messages}, config(folders[name], malformed="skip"), tmp_path) == []


def test_an_assistant_that_begins_is_learned_if_the_template_prompts_for_it(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    """The system turn that the template writes for it is not learned."""
    documents = read({"messages": TWO[1:]}, config(folders["KIMI_K2"]), tmp_path)
    assert sorted(learned(documents)) == [["ein<|im_end|>"], ["zwei<|im_end|>"]]
    assert all("Be good." not in piece for each in learned(documents) for piece in each)


def test_the_tools_of_the_last_question(folders: dict[str, Path], tmp_path: Path) -> None:
    """The template moves the tools when a question follows, and writes each answer as it was served: one document."""
    row = {"messages": [*ASKED, user("two"), assistant("zwei")], "tools": [ADD]}
    (document,) = read(row, config(folders["MISTRAL_3"]), tmp_path)
    text = document.content.decode()
    assert text.index("[TOOLS]") > text.index("It is seven.")
    assert learned([document])[0][1:] == [" It is seven.</s>", " zwei</s>"]


def test_arguments_of_a_row_win(folders: dict[str, Path], tmp_path: Path) -> None:
    row = json.dumps({"messages": TWO[:2], "arguments": {"enable_thinking": True}}).encode()
    settings = config(folders["SMOLLM_3"], template_arguments=("enable_thinking=false",))
    template = find_template(settings, load_tokenizer(settings))
    assert template.sha256 != find_template(config(folders["SMOLLM_3"]), load_tokenizer(settings)).sha256
    renderer = Renderer(template)
    (plain,) = renderer.render(Document("a", json.dumps({"messages": TWO[:2]}).encode(), b""), settings, Skipped())
    (own,) = renderer.render(Document("a", row, b""), settings, Skipped())
    assert b"Mode: /no_think" in plain.content and b"Mode: /think" in own.content
    assert renderer.render_prompt(TWO[:1]).endswith("assistant\n<think>\n\n</think>\n")
    wrong = json.dumps({"messages": TWO[:2], "arguments": {"tools": []}}).encode()
    with pytest.raises(InputError, match="the arguments of the row have names that are reserved: tools"):
        list(renderer.render(Document("a", wrong, b""), settings, Skipped()))


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("enable_thinking", "must be NAME=VALUE"),
        ("a b=1", "must be NAME=VALUE"),
        ("messages=[]", "the name messages is reserved"),
    ],
)
def test_wrong_arguments_are_refused(argument: str, message: str) -> None:
    (problem,) = DataConfig(content="chat", paths=("a",), template_arguments=(argument,)).problems()
    assert problem.startswith(f"data.template_arguments: {argument}: ") and message in problem
    assert "several values" in str(
        DataConfig(content="chat", paths=("a",), template_arguments=("a=1", "a=2")).problems()
    )
    told = "data.template_arguments applies only to conversations: remove it, or set data.content=chat"
    assert DataConfig(template_arguments=("a=1",)).problems() == [told]


def test_the_documents_of_a_conversation_are_held_out_together(folders: dict[str, Path], tmp_path: Path) -> None:
    rows = [{"messages": [user(f"{number}"), *TWO[1:]]} for number in range(3)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for share in (0.0001, 0.9999):  # too small, or too large, for a part of the conversations
        settings = config(folders["QWEN_3"], paths=(str(tmp_path / "a.jsonl"),), held_out=share)
        corpus = open_corpus(settings, load_tokenizer(settings))
        assert corpus.held_out is not None
        assert {corpus.held_out.documents, corpus.sources[0].training.documents} == {2, 4}


def test_named_templates_are_chosen_as_in_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    written = {name: "{{ messages | tojson }}{{ tools | tojson }}" + name for name in ("default", "tool_use", "other")}
    named = [{"name": name, "template": source} for name, source in written.items()]
    listed = write_tokenizer(tmp_path / "listed", chat_template=named, template=None)
    filed = write_tokenizer(tmp_path / "filed", "never read")
    (filed / "chat_template.jinja").write_text(written["default"])
    (filed / "additional_chat_templates").mkdir()
    for name in ("tool_use", "other"):
        (filed / "additional_chat_templates" / f"{name}.jinja").write_text(written[name])
    for folder in (listed, filed):
        theirs = transformers.PreTrainedTokenizerFast.from_pretrained(str(folder))
        for tools in (None, [ADD]):
            for chosen in ("", "other"):
                expected = theirs.get_chat_template(chosen or None, tools)
                settings = config(folder, chat_template=chosen)
                found = find_template(settings, load_tokenizer(settings))
                assert expected == ((tools and found.tool_source) or found.source)
    del named[0]
    without = config(write_tokenizer(tmp_path / "without", chat_template=named, template=None))
    with pytest.raises(InputError, match="none named default: name one with --data.chat_template: other, tool_use"):
        find_template(without, load_tokenizer(without))
    with pytest.raises(InputError, match="nowhere: .*or a template of the tokenizer: other, tool_use"):
        find_template(replace(without, chat_template="nowhere"), load_tokenizer(without))


def test_rows_with_tools_use_the_template_for_tools(tmp_path: Path) -> None:
    named = [
        {"name": "default", "template": TEMPLATES["PHI_4"]},
        {"name": "tool_use", "template": TEMPLATES["QWEN_2_5"]},
    ]
    folder = write_tokenizer(tmp_path / "named", None, templates.SPECIAL, chat_template=named)
    (with_tools,) = read({"messages": ASKED, "tools": [ADD]}, config(folder), tmp_path)
    (plain,) = read({"messages": TWO}, config(folder), tmp_path)
    assert b"<call>" in with_tools.content and b"<|im_sep|>" in plain.content


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_conversation_in_the_terminal(name: str, folders: dict[str, Path]) -> None:
    """The token that ends an answer is found, and the prompt after an answer is that of the published template."""
    template = find_template(config(folders[name]), load_tokenizer(config(folders[name])))
    renderer = Renderer(template)
    end = renderer.find_turn_end()
    prompt = renderer.render_prompt(TWO[:3])
    assert end is not None and LEARNED[name][-1][-1].endswith(end)
    assert "ein" in prompt and "two" in prompt and "zwei" not in prompt


@pytest.mark.parametrize(
    ("name", "answer", "content", "reasoning"),
    [
        (
            "GPT_OSS",
            "<|channel|>analysis<|message|>why<|end|><|start|>assistant<|channel|>final<|message|>ein",
            "ein",
            "why",
        ),
        ("GPT_OSS", "<|channel|>final<|message|>ein", "ein", None),
        ("APERTUS", "<|middle|>why<|message|>ein", "ein", "why"),
        ("COMMAND_R7B", "<|message|>ein", "ein", None),
        ("QWEN_3", "<think>\nwhy\n</think>\n\nein", "<think>\nwhy\n</think>\n\nein", None),
        ("PHI_4", "ein<|im_sep|>s", "eins", None),
    ],
)
def test_an_answer_of_the_model_is_read(
    name: str, answer: str, content: str, reasoning: str | None, folders: dict[str, Path]
) -> None:
    """The words of the special tokens, such as `final`, are not part of it."""
    tokenizer = load_tokenizer(config(folders[name]))
    renderer = Renderer(find_template(config(folders[name]), tokenizer))
    text = tokenizer.decode(tokenizer.encode([answer.encode()])[0].tolist())
    expected = assistant(content, **({"reasoning_content": reasoning} if reasoning else {}))
    assert renderer.read_answer(text, answer) == expected
