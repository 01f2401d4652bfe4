"""Conversations made text by a chat template: which tokens are learnt, one by one; what a hostile one cannot do."""

import contextlib
import json
import subprocess
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from chats import CHATML, CONVERSATION, LLAMA_2, LLAMA_3, MARKED, Messages, conversation, write_chats, write_tokenizer

from jaxopt_llm.data import template
from jaxopt_llm.data.config import DataConfig
from jaxopt_llm.data.corpus import open_whole
from jaxopt_llm.data.source import Document
from jaxopt_llm.data.template import Template, find_template, rendering
from jaxopt_llm.data.tokenizer import load_tokenizer
from jaxopt_llm.errors import InputError

Pieces = list[tuple[str, bool]]  # text, and whether it is learnt
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


def read(path: Path, config: DataConfig) -> tuple[list[int], list[bool], Counter[str]]:
    """The tokens of a file, whether each is learnt, and what was skipped."""
    stream, skipped = open_whole(replace(config, paths=(str(path),)), load_tokenizer(config))
    return stream.read(0, stream.size).tolist(), stream.mask(0, stream.size).tolist(), skipped


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
def test_the_assistants_tokens_are_learnt_and_no_other(
    source: str, pieces: Callable[[Messages], Pieces], tokenizer: str, tmp_path: Path
) -> None:
    """Token by token against pieces that are put together, and encoded, one by one."""
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


def test_a_token_that_begins_before_the_answer_is_not_learnt(tmp_path: Path) -> None:
    """It cannot be written after the prompt, which has a part of it; one that runs over the answer's end can."""
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


def test_blanks_belong_to_the_token_that_has_them(tmp_path: Path) -> None:
    """Whatever a tokenizer's post-processor says of where its tokens begin: this one, as GPT-2's, leaves blanks out."""
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
    blank = written.index("a") + 1  # a blank, alone or with what follows: it began before the answer
    assert mask == [number > blank for number in range(len(ids) - 1)] + [False]


@pytest.mark.parametrize("source", [CHATML, MARKED, LLAMA_2])
def test_ids_and_mask_are_those_of_transformers(source: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    folder = write_tokenizer(tmp_path / "tokenizer", source)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(str(folder))
    path = write_chats(tmp_path / "a.jsonl", [CONVERSATION])
    ids, mask, _ = read(path, config(folder))
    marks = source == MARKED
    told = theirs.apply_chat_template(CONVERSATION, return_dict=True, return_assistant_tokens_mask=marks)
    assert ids == told["input_ids"]
    if marks:
        assert [int(each) for each in mask] == told["assistant_masks"]
    asked = CONVERSATION[:4]
    with rendering(found_template(config(folder))) as renderer:
        prompt = renderer.prompt(asked)
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
    for settings, said in (
        (config(none), "has no chat template.*data.chat_template"),
        (config(Path("bytes")), "has no chat template"),
        (config(folder, chat_template=str(tmp_path / "nowhere")), "nowhere: it cannot be read"),
    ):
        with pytest.raises(InputError, match=said):
            found_template(settings)
    (folder / "chat_template.jinja").write_text("x" * (template.MOST_BYTES + 1))
    with pytest.raises(InputError, match="too large"):
        found_template(config(folder))


def render(source: str, messages: Messages, seconds: float = 120.0, **settings: Any) -> Document | None:
    content = json.dumps({"messages": messages}).encode()
    given = Template(Path("t.jinja"), source, {}, ("<|im_end|>",), "")
    with rendering(given, seconds) as renderer:
        return renderer(Document("a.jsonl, byte 0", content, content), DataConfig(content="chat", **settings))


HOSTILE = {
    "class": ("{{ ''.__class__.__mro__ }}", "'__class__' of a str"),
    "written only": ("{{ ''.__class__ }}", "'__class__' of a str"),
    "by a filter": ("{{ messages | attr('__init__') }}", "'__init__' of a list"),
    "by an attribute's name": ("{{ [1] | map(attribute='__class__') | list }}", "'__class__' of a int"),
    "by a format": ("{{ '{0.__class__}'.format(1) }}", "'__class__' of a int"),
    "globals": ("{{ raise_exception.__globals__ }}", "'__globals__' of a function"),
    "a namespace": ("{% set n = namespace(__class__=1) %}", "with the name '__class__'"),
    "a namespace's name": ("{% set n = namespace() %}{% set n._x = 1 %}", "with the name '_x'"),
    "changes the data": ("{{ messages.append(1) }}", "'append' of a list"),
    "a file": ("{% include '/etc/passwd' %}", "no loader"),
    "recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    "memory": ("{{ 'a' * messages | length * 10**11 }}", "MemoryError"),
    "growth": (
        "{% set n = namespace(x='ab') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        "MemoryError",
    ),
    "a text too long": ("{% for i in range(9) %}{{ 'a' * 10**7 }}{% endfor %}", "more than 67,108,864 characters"),
    "a range": ("{% for i in range(10**9) %}{% endfor %}", "Range too big"),
    "syntax": ("{% for %}", "line 1: .*Expected an expression"),
    "an unknown filter": ("{{ messages | secret }}", "secret"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_template_is_stopped_with_one_line(case: str, capfd: pytest.CaptureFixture[str]) -> None:
    source, said = HOSTILE[case]
    with pytest.raises(InputError, match=f"t.jinja: the chat template fails, .*{said}") as error:
        render(source, CONVERSATION)
    assert "\n" not in str(error.value)
    assert capfd.readouterr() == ("", "")


ENDLESS = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "arithmetic, which no Python code could interrupt": "{{ (messages | length + 9) ** (10 ** 9) }}",
    "arithmetic as it is compiled": "{{ 10 ** (10 ** 9) }}",
}


@pytest.mark.parametrize("case", ENDLESS)
def test_a_template_without_end_is_stopped(case: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match="t.jinja: the chat template was stopped, .*more than 0.5 s"):
        render(ENDLESS[case], CONVERSATION, seconds=0.5)
    assert capfd.readouterr() == ("", "")


def test_the_process_ends_with_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    class Watched(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **settings: Any) -> None:
            super().__init__(*arguments, **settings)
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Watched)
    for source in (CHATML, "{% for %}"):
        with contextlib.suppress(InputError), rendering(Template(Path("t.jinja"), source, {}, (), "")):
            assert started[-1].poll() is None
        assert started[-1].poll() is not None
    assert len(started) == 2


def test_loops_can_be_broken_off_and_dicts_made() -> None:
    source = (
        "{% for i in range(9) %}{% if i == 2 %}{% continue %}{% elif i == 4 %}{% break %}{% endif %}{{ i }}{% endfor %}"
    )
    source += "{% generation %}{{ dict(a=1) | tojson }}{% endgeneration %}"
    made = render(source, CONVERSATION)
    assert made and made.content == b'013{"a": 1}' and made.spans == ((3, 11),)


def test_what_the_template_refuses_is_malformed(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "tokenizer", LLAMA_2)
    twice = [CONVERSATION[1], CONVERSATION[1], CONVERSATION[2]]
    path = write_chats(tmp_path / "a.jsonl", [CONVERSATION, twice, CONVERSATION])
    with pytest.raises(InputError, match=r"a.jsonl, byte \d+: the chat template .*refuses it .roles must alternate"):
        read(path, config(folder))
    ids, _, skipped = read(path, config(folder, malformed="skip"))
    assert skipped == {"refused by the chat template": 1}
    assert ids == 2 * read(write_chats(path, [CONVERSATION]), config(folder))[0]


# As those which leave out what the assistant thought before the last question.
FORGETS = """\
{%- for m in messages %}{{ m.role + ': ' + (m.content if loop.last else m.content[:2]) + '\\n' }}{% endfor %}
{{- 'assistant: ' if add_generation_prompt }}"""
NEEDS_A_QUESTION = """\
{%- if not messages | selectattr('role', 'equalto', 'user') | list %}{{ raise_exception('no question') }}{% endif %}
{%- for m in messages %}{{ m.role + m.content }}{% endfor %}"""


@pytest.mark.parametrize(
    ("source", "messages", "said"),
    [
        (FORGETS, conversation(3), "writes earlier turns otherwise once others follow.*{% generation %}"),
        (NEEDS_A_QUESTION, conversation(3)[1:], "refuses the first messages of a conversation alone .no question"),
        (LLAMA_3.replace("{{- bos", "{{ bos"), CONVERSATION, "writes today's date.*data.date 2026-01-31"),
        (MARKED.replace("endgeneration", "endfor", 1), CONVERSATION, "line [0-9]+: "),
        (
            "{% set a %}{% generation %}abc{% endgeneration %}{% endset %}{{ a[:9] }}",
            CONVERSATION,
            "does not write what each",
        ),
        (
            "{% set a %}{% generation %}abc{% endgeneration %}{% endset %}{{ a | e }}",
            CONVERSATION,
            "does not write what each",
        ),
        (
            "{% generation %}a{% generation %}b{% endgeneration %}{% endgeneration %}",
            CONVERSATION,
            "one generation block inside another",
        ),
    ],
)
def test_a_template_that_does_not_tell_the_assistants_turns(source: str, messages: Messages, said: str) -> None:
    with pytest.raises(InputError, match=f"the chat template fails, .*{said}"):
        render(source, messages)


def test_a_turn_that_is_forgotten_is_told_by_a_generation_block() -> None:
    marked = FORGETS.replace("{{ m.role + ': ' + (", "{{ m.role + ': ' }}{% generation %}{{ (").replace(
        " + '\\n' }}{% endfor %}", " }}{% endgeneration %}{{ '\\n' }}{% endfor %}"
    )
    made = render(marked, conversation(2))
    assert made and made.spans
    text = made.content.decode()
    assert [text[begin:end] for begin, end in made.spans] == ["Co", "1 ", "An", "2."]


# ---- The prompt for an answer, as a conversation in the terminal wants it.


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
def test_a_prompt_ends_where_the_assistant_is_to_speak(source: str, asks: str, end: str | None, tmp_path: Path) -> None:
    """Of any template, also one that says nothing of earlier turns; and what it writes behind an answer is found."""
    template = found_template(config(write_tokenizer(tmp_path / "tokenizer", source), date="2026-01-31"))
    with rendering(template) as renderer:
        assert renderer.turn_end() == end
        text = renderer.prompt(conversation(3)[:3])
        assert "And which was 3?" in text and text.endswith(asks) and "\0" not in text


def test_a_template_is_no_more_trusted_in_a_conversation() -> None:
    for source, seconds, said in (
        (HOSTILE["class"][0], 120.0, "the chat template fails, in a conversation: .*'__class__' of a str"),
        ("{{ raise_exception('not\nnow') }}", 120.0, "t.jinja: the chat template refuses it .not"),
        (ENDLESS["loops"], 0.5, "was stopped, in a conversation: it took more than 0.5 s"),
    ):
        given = Template(Path("t.jinja"), source, {}, (), "")
        with rendering(given, seconds) as renderer, pytest.raises(InputError, match=said):
            renderer.prompt(CONVERSATION[:2])
