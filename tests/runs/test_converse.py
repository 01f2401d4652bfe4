"""Conversations in the terminal with models of Hugging Face folders."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import folders
import jax
import numpy as np
import pytest
import toy
from chats import CHATML, LLAMA_2, LLAMA_3, write_tokenizer
from commands import ENVIRONMENT, ROOT, assert_one_line
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel

from jaxopt_llm import generate
from jaxopt_llm.checkpoint.huggingface.model_folder import write_model_folder
from jaxopt_llm.core import errors
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.data.tokens import continuation
from jaxopt_llm.execution.decode import Request, TokenGenerator
from jaxopt_llm.execution.sampling import Sampling
from jaxopt_llm.inference import chat, models
from jaxopt_llm.model.decoder_specs import param_specs

WORDS = ("<|end|>", "<|turn|>", "user", "assistant", "system", "ask", "again", "good", "day", "<|next|>")
SPECIAL = ("<|end|>", "<|turn|>", "<|next|>")
TURNS = (
    "{% for m in messages %}{{ m.role + ' ' + m.content + ' <|turn|> ' }}{% endfor %}"
    "{{ 'assistant' if add_generation_prompt }}"
)
# Successor of each word in the model below.
FOLLOWS = {"assistant": "good", "good": "day", "day": "<|turn|>", "<|turn|>": "again", "again": "<|next|>"}


def talker(path: Path, template: str | None = TURNS, **eos: Any) -> Path:
    """Write a model that says "good day" and ends its turn. eos: eos_token_id by the name of the file."""
    config = replace(
        folders.CONFIG, vocabulary_size=len(WORDS), layers=1, pattern=("global",), biases="none", norm_epsilon=1e-5
    )
    params = jax.tree.map(np.zeros_like, toy.params(param_specs(config)))
    for norm in (
        params["non_layer"]["final_norm"],
        *(params["segment_0"]["block_0"][n] for n in ("attention_norm", "mlp_norm")),
    ):
        norm["scale"] += 1
    params["non_layer"]["embedding"]["table"][: len(WORDS), : len(WORDS)] = np.eye(len(WORDS))
    for word, following in FOLLOWS.items():
        params["non_layer"]["head"]["table"][WORDS.index(following), WORDS.index(word)] = 1
    write_model_folder(path, jax.device_put(params, toy.placement().replicated), config)
    library = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<|next|>"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    library.add_special_tokens([*SPECIAL])
    library.save(str(path / "tokenizer.json"))
    settings = {"eos_token": "<|end|>"} | ({} if template is None else {"chat_template": template})
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    for name, value in eos.items():
        file = path / f"{name}.json"
        before = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps(before | {"eos_token_id": value}))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return talker(tmp_path_factory.mktemp("talker") / "model")


def run_command(lines: str, *arguments: object, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> tuple[int, str, str]:
    """Run the command's main in this process. Return exit code, output and errors."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    monkeypatch.setattr(sys, "argv", ["generate", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        errors.run_command(generate.main)
    captured = capsys.readouterr()
    assert isinstance(stop.value.code, int)
    return stop.value.code, captured.out, captured.err


@pytest.mark.core
def test_the_command(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "jaxopt_llm.generate", "--checkpoint", str(folder), "--chat", "--system", "good"],
        input="ask\n\n  \nask again\n",
        capture_output=True,
        text=True,
        env=os.environ | ENVIRONMENT,
        cwd=ROOT.parent,
        timeout=300,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, " good day\n" * 2, "")


# ---- Answers depend on the whole conversation.


class Watched(TokenGenerator):
    """Generator that records the slots computed for each prompt."""

    computed: list[tuple[list[int], int, int]] = []  # noqa: RUF012

    def _make_filling(self, places: Any, *given: Any) -> Any:
        filling = super()._make_filling(places, *given)
        self.computed.append(([*places[0].row.ids], int(filling.first[0]), filling.tokens.shape[1]))
        return filling


def test_the_cache_is_reused(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(chat, "TokenGenerator", Watched)
    monkeypatch.setattr(Watched, "computed", [])
    words = " ".join(["again"] * 20)
    run_command(f"ask {words}\nask\n", "--checkpoint", folder, "--chat", monkeypatch=monkeypatch, capsys=capsys)
    (first, *where), (second, *later) = Watched.computed
    assert [WORDS[i] for i in first] == ["user", "ask", *words.split(), "<|turn|>", "assistant"]
    assert where == [0, 32]
    assert [WORDS[i] for i in second[len(first) :]] == [
        "good",
        "day",
        "<|turn|>",
        "user",
        "ask",
        "<|turn|>",
        "assistant",
    ]
    assert later == [len(first) + 3, 16]  # only the end token of the answer and the new turn


def test_what_the_template_writes_in_an_answer_is_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """The model writes "<|next|> system" before the content, as gpt-oss names a channel, and the template does, too."""
    monkeypatch.setattr(chat, "TokenGenerator", Watched)
    monkeypatch.setattr(Watched, "computed", [])
    for word, following in {"assistant": "<|next|>", "<|next|>": "system", "system": "good"}.items():
        monkeypatch.setitem(FOLLOWS, word, following)
    channel = "{{ m.role + (' <|next|> system ' if m.role == 'assistant' else ' ') + m.content"
    model = talker(tmp_path / "model", TURNS.replace("{{ m.role + ' ' + m.content", channel))
    run_command("ask\nask\n", "--checkpoint", model, "--chat", monkeypatch=monkeypatch, capsys=capsys)
    answer = ["<|next|>", "system", "good", "day", "<|turn|>"]
    asked = ["user", "ask", "<|turn|>", "assistant"]
    assert [WORDS[i] for i in Watched.computed[-1][0]] == [*asked, *answer, *asked]


@pytest.mark.parametrize(("name", "template"), [("chatml", CHATML), ("llama 2", LLAMA_2), ("llama 3", LLAMA_3)])
def test_answers_depend_on_the_whole_conversation(
    name: str, template: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Check a model with random weights. The text of its answers has other tokens than were sampled."""
    config = replace(folders.CONFIG, vocabulary_size=512, layers=2, pattern=("sliding",))
    path = write_tokenizer(folders.folder(tmp_path / "model", config), template)
    options = ("--checkpoint", path, "--chat", "--system", "Be brief.", "--tokens", 5, "--context", 256)
    code, out, err = run_command("What?\nThanks é\n", *options, monkeypatch=monkeypatch, capsys=capsys)
    assert (code, err) == (0, "")
    source = models.load_model(path)
    messages = [{"role": "system", "content": "Be brief."}]
    expected = ""
    for line in ("What?", "Thanks é"):
        messages.append({"role": "user", "content": line})
        data = replace(source.config.data, date=chat.date.today().isoformat())
        renderer = chat.Renderer(chat.find_template(data, source.tokenizer))
        prompt = renderer.render_prompt(messages)
        ids = source.tokenizer.encode([prompt.encode()])[0].astype(np.int32)
        decoder = TokenGenerator(source.model, source.params, source.placement, 512, 1, 256)
        answer = continuation.Continuation(source.tokenizer, ids.tolist(), {source.tokenizer.eos}, ())
        drawn = decoder.run([Request(ids, 5)], lambda _, answer=answer: answer.done)
        continuation.extend_continuations(((0, each.token) for each in drawn), [answer])
        messages.append({"role": "assistant", "content": answer.text})
        expected += answer.text + "\n"
    assert out == expected and len(expected) > 2


# ---- The end of an answer.


@pytest.mark.parametrize(
    ("eos", "turn_end", "ends"),
    [
        ({}, None, {"<|end|>"}),
        ({}, "<|turn|>", {"<|end|>", "<|turn|>"}),
        ({"config": 1}, None, {"<|end|>", "<|turn|>"}),
        ({"config": 1, "generation_config": [9]}, None, {"<|end|>", "<|next|>"}),
        ({"config": [1, 9], "generation_config": None}, None, {"<|end|>", "<|turn|>", "<|next|>"}),
        ({"config": 9}, "<|turn|>", {"<|end|>", "<|turn|>", "<|next|>"}),
    ],
)
def test_eos_ids(eos: dict[str, Any], turn_end: str | None, ends: set[str], folder: Path, tmp_path: Path) -> None:
    path = shutil.copytree(folder, tmp_path / "model")
    for name, value in eos.items():
        (path / f"{name}.json").write_text(json.dumps({"eos_token_id": value}))
    data = models.DataConfig(tokenizer=str(path))
    found = continuation.find_eos_ids(data, models.load_tokenizer(data), turn_end)
    assert {WORDS[i] for i in found} == ends
    data = replace(data, tokenizer=str(path / "tokenizer.json"))
    assert continuation.find_eos_ids(data, models.load_tokenizer(data), turn_end) == found


@pytest.mark.parametrize("value", [10, -1, True, "1", [1, None], {"a": 1}])
def test_an_invalid_eos_id_is_rejected(value: Any, folder: Path, tmp_path: Path) -> None:
    path = shutil.copytree(folder, tmp_path / "model")
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    data = models.DataConfig(tokenizer=str(path))
    with pytest.raises(
        InputError, match="generation_config.json: eos_token_id=.*below the tokenizer's vocabulary size 10"
    ):
        continuation.find_eos_ids(data, models.load_tokenizer(data))


def test_text_continues_over_turns_unless_the_folder_declares_eos(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    fixtures = {"monkeypatch": monkeypatch, "capsys": capsys}
    options = ("--prompt", "assistant", "--tokens", 5)
    on = run_command("", "--checkpoint", folder, *options, **fixtures)
    assert on == (0, "assistant good day again\n", "")
    assert run_command("", "--checkpoint", folder, *options, "--tensor", 2, **fixtures) == on
    path = talker(tmp_path / "model", generation_config=[1])
    assert run_command("", "--checkpoint", path, *options, **fixtures) == (0, "assistant good day\n", "")


@pytest.mark.parametrize("template", [TURNS, TURNS.replace("<|turn|>", "")], ids=["ends a turn", "does not"])
def test_the_templates_own_token_ends_an_answer(
    template: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    path = talker(tmp_path / "model", template)
    options = ("--checkpoint", path, "--chat", "--tokens", 4)
    code, out, _ = run_command("ask\n", *options, monkeypatch=monkeypatch, capsys=capsys)
    assert (code, out) == (0, " good day\n" if "<|turn|>" in template else " good day again\n")


def test_an_interrupt_ends_an_answer_and_a_second_one_the_command(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    times = 1

    def show(text: str) -> None:
        print(text, end="")
        if text == " good":
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(chat, "print_text", show)
    talk = ("ask\nask\n", "--checkpoint", folder, "--chat")
    before = signal.getsignal(signal.SIGINT)
    assert run_command(*talk, monkeypatch=monkeypatch, capsys=capsys) == (0, " good\n good\n", "")
    assert signal.getsignal(signal.SIGINT) is before
    times = 2
    code, out, err = run_command(*talk, monkeypatch=monkeypatch, capsys=capsys)
    assert (code, out, err) == (130, " good", "interrupted\n")


def test_control_characters_are_escaped_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "a\tb\n\N{NO-BREAK SPACE}\x1b[2J\x9b1m\r\x7fé"
    chat.print_text(text)
    assert capsys.readouterr().out == text
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    chat.print_text(text)
    assert capsys.readouterr().out == "a\tb\n\N{NO-BREAK SPACE}\\x1b[2J\\x9b1m\\r\\x7fé"


# ---- Bad input.


@pytest.mark.parametrize(
    ("lines", "arguments", "expected"),
    [
        ("ask ask ask\n", "--context 4", ["--context 4: the conversation now has 6 tokens", "increase --context"]),
        ("ask\nask\n", "--context 10", ["--context 10: the conversation now has 11 tokens"]),
        ("ask\n", "--context 6", ["--context 6: the answer is cut off", "increase --context"]),
        ("ask\n", "--prompt x", ["--chat", "leave out --prompt"]),
        ("ask\n", "--context 1", ["--context 1: must lie between 2"]),
        ("ask\n", "--tokens 0", ["--tokens 0"]),
        ("ask\n", "--tensor 3", ["--tensor 3: must divide the number of devices (8)", "choose one of 1, 2, 4"]),
        ("ask\n", "--checkpoint nowhere", ["nowhere: not a run directory", "nor a Hugging Face model folder"]),
        (
            "ask\n",
            "--checkpoint BARE",
            ["BARE has no chat template (", "name a template file with --chat-template"],
        ),
        ("ask\n", "--checkpoint REFUSES", ["the chat template rejects the conversation (no one is to speak)"]),
    ],
)
def test_bad_input(
    lines: str,
    arguments: str,
    expected: list[str],
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
) -> None:
    for name, template in (("BARE", None), ("REFUSES", "{{ raise_exception('no one is to speak') }}")):
        if name in arguments:
            arguments = arguments.replace(name, str(talker(tmp_path / name, template)))
    given = ("--checkpoint", folder, "--chat", *arguments.split())
    code, out, err = run_command(lines, *given, monkeypatch=monkeypatch, capsys=capsys)
    assert code == 2 and not out.replace("good day\n", "").replace("good d", "").strip(), (out, err)
    assert_one_line(err, *expected)


def test_a_template_can_be_named(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """The folder of a base model often has none; a named tokenizer takes the place of the folder's."""
    bare = talker(tmp_path / "bare", None)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (tmp_path / "chat.jinja").write_text(settings["chat_template"])
    for given in (("--chat-template", tmp_path / "chat.jinja"), ("--tokenizer", folder)):
        arguments = ("--checkpoint", bare, "--chat", *given)
        code, out, err = run_command("ask\n", *arguments, monkeypatch=monkeypatch, capsys=capsys)
        assert (code, err) == (0, ""), err
        assert out == run_command("ask\n", "--checkpoint", folder, "--chat", monkeypatch=monkeypatch, capsys=capsys)[1]
    (bare / "tokenizer.json").unlink()
    code, _, err = run_command("", "--checkpoint", bare, "--prompt", "x", monkeypatch=monkeypatch, capsys=capsys)
    assert code == 2
    assert_one_line(err, f"--tokenizer {bare}: not a readable tokenizer.json", "with --tokenizer")


def test_arguments_of_the_template(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    talking = talker(tmp_path / "model", TURNS.replace("'assistant'", "('good ' if polite else 'again ')"))
    given = ("--checkpoint", talking, "--chat", "--tokens", 1)
    for value, answer in (("true", "day"), ("false", ""), ("yes", "day")):
        options = (*given, "--template-arguments", f"polite={value}")
        code, out, err = run_command("ask\n", *options, monkeypatch=monkeypatch, capsys=capsys)
        assert (code, out.strip(), err) == (0, answer, "")
    for value, message in (("polite", "must be NAME=VALUE"), ("tools=[]", "the name tools is reserved")):
        options = (*given, "--template-arguments", value)
        code, _, err = run_command("ask\n", *options, monkeypatch=monkeypatch, capsys=capsys)
        assert code == 2
        assert_one_line(err, f"--template-arguments: {value}: ", message)


def test_a_model_of_bytes_has_no_template(folder: Path) -> None:
    loaded = models.load_model(folder)
    bytes_ = replace(loaded.config.data, tokenizer="bytes")
    source = replace(loaded, config=replace(loaded.config, data=bytes_))
    with pytest.raises(InputError, match=r"--chat: the model was trained on bytes, .*; continue a text with --prompt"):
        chat.converse(source, None, 8, 1, Sampling(), [])


def test_options_of_a_conversation_require_chat(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    for option in (("--system", "x"), ("--context", 9), ("--chat-template", "x"), ("--template-arguments", "a=1")):
        given = ("--checkpoint", folder, "--prompt", "x", *option)
        code, _, err = run_command("", *given, monkeypatch=monkeypatch, capsys=capsys)
        assert code == 2
        assert_one_line(err, "add --chat")


def test_a_line_that_is_not_text(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    talk = ("--checkpoint", folder, "--chat")
    monkeypatch.setattr(io, "StringIO", lambda _: io.TextIOWrapper(io.BytesIO(b"a\xff\n"), encoding="utf-8"))
    code, _, err = run_command("", *talk, monkeypatch=monkeypatch, capsys=capsys)
    assert code == 2
    assert_one_line(err, "standard input: not valid utf-8 text")
