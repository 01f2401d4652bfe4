"""Chat templates: the tokens that the loss counts, and limits of untrusted templates."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from chats import CHATML, CONVERSATION, LLAMA_2, LLAMA_3, MARKED, Messages, conversation, write_chats, write_tokenizer

from jaxopt_llm.config import DataConfig
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.data.reading.skipped import Skipped
from jaxopt_llm.data.reading.source import Document
from jaxopt_llm.data.tokens import template
from jaxopt_llm.data.tokens.corpus import open_all_documents
from jaxopt_llm.data.tokens.template import Renderer, Template, find_template
from jaxopt_llm.data.tokens.tokenizer import load_tokenizer

Pieces = list[tuple[str, bool]]  # text, and whether the loss counts it
IM_START, IM_END, HEADER = "<|im_start|>", "<|im_end|>", "<|header|>"


def chatml(messages: Messages) -> Pieces:
    pieces = []
    for message in messages:
        assistant = message["role"] == "assistant"
        content = (message["content"] + IM_END, assistant)
        pieces += [(f"{IM_START}{message['role']}\n", False), content, ("\n", False)]
    return pieces


def llama_3(messages: Messages) -> Pieces:
    pieces = [(f"<|bos|>{HEADER}system<|/header|>\n\nToday: 31 Jan 2026\nBe brief.<|eot|>", False)]
    for message in messages[1:]:
        pieces += [(f"{HEADER}{message['role']}<|/header|>\n\n", False)]
        pieces += [(message["content"].strip() + "<|eot|>", message["role"] == "assistant")]
    return pieces


def llama_2(messages: Messages) -> Pieces:
    system, *others = (message["content"] for message in messages)
    others[0] = f"<<SYS>>\n{system}\n<</SYS>>\n\n{others[0]}"
    made = ((f"<|bos|>[INST] {a} [/INST]", f" {b} </s>") for a, b in zip(others[::2], others[1::2], strict=True))
    return [(text, learnt) for pair in made for text, learnt in zip(pair, (False, True), strict=True)]


def config(folder: Path, **settings: Any) -> DataConfig:
    return DataConfig(tokenizer=str(folder), content="chat", **settings)


def read(path: Path, config: DataConfig) -> tuple[list[int], list[bool], dict[str, int]]:
    """Return the tokens of a file, whether the loss counts each, and the skipped documents."""
    stream, skipped = open_all_documents(replace(config, paths=(str(path),)), load_tokenizer(config))
    return stream.read(0, stream.size).tolist(), stream.read_mask(0, stream.size).tolist(), dict(skipped.counts)


@pytest.mark.parametrize(
    ("source", "pieces", "tokenizer"),
    [
        (CHATML, chatml, "bpe"),
        (MARKED, chatml, "bpe"),
        (LLAMA_3, llama_3, "bpe"),
        (LLAMA_2, llama_2, "bpe"),
        (MARKED, chatml, "bytes"),
    ],
)
def test_the_loss_counts_exactly_the_assistants_tokens(
    source: str, pieces: Callable[[Messages], Pieces], tokenizer: str, tmp_path: Path
) -> None:
    """Compare each token with pieces that are encoded one by one."""
    settings = config(write_tokenizer(tmp_path / "tokenizer", source), date="2026-01-31")
    if tokenizer == "bytes":
        (tmp_path / "chat.jinja").write_text(source)
        settings = config(Path("bytes"), chat_template=str(tmp_path / "chat.jinja"))
    library = load_tokenizer(settings)
    expected_ids, expected = [], []
    for text, learnt in pieces(CONVERSATION):
        (ids,) = library.encode([text.encode()])
        expected_ids += ids.tolist()
        expected += [learnt] * ids.size
    ids, mask, skipped = read(write_chats(tmp_path / "a.jsonl", [CONVERSATION]), settings)
    assert ids == expected_ids
    assert mask == expected
    assert 0 < sum(mask) < len(mask) and not skipped


def test_a_token_that_begins_before_the_answer_is_masked(tmp_path: Path) -> None:
    """It cannot follow the prompt, which contains a part of it. A token that extends beyond the answer can."""
    source = (
        "{%- for m in messages %}{{ m.role + ':' + m.content }}{% endfor %}{{ 'assistant:' if add_generation_prompt }}"
    )
    folder = write_tokenizer(tmp_path / "tokenizer", source)
    library = load_tokenizer(config(folder))
    straddling = next(iter(library.encode([b"::)"])[0].tolist()))
    assert library.decode([straddling]).startswith("::")
    path = write_chats(tmp_path / "a.jsonl", [[{"role": "assistant", "content": ":) yes"}]])
    ids, mask, _ = read(path, config(folder))
    at = ids.index(straddling)
    assert mask == [number > at for number in range(len(ids))]


def test_spaces_belong_to_the_token_that_contains_them(tmp_path: Path) -> None:
    """The post-processor must not change the offsets: this one excludes spaces, as GPT-2's does."""
    source = "{% for m in messages %}{{ 'a ' }}{% generation %}{{ m.content }}{% endgeneration %}<|im_end|>{% endfor %}"
    folder = write_tokenizer(tmp_path / "tokenizer", source)
    settings = json.loads((folder / "tokenizer.json").read_text())
    settings["post_processor"] = {**settings["post_processor"], "trim_offsets": True}
    (folder / "tokenizer.json").write_text(json.dumps(settings))
    path = write_chats(tmp_path / "a.jsonl", [[{"role": "assistant", "content": "user  "}]])
    ids, mask, _ = read(path, config(folder))
    library = load_tokenizer(config(folder))
    written = [library.decode([i]) for i in ids]
    assert "".join(written) == "a user  "
    blank = written.index("a") + 1  # a space, alone or with the text after it: it starts before the answer
    assert mask == [number > blank for number in range(len(ids) - 1)] + [False]


@pytest.mark.parametrize("source", [CHATML, MARKED, LLAMA_2])
def test_ids_and_mask_are_those_of_transformers(source: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    folder = write_tokenizer(tmp_path / "tokenizer", source)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(str(folder))
    path = write_chats(tmp_path / "a.jsonl", [CONVERSATION])
    ids, mask, _ = read(path, config(folder))
    marks = source == MARKED
    reference = theirs.apply_chat_template(CONVERSATION, return_dict=True, return_assistant_tokens_mask=marks)
    assert ids == reference["input_ids"]
    if marks:
        assert [int(each) for each in mask] == reference["assistant_masks"]
    asked = CONVERSATION[:4]
    renderer = Renderer(found_template(config(folder)))
    prompt = renderer.render_prompt(asked)
    (ids,) = load_tokenizer(config(folder)).encode([prompt.encode()])
    assert ids.tolist() == theirs.apply_chat_template(asked, add_generation_prompt=True)["input_ids"]


def test_tools_and_calls_reach_the_template(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"b": 1, "a": 2}}}]
    calls = [{"type": "function", "function": {"name": "add", "arguments": {"x": "<ü>"}}}]
    messages = [
        {"role": "user", "content": "1+1"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "2", "tool_calls": None},
    ]
    folder = write_tokenizer(tmp_path / "tokenizer")
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": messages, "tools": tools}))
    ids, mask, _ = read(tmp_path / "a.jsonl", config(folder))
    library = load_tokenizer(config(folder))
    text, learnt = library.decode(ids), library.decode(i for i, each in zip(ids, mask, strict=True) if each)
    assert '{"b": 1, "a": 2}' in text
    assert learnt == '<call>{"name": "add", "arguments": {"x": "<ü>"}}</call>2'


def found_template(config: DataConfig) -> Template:
    return find_template(config, load_tokenizer(config))


def test_where_the_template_is_found(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "tokenizer", "in the settings")
    assert found_template(config(folder)).source == "in the settings"
    assert found_template(config(folder / "tokenizer.json")).source == "in the settings"
    named = [{"name": "tool_use", "template": "b"}, {"name": "default", "template": "by name"}]
    assert (
        found_template(config(write_tokenizer(tmp_path / "named", chat_template=named, template=None))).source
        == "by name"
    )
    before = found_template(config(folder)).sha256
    (folder / "chat_template.jinja").write_text("beside it")
    found = found_template(config(folder))
    assert "<|im_end|>" in found.ends
    assert found.source == "beside it" and found.sha256 != before
    assert found.special == {"eos_token": "</s>", "bos_token": "<|bos|>"}
    (tmp_path / "own.jinja").write_text("named")
    assert found_template(config(folder, chat_template=str(tmp_path / "own.jinja"))).source == "named"
    assert found.sha256 != found_template(config(folder, date="2026-01-31")).sha256
    none = write_tokenizer(tmp_path / "none", None)
    for settings, message in (
        (config(none), "has no chat template.*data.chat_template"),
        (config(Path("bytes")), "has no chat template"),
        (config(folder, chat_template=str(tmp_path / "nowhere")), "nowhere: the template cannot be read"),
    ):
        with pytest.raises(InputError, match=message):
            found_template(settings)
    (folder / "chat_template.jinja").write_text("x" * (template.MAX_TEMPLATE_BYTES + 1))
    with pytest.raises(InputError, match="larger than 1,048,576 bytes"):
        found_template(config(folder))


def render(source: str, messages: Messages, **settings: Any) -> Document:
    content = json.dumps({"messages": messages}).encode()
    given = Template(Path("t.jinja"), source, {}, ("<|im_end|>",), "")
    document = Document("a.jsonl, line 1", content, content)
    renderer = Renderer(given)
    (rendered,) = renderer.render(document, DataConfig(content="chat", **settings), Skipped())
    return rendered


HOSTILE = {
    "class": ("{{ ''.__class__.__mro__ }}", "'__class__' of a str"),
    "written only": ("{{ ''.__class__ }}", "'__class__' of a str"),
    "by a filter": ("{{ messages | attr('__init__') }}", "'__init__' of a list"),
    "by an attribute's name": ("{{ [1] | map(attribute='__class__') | list }}", "'__class__' of a int"),
    "by a format": ("{{ '{0.__class__}'.format(1) }}", "'__class__' of a int"),
    "globals": ("{{ raise_exception.__globals__ }}", "'__globals__' of a function"),
    "a namespace": ("{% set n = namespace(__class__=1) %}", "sets the name '__class__' in a namespace"),
    "a namespace's name": ("{% set n = namespace() %}{% set n._x = 1 %}", "sets the name '_x' in a namespace"),
    "changes the data": ("{{ messages.append(1) }}", "'append' of a list"),
    "a file": ("{% include '/etc/passwd' %}", "reads another template, '/etc/passwd'"),
    "recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    "memory": ("{{ 'a' * messages | length * 10**11 }}", "MemoryError"),
    "a text too long": ("{% for i in range(9) %}{{ 'a' * 10**7 }}{% endfor %}", "more than 67,108,864 characters"),
    "a range": ("{% for i in range(10**9) %}{% endfor %}", "Range too big"),
    "half a character": ("{{ '\\ud83d' }}", "half of a surrogate pair"),
    "syntax": ("{% for %}", "line 1: .*Expected an expression"),
    "an unknown filter": ("{{ messages | secret }}", "secret"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_template_is_stopped_with_one_line(case: str, capfd: pytest.CaptureFixture[str]) -> None:
    source, message = HOSTILE[case]
    with pytest.raises(InputError, match=f"t.jinja: the chat template failed .*{message}") as error:
        render(source, CONVERSATION)
    assert "\n" not in str(error.value)
    assert capfd.readouterr() == ("", "")


def test_loop_controls_and_dicts_work() -> None:
    source = (
        "{% for i in range(9) %}{% if i == 2 %}{% continue %}{% elif i == 4 %}{% break %}{% endif %}{{ i }}{% endfor %}"
    )
    source += "{% generation %}{{ dict(a=1) | tojson }}{% endgeneration %}{{ dict.fromkeys('b') }}"
    source += "{{ messages | map(attribute='content') | join }}"
    made = render(source, [{"role": "assistant", "content": "x"}])
    assert made.content == b"013{\"a\": 1}{'b': None}x" and made.spans == ((3, 11),)


@pytest.mark.parametrize("source", [CHATML, MARKED])
def test_nothing_is_learned_of_a_prompts_messages(source: str, tmp_path: Path) -> None:
    """As in TRL, the assistant's turns in a prompt are only context."""
    settings = config(write_tokenizer(tmp_path / "tokenizer", source))
    library = load_tokenizer(settings)
    whole, _, _ = read(write_chats(tmp_path / "whole.jsonl", [CONVERSATION]), settings)
    for row, learnt in (
        ({"prompt": CONVERSATION[:4], "completion": CONVERSATION[4:]}, "Welcome é"),
        (
            {"prompt": CONVERSATION[1:4], "completion": CONVERSATION[4:], "system": CONVERSATION[0]["content"]},
            "Welcome é",
        ),
        (
            {"prompt": CONVERSATION[:2], "completion": CONVERSATION[2:]},
            "  It is 2, naïve\nuser.\nWelcome é",
        ),
    ):
        (tmp_path / "a.jsonl").write_text(json.dumps(row))
        ids, mask, _ = read(tmp_path / "a.jsonl", settings)
        assert ids == whole
        assert library.decode(token for token, counts in zip(ids, mask, strict=True) if counts) == learnt


def test_a_rejected_conversation_is_malformed(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "tokenizer", LLAMA_2)
    twice = [CONVERSATION[1], CONVERSATION[1], CONVERSATION[2]]
    path = write_chats(tmp_path / "a.jsonl", [CONVERSATION, twice, CONVERSATION])
    with pytest.raises(InputError, match=r"a.jsonl, line 2: the chat template .*rejects .* .roles must alternate"):
        read(path, config(folder))
    ids, _, skipped = read(path, config(folder, malformed="skip"))
    assert skipped == {"rejected by the chat template": 1}
    assert ids == 2 * read(write_chats(path, [CONVERSATION]), config(folder))[0]


# Like templates that omit the assistant's reasoning before the last question.
FORGETS = """\
{%- for m in messages %}{{ m.role + ': ' + (m.content if loop.last else m.content[:2]) + '\\n' }}{% endfor %}
{{- 'assistant: ' if add_generation_prompt }}"""
NEEDS_A_QUESTION = """\
{%- if not messages | selectattr('role', 'equalto', 'user') | list %}{{ raise_exception('no question') }}{% endif %}
{%- for m in messages %}{{ m.role + m.content }}{% endfor %}"""


def test_a_template_that_shortens_earlier_messages(tmp_path: Path) -> None:
    """A prompt has the whole question, and the text of the turn does not. The turn is learned after its prompt."""
    settings = config(write_tokenizer(tmp_path / "tokenizer", FORGETS))
    path = write_chats(tmp_path / "a.jsonl", [conversation(3)])
    ids, mask, _ = read(path, settings)
    library = load_tokenizer(settings)
    text = "user: Count to 3.\nassistant: 1 2 3 done\nuser: Co\nassistant: 1 \nuser: And which was 3?\nassistant: 3.\n"
    assert library.decode(ids) == text
    learnt = library.decode(i for i, each in zip(ids, mask, strict=True) if each)
    assert learnt == " 2 3 done\n.\n"  # the first token of an answer begins with the space of the prompt


def test_a_row_whose_beginning_is_refused_is_malformed(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "tokenizer", NEEDS_A_QUESTION)
    path = write_chats(tmp_path / "a.jsonl", [conversation(3)[1:], conversation(3)])
    with pytest.raises(InputError, match="a.jsonl, line 1: the chat template .*rejects the conversation .no question"):
        read(path, config(folder))
    assert read(path, config(folder, malformed="skip"))[2] == {"rejected by the chat template": 1}


@pytest.mark.parametrize(
    ("source", "messages", "message"),
    [
        (MARKED.replace("endgeneration", "endfor", 1), CONVERSATION, "line [0-9]+: "),
        (
            "{% set a %}{% generation %}abc{% endgeneration %}{% endset %}{{ a[:9] }}",
            CONVERSATION,
            "does not write the text of each generation block exactly once",
        ),
        (
            "{% set a %}{% generation %}abc{% endgeneration %}{% endset %}{{ a | e }}",
            CONVERSATION,
            "does not write the text of each generation block exactly once",
        ),
        (
            "{% generation %}a{% generation %}b{% endgeneration %}{% endgeneration %}",
            CONVERSATION,
            "a generation block is inside another one",
        ),
    ],
)
def test_templates_that_hide_the_assistants_turns_are_rejected(source: str, messages: Messages, message: str) -> None:
    with pytest.raises(InputError, match=f"the chat template failed .*{message}"):
        render(source, messages)


def test_a_template_that_writes_the_date_needs_one() -> None:
    with pytest.raises(InputError, match="the chat template writes the current date.*--data.date 2026-01-31$"):
        render(LLAMA_3, CONVERSATION)


def test_generation_blocks_mark_shortened_turns() -> None:
    marked = FORGETS.replace("{{ m.role + ': ' + (", "{{ m.role + ': ' }}{% generation %}{{ (").replace(
        " + '\\n' }}{% endfor %}", " }}{% endgeneration %}{{ '\\n' }}{% endfor %}"
    )
    made = render(marked, conversation(2))
    assert made.spans
    text = made.content.decode()
    assert [text[begin:end] for begin, end in made.spans] == ["Co", "1 ", "An", "2."]


# ---- The prompt for an answer in a conversation in the terminal.


@pytest.mark.parametrize(
    ("source", "asks", "end"),
    [
        (CHATML, "<|im_start|>assistant\n", "<|im_end|>"),
        (MARKED, "<|im_end|>\n", "<|im_end|>"),
        (LLAMA_2, " [/INST]", "</s>"),
        (LLAMA_3, "<|header|>assistant<|/header|>\n\n", "<|eot|>"),
        (FORGETS, "user: And which was 3?\nassistant: ", None),
    ],
)
def test_a_prompt_ends_at_the_assistants_turn(source: str, asks: str, end: str | None, tmp_path: Path) -> None:
    """This holds for any template, also for one that shortens earlier turns. The token that ends an answer is found."""
    template = found_template(config(write_tokenizer(tmp_path / "tokenizer", source), date="2026-01-31"))
    renderer = Renderer(template)
    assert renderer.find_turn_end() == end
    text = renderer.render_prompt(conversation(3)[:3])
    assert "And which was 3?" in text and text.endswith(asks) and "\0" not in text


def test_templates_are_not_trusted_in_a_conversation_either() -> None:
    for source, message in (
        (HOSTILE["class"][0], "the chat template failed .in a conversation.: .*'__class__' of a str"),
        ("{{ raise_exception('not\nnow') }}", "t.jinja: the chat template rejects the conversation .not"),
    ):
        given = Template(Path("t.jinja"), source, {}, (), "")
        with pytest.raises(InputError, match=message):
            Renderer(given).render_prompt(CONVERSATION[:2])
