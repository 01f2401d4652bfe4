"""Tokenizers: bytes, and a tokenizer.json."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from texts import train_tokenizer

from jaxopt_llm.config import DataConfig
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.data import bounded_tokenizer
from jaxopt_llm.data.tokenizer import ByteTokenizer, JsonTokenizer, load_tokenizer

tokenizer = ByteTokenizer()
TEXTS = ["def f(x):\n\treturn x\n", "naïve ∂L/∂w 🙂\0", "the cat sat on the mat " * 20]


def test_every_byte_is_its_own_id() -> None:
    (ids,) = tokenizer.encode([bytes(range(256))])
    assert ids.dtype == np.uint8
    assert ids.tolist() == list(range(256))


@pytest.mark.parametrize("text", ["", *TEXTS])
def test_text_round_trip(text: str) -> None:
    assert tokenizer.decode(tokenizer.encode([text.encode()])[0].tolist()) == text


def test_special_ids_are_the_top_of_the_vocabulary_and_are_not_text() -> None:
    special = [tokenizer.bos, tokenizer.eos]
    assert special == [256, 257] and tokenizer.vocabulary_size == 258
    assert tokenizer.decode([special[0], 104, 105, special[1]]) == "hi"


def test_half_a_character_decodes_to_the_replacement_character() -> None:
    assert tokenizer.decode(tokenizer.encode(["é".encode()])[0][:1]) == "\N{REPLACEMENT CHARACTER}"


def test_a_negative_id_is_an_error() -> None:
    with pytest.raises(ValueError):
        tokenizer.decode([-1])


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json", TEXTS)


def test_a_tokenizer_file_gives_its_librarys_ids(file: Path) -> None:
    from tokenizers import Tokenizer

    library = Tokenizer.from_file(str(file))
    loaded = load_tokenizer(DataConfig(tokenizer=str(file)))
    encoded = loaded.encode([text.encode() for text in TEXTS])
    assert [ids.tolist() for ids in encoded] == [library.encode(text).ids for text in TEXTS]
    assert [loaded.decode(ids) for ids in encoded] == TEXTS
    assert loaded.vocabulary_size == library.get_vocab_size()
    # A token that is declared as both BOS and EOS is used only as EOS.
    assert (loaded.bos, loaded.eos) == (None, library.token_to_id("<|endoftext|>"))
    assert loaded.decode([*encoded[0], loaded.eos]) == TEXTS[0]


def test_truncation_and_padding_of_a_tokenizer_file_are_disabled(file: Path, tmp_path: Path) -> None:
    settings = json.loads(file.read_text())
    settings["truncation"] = {"direction": "Right", "max_length": 5, "strategy": "LongestFirst", "stride": 0}
    padding = {"direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0, "pad_token": "x"}
    settings["padding"] = {"strategy": {"Fixed": 500}, **padding}
    (tmp_path / "tokenizer.json").write_text(json.dumps(settings))
    texts = [text.encode() for text in TEXTS]
    for ids, expected in zip(JsonTokenizer(tmp_path).encode(texts), JsonTokenizer(file).encode(texts), strict=True):
        assert ids.tolist() == expected.tolist()


def changed(file: Path, folder: Path, special: list[str], **declared: object) -> Path:
    """Write the tokenizer with other special tokens, and a tokenizer_config.json next to it."""
    settings = json.loads(file.read_text())
    (old,) = settings["added_tokens"]
    settings["added_tokens"] = [{**old, "id": 500 + i, "content": name} for i, name in enumerate(special)]
    (folder / "tokenizer.json").write_text(json.dumps(settings))
    if declared:
        (folder / "tokenizer_config.json").write_text(json.dumps(declared))
    return folder


LLAMA = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"]


@pytest.mark.parametrize(
    ("special", "declared", "settings", "expected"),
    [
        (LLAMA, {}, {}, ("<|begin_of_text|>", "<|end_of_text|>")),
        (LLAMA, {"eos_token": "<|eot_id|>"}, {}, ("<|begin_of_text|>", "<|eot_id|>")),
        (LLAMA, {"eos_token": {"content": "<|eot_id|>"}, "bos_token": None}, {}, ("<|begin_of_text|>", "<|eot_id|>")),
        (
            LLAMA,
            {"eos_token": "<|eot_id|>"},
            {"eos": "<|end_of_text|>", "bos": "<|eot_id|>"},
            ("<|eot_id|>", "<|end_of_text|>"),
        ),
        (["<|endoftext|>"], {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}, {}, (None, "<|endoftext|>")),
        (["<|endoftext|>"], {}, {"bos": "<|endoftext|>"}, ("<|endoftext|>", "<|endoftext|>")),
    ],
)
def test_delimiters(
    file: Path,
    tmp_path: Path,
    special: list[str],
    declared: dict[str, object],
    settings: dict[str, str],
    expected: tuple[str | None, str],
) -> None:
    from tokenizers import Tokenizer

    folder = changed(file, tmp_path, special, **declared)
    found = JsonTokenizer(folder, **settings)
    library = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert (found.bos, found.eos) == tuple(name and library.token_to_id(name) for name in expected)
    assert found.vocabulary_size == library.get_vocab_size()
    assert found.sha256 != JsonTokenizer(file).sha256


@pytest.mark.parametrize(
    ("special", "settings", "message"),
    [
        (["<|sep|>"], {}, r"does not declare an EOS token.*data.eos.*<\|sep\|>"),
        (["<|sep|>"], {"eos": "</s>"}, r"data.eos=</s>.*no such token.*<\|sep\|>"),
        (["</s>"], {"bos": "<s>"}, "data.bos=<s>.*no such token"),
    ],
)
def test_delimiters_that_are_missing(
    file: Path, tmp_path: Path, special: list[str], settings: dict[str, str], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        JsonTokenizer(changed(file, tmp_path, special), **settings)


@pytest.mark.parametrize("content", [None, "", "{}", "[1"])
def test_a_file_that_is_not_a_tokenizer(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(InputError, match="data.tokenizer=.*tokenizer.json"):
        load_tokenizer(DataConfig(tokenizer=str(tmp_path / "tokenizer.json")))


def test_bytes_have_their_own_delimiters() -> None:
    with pytest.raises(InputError, match="data.bos and data.eos.*data.tokenizer=bytes"):
        load_tokenizer(DataConfig(eos="</s>"))


def write_changed(file: Path, folder: Path, **settings: object) -> Path:
    (folder / "tokenizer.json").write_text(json.dumps(json.loads(file.read_text()) | settings))
    return folder


def test_a_tokenizer_that_needs_all_memory_ends_only_its_own_process(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded_tokenizer, "MEMORY", 2**28)
    bomb = {"type": "Replace", "pattern": {"String": "a"}, "content": "b" * 10**6}
    tokenizer = JsonTokenizer(write_changed(file, tmp_path, normalizer=bomb))
    with pytest.raises(InputError, match=r"data.tokenizer=.*ended its process .SIG.*trusted$"):
        tokenizer.encode([b"a" * 30])


def test_a_panic_of_the_library_is_one_line(file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Its type, PanicException, is no Exception."""
    with pytest.raises(InputError, match="not a readable tokenizer.json .PanicException: ") as raised:
        JsonTokenizer(write_changed(file, tmp_path, normalizer={"type": "Precompiled", "precompiled_charsmap": "////"}))
    assert "\n" not in str(raised.value) and capfd.readouterr().err == ""


def test_a_call_that_takes_too_long_ends(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_tokenizer, "SECONDS", 0.05)
    twice = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
    slow = write_changed(file, tmp_path, normalizer={"type": "Sequence", "normalizers": [twice] * 22})
    with pytest.raises(InputError, match="ended its process .too much time"):
        JsonTokenizer(slow).encode([b"a"])


def test_the_process_of_a_tokenizer_ends_with_it(file: Path) -> None:
    tokenizer = JsonTokenizer(file)
    process = tokenizer._library._process
    assert process.poll() is None
    del tokenizer
    assert process.wait(10) < 0


@pytest.mark.skipif(sys.platform != "linux", reason="a filter of Linux")
def test_the_process_of_a_tokenizer_has_neither_files_nor_a_network(file: Path) -> None:
    tokenizer = JsonTokenizer(file)
    assert "\nSeccomp:\t2\n" in Path(f"/proc/{tokenizer._library._process.pid}/status").read_text()
