"""Conversations in the terminal, from Hugging Face folders: as a command, and line by line."""

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
from commands import ENVIRONMENT, ROOT
from test_bad_input import assert_one_line
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel

from jaxopt_llm import chat, errors, generate, run
from jaxopt_llm.checkpoint import huggingface
from jaxopt_llm.data import continuation
from jaxopt_llm.errors import InputError
from jaxopt_llm.execution.decode import Decoder, Sampling
from jaxopt_llm.model.decoder import param_specs

WORDS = ("<|end|>", "<|turn|>", "user", "assistant", "system", "ask", "again", "good", "day", "<|next|>")
SPECIAL = ("<|end|>", "<|turn|>", "<|next|>")
TURNS = (
    "{% for m in messages %}{{ m.role + ' ' + m.content + ' <|turn|> ' }}{% endfor %}"
    "{{ 'assistant' if add_generation_prompt }}"
)
# What follows each word in the model below.
FOLLOWS = {"assistant": "good", "good": "day", "day": "<|turn|>", "<|turn|>": "again", "again": "<|next|>"}


def talker(path: Path, template: str | None = TURNS, **eos: Any) -> Path:
    """A folder of a model that says "good day", and ends a turn. eos: what its files have as eos_token_id, by name."""
    config = replace(
        folders.CONFIG, vocabulary_size=len(WORDS), layers=1, pattern=("global",), biases="none", norm_epsilon=1e-5
    )
    params = jax.tree.map(np.zeros_like, toy.params(param_specs(config)))
    for norm in (
        params["outer"]["final_norm"],
        *(params["segment_0"]["block_0"][n] for n in ("attention_norm", "mlp_norm")),
    ):
        norm["scale"] += 1
    params["outer"]["embedding"]["table"][: len(WORDS), : len(WORDS)] = np.eye(len(WORDS))
    for word, following in FOLLOWS.items():
        params["outer"]["head"]["table"][WORDS.index(following), WORDS.index(word)] = 1
    huggingface.write(path, jax.device_put(params, toy.placement().replicated), config)
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


def said(lines: str, *arguments: object, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> tuple[int, str, str]:
    """The command's main, in this process: exit code, output and errors."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    monkeypatch.setattr(sys, "argv", ["generate", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        errors.run(generate.main)
    told = capsys.readouterr()
    assert isinstance(stop.value.code, int)
    return stop.value.code, told.out, told.err


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


# ---- Every answer is what follows all that was said before.


class Watched(Decoder):
    """Which slots were computed for each prompt."""

    computed: list[tuple[list[int], int, int]] = []  # noqa: RUF012

    def __call__(self, prompts: Any, count: int) -> Any:
        self._asked = prompts[0].tolist()
        return super().__call__(prompts, count)

    def _advance(self, tokens: Any, padding: Any, first: int, last: int) -> Any:
        if tokens.shape[1] > 1:
            self.computed.append((self._asked, first, tokens.shape[1]))
        return super()._advance(tokens, padding, first, last)


def test_the_cache_is_gone_on_with(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(chat, "Decoder", Watched)
    monkeypatch.setattr(Watched, "computed", [])
    words = " ".join(["again"] * 20)
    said(f"ask {words}\nask\n", "--checkpoint", folder, "--chat", monkeypatch=monkeypatch, capsys=capsys)
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
    assert later == [len(first) + 3, 16]  # nothing of what was said, and of the answer with the token that ended it


@pytest.mark.parametrize(("name", "template"), [("chatml", CHATML), ("llama 2", LLAMA_2), ("llama 3", LLAMA_3)])
def test_answers_are_those_to_the_whole_conversation(
    name: str, template: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """By a model of random values, whose answers' texts are other tokens than were drawn."""
    config = replace(folders.CONFIG, vocabulary_size=512, layers=2, pattern=("sliding",))
    path = write_tokenizer(folders.folder(tmp_path / "model", config), template)
    options = ("--checkpoint", path, "--chat", "--system", "Be brief.", "--tokens", 5, "--context", 256)
    code, out, err = said("What?\nThanks é\n", *options, monkeypatch=monkeypatch, capsys=capsys)
    assert (code, err) == (0, "")
    source = run.load(path)
    messages = [{"role": "system", "content": "Be brief."}]
    expected = ""
    for line in ("What?", "Thanks é"):
        messages.append({"role": "user", "content": line})
        data = replace(source.config.data, date=chat.date.today().isoformat())
        with chat.rendering(chat.find_template(data, source.tokenizer)) as renderer:
            prompt = renderer.prompt(messages)
        ids = source.tokenizer.encode([prompt.encode()])[0].astype(np.int32)
        decoder = Decoder(source.parts, source.params, source.placement, 512, Sampling(), 0, 1, 256)
        answer = continuation.Continuation(source.tokenizer, ids.tolist(), {source.tokenizer.end}, ())
        continuation.write(decoder([ids], 5), [answer])
        messages.append({"role": "assistant", "content": answer.text})
        expected += answer.text + "\n"
    assert out == expected and len(expected) > 2


# ---- Where an answer ends.


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
def test_the_ids_that_end(
    eos: dict[str, Any], turn_end: str | None, ends: set[str], folder: Path, tmp_path: Path
) -> None:
    path = shutil.copytree(folder, tmp_path / "model")
    for name, value in eos.items():
        (path / f"{name}.json").write_text(json.dumps({"eos_token_id": value}))
    data = run.DataConfig(tokenizer=str(path))
    found = continuation.end_ids(data, run.load_tokenizer(data), turn_end)
    assert {WORDS[i] for i in found} == ends
    data = replace(data, tokenizer=str(path / "tokenizer.json"))
    assert continuation.end_ids(data, run.load_tokenizer(data), turn_end) == found


@pytest.mark.parametrize("value", [10, -1, True, "1", [1, None], {"a": 1}])
def test_what_is_no_id_is_refused(value: Any, folder: Path, tmp_path: Path) -> None:
    path = shutil.copytree(folder, tmp_path / "model")
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    data = run.DataConfig(tokenizer=str(path))
    with pytest.raises(InputError, match="generation_config.json: eos_token_id=.*below the tokenizer's 10"):
        continuation.end_ids(data, run.load_tokenizer(data))


def test_a_text_goes_on_over_turns_unless_the_folder_says_otherwise(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    talks = {"monkeypatch": monkeypatch, "capsys": capsys}
    options = ("--prompt", "assistant", "--tokens", 5)
    on = said("", "--checkpoint", folder, *options, **talks)
    assert on == (0, "assistant good day again\n", "")
    assert said("", "--checkpoint", folder, *options, "--tensor", 2, **talks) == on
    path = talker(tmp_path / "model", generation_config=[1])
    assert said("", "--checkpoint", path, *options, **talks) == (0, "assistant good day\n", "")


@pytest.mark.parametrize("template", [TURNS, TURNS.replace("<|turn|>", "")], ids=["ends a turn", "does not"])
def test_the_templates_own_token_ends_an_answer(
    template: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    path = talker(tmp_path / "model", template)
    options = ("--checkpoint", path, "--chat", "--tokens", 4)
    code, out, _ = said("ask\n", *options, monkeypatch=monkeypatch, capsys=capsys)
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

    monkeypatch.setattr(chat, "show", show)
    talk = ("ask\nask\n", "--checkpoint", folder, "--chat")
    before = signal.getsignal(signal.SIGINT)
    assert said(*talk, monkeypatch=monkeypatch, capsys=capsys) == (0, " good\n good\n", "")
    assert signal.getsignal(signal.SIGINT) is before
    times = 2
    code, out, err = said(*talk, monkeypatch=monkeypatch, capsys=capsys)
    assert (code, out, err) == (130, " good", "interrupted\n")


def test_what_would_steer_a_terminal_is_spelt_out_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "a\tb\n\N{NO-BREAK SPACE}\x1b[2J\x9b1m\r\x7fé"
    chat.show(text)
    assert capsys.readouterr().out == text
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    chat.show(text)
    assert capsys.readouterr().out == "a\tb\n\N{NO-BREAK SPACE}\\x1b[2J\\x9b1m\\r\\x7fé"


# ---- What cannot be answered.


@pytest.mark.parametrize(
    ("lines", "arguments", "said_there"),
    [
        ("ask ask ask\n", "--context 4", ["has 6 tokens by now, and --context 4"]),
        ("ask\nask\n", "--context 10", ["has 11 tokens by now", "--context 10"]),
        ("ask\n", "--context 6", ["the answer was cut", "--context 6"]),
        ("ask\n", "--prompt x", ["--chat", "no --prompt"]),
        ("ask\n", "--context 1", ["--context 1: must lie between 2"]),
        ("ask\n", "--tokens 0", ["--tokens 0"]),
        ("ask\n", "--tensor 3", ["--tensor 3: must divide the devices (8)", "as do 1, 2, 4"]),
        ("ask\n", "--checkpoint nowhere", ["nowhere: not a run directory", "nor the folder of a Hugging Face"]),
        ("ask\n", "--checkpoint BARE", ["no chat template", "put one there"]),
        ("ask\n", "--checkpoint REFUSES", ["the chat template refuses it (no one is to speak)"]),
    ],
)
def test_bad_input(
    lines: str,
    arguments: str,
    said_there: list[str],
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
) -> None:
    for name, template in (("BARE", None), ("REFUSES", "{{ raise_exception('no one is to speak') }}")):
        if name in arguments:
            arguments = arguments.replace(name, str(talker(tmp_path / name, template)))
    given = ("--checkpoint", folder, "--chat", *arguments.split())
    code, out, err = said(lines, *given, monkeypatch=monkeypatch, capsys=capsys)
    assert code == 2 and not out.replace("good day\n", "").replace("good d", "").strip(), (out, err)
    assert_one_line(err, *said_there)


def test_what_is_of_a_conversation_alone(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    for option in (("--system", "x"), ("--context", 9)):
        given = ("--checkpoint", folder, "--prompt", "x", *option)
        code, _, err = said("", *given, monkeypatch=monkeypatch, capsys=capsys)
        assert code == 2
        assert_one_line(err, "give --chat with them")


def test_a_line_that_is_no_text(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    talk = ("--checkpoint", folder, "--chat")
    monkeypatch.setattr(io, "StringIO", lambda _: io.TextIOWrapper(io.BytesIO(b"a\xff\n"), encoding="utf-8"))
    code, _, err = said("", *talk, monkeypatch=monkeypatch, capsys=capsys)
    assert code == 2
    assert_one_line(err, "standard input is no text in utf-8")
