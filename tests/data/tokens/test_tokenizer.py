"""Tokenizers: bytes, and a tokenizer.json."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from texts import train_tokenizer

from jaxopt_llm.config import DataConfig
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.data.reading.source import Document
from jaxopt_llm.data.tokens.pieces import tokenize
from jaxopt_llm.data.tokens.tokenizer import ByteTokenizer, JsonTokenizer, load_tokenizer

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
        (LLAMA, {}, {}, (None, "<|end_of_text|>")),
        (LLAMA, {"eos_token": "<|eot_id|>", "bos_token": "<|begin_of_text|>"}, {}, (None, "<|eot_id|>")),
        (LLAMA, {"eos_token": {"content": "<|eot_id|>"}, "bos_token": None}, {}, (None, "<|eot_id|>")),
        (LLAMA, {"eos_token": ["<|eot_id|>", "<|end_of_text|>"], "add_bos_token": True}, {}, (None, "<|eot_id|>")),
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
    """BOS is added only where the post-processor of tokenizer.json adds it, or where data.bos names it."""
    from tokenizers import Tokenizer

    folder = changed(file, tmp_path, special, **declared)
    found = JsonTokenizer(folder, **settings)
    library = Tokenizer.from_file(str(folder / "tokenizer.json"))
    bos, eos = [name and library.token_to_id(name) for name in expected]
    assert (found.bos, found.eos) == (bos, eos)
    assert (found.prefix, found.suffix) == (() if bos is None else (bos,), (eos,))
    assert found.vocabulary_size == library.get_vocab_size()
    assert found.sha256 != JsonTokenizer(file).sha256


@pytest.mark.parametrize(
    ("template", "prefix", "suffix"),
    [
        ("<s> $A", ["<s>"], ["</s>"]),
        ("<s> $A </s>", ["<s>"], ["</s>"]),
        ("[gMASK] <s> $A", ["[gMASK]", "<s>"], ["</s>"]),
        ("<s> $A [gMASK]", ["<s>"], ["[gMASK]", "</s>"]),
        ("</s> $A", ["</s>"], ["</s>"]),
    ],
)
@pytest.mark.parametrize("within", [False, True])
def test_documents_lie_between_the_tokens_of_the_post_processor(
    template: str, prefix: list[str], suffix: list[str], within: bool, file: Path, tmp_path: Path
) -> None:
    from tokenizers import Tokenizer, processors

    library = Tokenizer.from_file(str(changed(file, tmp_path, ["<s>", "</s>", "[gMASK]"]) / "tokenizer.json"))
    special = [(token, library.token_to_id(token)) for token in ("<s>", "</s>", "[gMASK]")]
    processor = processors.TemplateProcessing(template, special_tokens=special)
    library.post_processor = processors.Sequence([processors.ByteLevel(), processor]) if within else processor
    library.save(str(tmp_path / "tokenizer.json"))
    found = JsonTokenizer(tmp_path)
    ids = dict(special)
    assert found.prefix == tuple(ids[token] for token in prefix)
    assert found.suffix == tuple(ids[token] for token in suffix)
    assert JsonTokenizer(tmp_path, bos="[gMASK]").prefix == (ids["[gMASK]"],)
    assert JsonTokenizer(tmp_path, eos="[gMASK]").suffix == (ids["[gMASK]"],)
    piece = tokenize("x", [Document("x", b"the cat", b"x")], found)
    (text,) = found.encode([b"the cat"])
    assert piece.tokens.tolist() == [*found.prefix, *text, *found.suffix]

    def spell(tokens: Sequence[int]) -> bytes:
        return "".join(token for token in special_tokens if ids[token] in tokens).encode()

    special_tokens = ("[gMASK]", "<s>", "</s>")
    # As a chat template writes them: rows that were rendered before, and the prompts of `data.content=prompt`.
    written = spell(found.prefix) + b"the cat" + spell(found.suffix)
    assert tokenize("x", [Document("x", written, b"x")], found).tokens.tolist() == piece.tokens.tolist()
    prompt = Document("x", spell(found.prefix) + b"the cat", b"x", row=b"{}")
    assert tokenize("x", [prompt], found).tokens.tolist() == [*found.prefix, *text]


def test_a_post_processor_that_repeats_the_text_is_refused(file: Path, tmp_path: Path) -> None:
    sequence = {"Sequence": {"id": "A", "type_id": 0}}
    twice = {"type": "TemplateProcessing", "single": [sequence, sequence], "pair": [sequence], "special_tokens": {}}
    with pytest.raises(InputError, match="post-processor does more than to add tokens"):
        JsonTokenizer(write_changed(file, tmp_path, post_processor=twice))


@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
def test_an_eos_that_only_the_model_names(name: str, file: Path, tmp_path: Path) -> None:
    folder = changed(file, tmp_path, ["<|a|>", "<|b|>"])
    (folder / name).write_text(json.dumps({"eos_token_id": [501 - 229, 500 - 229]}))
    found = JsonTokenizer(folder)
    assert found.vocabulary["<|b|>"] == found.eos
    assert [*found.eos_ids] == [found.vocabulary[token] for token in ("<|b|>", "<|a|>")]


TOOL = {"content": "<tool>", "lstrip": True, "special": False}


@pytest.mark.parametrize(
    ("files", "special"),
    [
        ({"tokenizer_config": {"added_tokens_decoder": {"9": TOOL}}}, False),
        ({"tokenizer_config": {"added_tokens_decoder": {"9": TOOL}, "tool_token": "<tool>"}}, True),
        ({"tokenizer_config": {"additional_special_tokens": ["<tool>"]}}, True),
        ({"tokenizer_config": {"extra_special_tokens": {"tool_token": "<tool>"}}}, True),
        ({"tokenizer_config": {"extra_special_tokens": [{"__type": "AddedToken", **TOOL}]}}, False),
        ({"tokenizer_config": {"pad_token": "<tool>"}}, True),
        ({"added_tokens": {"<tool>": 7}}, False),
        ({"added_tokens": {"<tool>": 7}, "special_tokens_map": {"mask_token": "<tool>"}}, True),
        ({"special_tokens_map": {"mask_token": TOOL}}, True),
    ],
)
def test_a_token_that_only_another_file_names_is_one_token(
    files: dict[str, dict[str, object]], special: bool, file: Path, tmp_path: Path
) -> None:
    folder = write_changed(file, tmp_path)
    plain = JsonTokenizer(folder)
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    found = JsonTokenizer(folder)
    new = found.vocabulary["<tool>"]
    assert new == plain.vocabulary_size and "<tool>" not in plain.vocabulary
    assert ("<tool>" in found.special_tokens) == special
    (ids,) = found.encode([b"x <tool>y"])
    strips = "lstrip" in json.dumps(files)
    assert ids.tolist() == [*plain.encode([b"x" if strips else b"x "])[0], new, *plain.encode([b"y"])[0]]
    assert (found.decode([new]) == "") == special
    assert found.sha256 != plain.sha256


def test_the_hash_covers_what_the_ids_depend_on(file: Path, tmp_path: Path) -> None:
    folder = write_changed(file, tmp_path)

    def digest(**settings: object) -> str:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        return JsonTokenizer(folder).sha256

    end, llama = {"eos_token": "<|endoftext|>"}, {"0": {"content": "<x>"}}
    changes: list[dict[str, object]] = [
        {},
        {"split_special_tokens": True},
        {"added_tokens_decoder": llama},
        {"added_tokens_decoder": {"0": {"content": "<x>", "rstrip": True}}},
        {"tokenizer_class": "GPT2Tokenizer"},
        {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True},
        {"tokenizer_class": "Qwen2Tokenizer"},
    ]
    digests = [digest(**end, **change) for change in changes]
    assert len({*digests}) == len(changes)
    assert digest(**end, chat_template="x", model_max_length=9, padding_side="left") == digests[0]


def test_the_class_of_a_folder_replaces_the_pipeline_of_the_file(file: Path, tmp_path: Path) -> None:
    """Llama 2 with `legacy` adds a space after each special token, and without it only at the start."""
    alphabet = ["▁", "a", "b", "▁a", "</s>"]
    model = {"type": "BPE", "vocab": {token: i for i, token in enumerate(alphabet)}, "merges": [["▁", "a"]]}
    parts = {"pre_tokenizer": None, "post_processor": None, "decoder": None, "added_tokens": []}
    folder = write_changed(file, tmp_path, model=model, **parts)
    names = {"tokenizer_class": "LlamaTokenizerFast", "eos_token": "</s>"}

    def encode(note: str, **settings: object) -> list[int]:
        (folder / "tokenizer_config.json").write_text(json.dumps(names | settings))
        (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
        found = JsonTokenizer(folder)
        assert found.note == note
        return found.encode([b"a</s>a"])[0].tolist()

    note = "LlamaTokenizer of transformers 5 replaces the pre_tokenizer of tokenizer.json"
    assert encode(note) == [3, 4, 1]
    assert encode(note, legacy=True) == [3, 4, 3]
    assert encode(note, add_prefix_space=False) == [1, 4, 1]
    assert encode("", tokenizer_class="PreTrainedTokenizerFast") == [1, 4, 1]


VOCABULARY = {"vocab.json": "{}", "merges.txt": ""}


@pytest.mark.parametrize(
    ("files", "settings", "message"),
    [
        (
            {"tokenizer.model": ""},
            {},
            "tokenizer.model, but no tokenizer.json; convert it with python -c .*AutoTokenizer",
        ),
        ({"tekken.json": "{}"}, {}, "tekken.json, but no tokenizer.json; convert"),
        ({"qwen.tiktoken": ""}, {}, "qwen.tiktoken, but no tokenizer.json; convert"),
        (VOCABULARY, {}, "vocab.json, but no tokenizer.json; convert"),
        (VOCABULARY | {"tokenizer.model": ""}, {"tokenizer_class": "GPT2Tokenizer"}, "tokenizer.model and vocab.json"),
        (None, {"tokenizer_class": "T5TokenizerFast"}, "the class T5Tokenizer of transformers builds"),
        (None, {"tokenizer_class": "XTokenizer", "auto_map": {"AutoTokenizer": ["x.X", None]}}, "XTokenizer is code"),
        (None, {"fast_tokenizer_files": ["tokenizer.4.0.json"]}, "fast_tokenizer_files"),
        (None, {"fix_mistral_regex": True}, "fix_mistral_regex, which replaces the pre_tokenizer"),
        (None, {"added_tokens_decoder": {"x": "y"}}, "added_tokens_decoder is not an object of tokens by id"),
        (None, {"extra_special_tokens": [7]}, "7 is not a special token"),
        ({"added_tokens.json": '{"<x>": "1"}'}, None, "added_tokens.json: an id is not an integer"),
        (
            {"tokenizer.json": '{"model": {"vocab": []}}'},
            {"tokenizer_class": "LlamaTokenizer"},
            "needs a BPE with merges",
        ),
    ],
)
def test_a_folder_that_transformers_reads_otherwise_is_refused(
    files: dict[str, str] | None, settings: dict[str, object] | None, message: str, file: Path, tmp_path: Path
) -> None:
    if files is None or settings is None:
        write_changed(file, tmp_path)
    for name, content in (files or {}).items():
        (tmp_path / name).write_text(content)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings or {}))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError, match=f"(?s){message}") as raised:
        JsonTokenizer(tmp_path)
    assert "\n" not in str(raised.value)


def test_a_vocabulary_and_merges_are_a_tokenizer(file: Path, tmp_path: Path) -> None:
    model = json.loads(file.read_text())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = ["#version: 0.2", *(" ".join(merge) for merge in model["merges"])]
    (tmp_path / "merges.txt").write_text("\n".join(merges))
    end = "<|endoftext|>"
    for adds in (False, True):
        settings = {"tokenizer_class": "GPT2Tokenizer", "add_bos_token": adds}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        found, whole = JsonTokenizer(tmp_path), JsonTokenizer(file)
        assert found.prefix == ((found.vocabulary[end],) if adds else ())
        for ids, expected in zip(*(each.encode([t.encode() for t in TEXTS]) for each in (found, whole)), strict=True):
            assert ids.tolist() == expected.tolist()


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


def test_an_id_beyond_32_bits_is_one_line(file: Path, tmp_path: Path) -> None:
    model = json.loads(file.read_text())["model"]
    model["vocab"] = {token: index + 2**31 for token, index in model["vocab"].items()}
    tokenizer = JsonTokenizer(write_changed(file, tmp_path, model=model))
    with pytest.raises(InputError, match="the tokenizer failed .OverflowError: ") as raised:
        tokenizer.encode([b"the cat"])
    assert "\n" not in str(raised.value)


def test_a_panic_of_the_library_is_one_line(file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Its type, PanicException, is no Exception."""
    with pytest.raises(InputError, match="not a readable tokenizer.json .PanicException: ") as raised:
        JsonTokenizer(write_changed(file, tmp_path, normalizer={"type": "Precompiled", "precompiled_charsmap": "////"}))
    assert "\n" not in str(raised.value) and capfd.readouterr().err == ""
