"""Generation: the end of a continuation, the text shown so far, and bad input."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
import toy
from commands import command, train
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel

from jaxopt_llm.config import Config, ModelConfig
from jaxopt_llm.core.errors import InputError, OutOfMemory
from jaxopt_llm.data.tokens.continuation import Continuation
from jaxopt_llm.data.tokens.tokenizer import ByteTokenizer, JsonTokenizer
from jaxopt_llm.execution.decode import Drawn, Request
from jaxopt_llm.execution.sampling import Sampling
from jaxopt_llm.generate import generate, main
from jaxopt_llm.inference.models import LoadedModel
from jaxopt_llm.model.decoder import Decoder


def shown(text: str, *stops: str, end: bool = True) -> tuple[list[str], str]:
    """Return the text shown after each byte of a text (and after EOS), and all of it."""
    continuation = Continuation(ByteTokenizer(), (), {ByteTokenizer.eos}, stops)
    news = []
    for token in [*text.encode(), *([ByteTokenizer.eos] if end else [])]:
        continuation.add(token)
        news.append(continuation.take_new_text())
    continuation.finish()
    news.append(continuation.take_new_text())
    assert "".join(news) == continuation.text
    return news, continuation.text


def test_text_is_shown_as_it_comes_in_whole_characters() -> None:
    assert shown("aé")[0] == ["a", "", "é", "", ""]
    assert shown("a\N{REPLACEMENT CHARACTER}b")[1] == "a\N{REPLACEMENT CHARACTER}b"


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("one\ntwo", ("\n",), "one"),
        ("one END two", ("END",), "one "),
        ("one EN two", ("END",), "one EN two"),
        ("abcd", ("cd", "bcd"), "a"),
        ("aab", ("ab",), "a"),
        ("ends with EN", ("END",), "ends with EN"),
    ],
)
def test_a_stop_string_ends_the_text_and_no_part_of_it_is_shown(
    text: str, stops: tuple[str, ...], expected: str
) -> None:
    news, whole = shown(text, *stops)
    assert whole == expected
    so_far = ""
    for new in news:
        so_far += new
        assert expected.startswith(so_far)


def test_a_continuation_keeps_the_space_that_its_tokenizer_drops_at_a_start(tmp_path: Path) -> None:
    """The tokenizers of Llama 2 and Mistral drop it."""
    library = Tokenizer(WordLevel({"\u2581hello": 0, "\u2581world": 1, "</s>": 2}, unk_token="</s>"))
    library.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    library.add_special_tokens(["</s>"])
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = JsonTokenizer(tmp_path)
    assert tokenizer.decode([1]) == "world"
    continuation = Continuation(tokenizer, [0], {tokenizer.eos}, ["lo wo"])
    for token in (1, 1, 0, 1):
        continuation.add(token)
    assert continuation.text == " world world hel"


@pytest.mark.parametrize(
    ("stops", "tokens", "expected"),
    [
        (["<|im_end|>"], "hello <|im_end|> world", "hello"),
        (["<|im_end|>"], "hello <|im_start|> world <|im_end|> hello", "hello world"),
        (["<|im_end|> world"], "hello <|im_end|> hello <|im_end|> world hello", "hello hello"),
        (["lo<|im_end|>"], "world hello <|im_end|> world", "world hel"),
        (["<|im_start|>"], "hello <|im_end|> world", "hello world"),
    ],
)
def test_a_special_token_stops_although_it_is_not_shown(
    stops: list[str], tokens: str, expected: str, tmp_path: Path
) -> None:
    words = ["\u2581hello", "\u2581world", "</s>", "<|im_start|>", "<|im_end|>"]
    library = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token="</s>"))
    library.decoder = decoders.Metaspace()
    library.add_special_tokens(words[2:])
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = JsonTokenizer(tmp_path)
    continuation = Continuation(tokenizer, [], {tokenizer.eos}, stops)
    shown = ""
    for token in tokens.split():
        name = token if token in words else f"\u2581{token}"
        continuation.add(tokenizer.vocabulary[name])
        shown += continuation.take_new_text()
        assert expected.startswith(shown)
    continuation.finish()
    assert (shown + continuation.take_new_text(), continuation.text) == (expected, expected)


def test_nothing_follows_the_end_of_the_document() -> None:
    continuation = Continuation(ByteTokenizer(), (), {ByteTokenizer.eos}, ())
    for token in (104, ByteTokenizer.eos, 105):
        continuation.add(token)
    assert (continuation.text, continuation.done) == ("h", True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "give --prompt TEXT"),
        ("--prompt x --tokens 0", "--tokens 0: must lie between 1 and"),
        ("--prompt x --temperature -1", "--temperature -1.0: must be at least 0"),
        ("--prompt x --temperature nan", "--temperature nan: must be at least 0"),
        ("--prompt x --temperature 1 --top-k -1", "--top-k -1: must be at least 0"),
        ("--prompt x --temperature 1 --top-p 0", "--top-p 0.0: must be above 0 and at most 1"),
        ("--prompt x --temperature 1 --min-p 1", "--min-p 1.0: must be at least 0 and below 1"),
        ("--prompt x --repetition-penalty 0", "--repetition-penalty 0.0: must be above 0"),
        ("--prompt x --top-p 0.9", "set --temperature above 0"),
        ("--prompt x --seed -1", "--seed -1: must lie between"),
        ("--prompt x --stop=", "--stop is empty"),
        ("--prompts FILE", 'line 2 is not a JSON string, such as "def main"'),
    ],
)
def test_bad_input(arguments: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "prompts").write_text('"x"\nx\n')
    given = ["--checkpoint", str(tmp_path), *arguments.replace("FILE", str(tmp_path / "prompts")).split()]
    monkeypatch.setattr(sys, "argv", ["generate", *given])
    with pytest.raises(InputError, match=message):
        main()


@pytest.mark.parametrize(
    ("fails", "message"), [("inference.models.load_model", "loading the checkpoint"), ("generate", "generating")]
)
def test_running_out_of_memory_names_a_remedy(fails: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(*_: object, **__: object) -> None:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1024 bytes.")

    monkeypatch.setattr(sys, "argv", ["generate", "--checkpoint", "runs/x", "--prompt", "x"])
    monkeypatch.setattr("jaxopt_llm.inference.models.load_model", lambda *_, **__: None)
    monkeypatch.setattr(f"jaxopt_llm.{'generate.' * (fails == 'generate')}{fails}", exhausted)
    with pytest.raises(OutOfMemory, match=f"out of memory {message}: XLA could not allocate .*: (use|give) "):
        main()


def test_generation_stays_within_the_learned_positions() -> None:
    config = Config(model=ModelConfig(positions="learned", max_positions=8))
    parts = Decoder(config.model)
    source = LoadedModel(config, ByteTokenizer(), parts, parts.specs, toy.placement(), step=1)
    with pytest.raises(InputError, match="--tokens 5: with the 4 of the prompt.*8 learned positions"):
        generate(source, ["abc", "ab"], 5, Sampling(), ())


def test_a_prompt_begins_with_what_the_tokenizer_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[int]] = []

    class Generator:
        def __init__(self, *_: object, **__: object) -> None: ...

        def run(self, requests: list[Request], has_ended: object) -> Iterator[Drawn]:
            seen.extend(request.prompt.tolist() for request in requests)
            yield from (Drawn(request, ByteTokenizer.eos, 0.0) for request in requests)

    monkeypatch.setattr("jaxopt_llm.generate.TokenGenerator", Generator)
    config, tokenizer = Config(), ByteTokenizer()
    tokenizer.prefix = (256, 65)
    parts = Decoder(config.model)
    source = LoadedModel(config, tokenizer, parts, parts.specs, toy.placement(), step=1)
    assert generate(source, ["b", ""], 5, Sampling(), ()) == ["", ""]
    assert seen == [[256, 65, 98], [256, 65]]


@pytest.mark.core
def test_the_command(tmp_path: Path) -> None:
    assert train(tmp_path / "run", "--training.steps", 1).returncode == 0
    (tmp_path / "prompts.jsonl").write_text('"def "\n"class Caf\\u00e9"\n')
    options = ("--tokens", 8, "--temperature", 1, "--top-k", 50, "--seed", 3)

    def generate(*prompts: object) -> str:
        done = command("generate", "--checkpoint", tmp_path / "run", *prompts, *options)
        assert done.returncode == 0, done.stderr
        return done.stdout

    lines = [json.loads(line) for line in generate("--prompts", tmp_path / "prompts.jsonl").splitlines()]
    assert [line["prompt"] for line in lines] == ["def ", "class Café"]
    assert generate("--prompt", "def ") == f"def {lines[0]['text']}\n"
