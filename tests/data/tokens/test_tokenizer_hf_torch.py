"""The ids and the texts of AutoTokenizer of transformers, for small tokenizers in the shapes of published ones."""

import json
from pathlib import Path

import pytest
from tokenizer_shapes import SHAPES, texts

from jaxopt_llm.data.tokens import tokenizer_folder
from jaxopt_llm.data.tokens.tokenizer import JsonTokenizer

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("shape", SHAPES)
def test_documents_and_texts_are_those_of_transformers(shape: str, tmp_path: Path) -> None:
    folder = SHAPES[shape](tmp_path)
    expected, found = transformers.AutoTokenizer.from_pretrained(folder), JsonTokenizer(folder)
    contents = [text.encode() for text in texts()]
    whole = expected(texts())["input_ids"]
    prefix, suffix = list(found.prefix), list(found.suffix)
    if found.eos not in expected("")["input_ids"][len(prefix) :]:
        assert suffix.pop() == found.eos
    encoded = [ids.tolist() for ids in found.encode(contents)]
    for text, ids, wanted in zip(texts(), encoded, whole, strict=True):
        assert [*prefix, *ids, *suffix] == wanted, repr(text)
    assert [ids.tolist() for ids, _ in found.encode_with_offsets(contents)] == encoded
    bare = expected.batch_decode(encoded, skip_special_tokens=True)
    for ids, wanted in zip(encoded, bare, strict=True):
        assert found.decode(ids) == wanted
    assert found.vocabulary == expected.get_vocab()
    assert found.named_tokens == expected.special_tokens_map
    assert expected.eos_token_id == found.eos


TYPES = ("", "llama", "deepseek_v3", "falcon", "qwen2", "qwen3", "mistral", "phi3", "gemma2", "gpt2", "olmo2", "olmo")
NAMES = (None, "PreTrainedTokenizerFast", "LlamaTokenizerFast", "GPT2Tokenizer", "Qwen2TokenizerFast", "T5Tokenizer")


@pytest.mark.parametrize("model_type", TYPES)
def test_the_class_is_the_one_that_transformers_chooses(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = transformers.PreTrainedTokenizerBase
    monkeypatch.setattr(base, "from_pretrained", classmethod(lambda cls, *_, **__: cls.__name__))
    monkeypatch.setattr("builtins.input", lambda _: "n")  # the question whether code of the folder may run

    def choose(in_tokenizer: str | None, in_model: str | None, byte_level: bool, code: bool) -> tuple[object, object]:
        settings: dict[str, object] = {"tokenizer_class": in_tokenizer} if in_tokenizer else {}
        settings |= {"auto_map": {"AutoTokenizer": ["code.Tokenizer", None]}} if code else {}
        model = {"model_type": model_type} | ({"tokenizer_class": in_model} if in_model else {})
        for name, content in {"config": model if model_type else {}, "tokenizer_config": settings}.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(content))
        (tmp_path / "tokenizer.json").write_text('"ByteLevel"' if byte_level else "")
        try:
            wanted = transformers.AutoTokenizer.from_pretrained(tmp_path)
        except ValueError:  # it would need the code
            wanted = None
        return tokenizer_folder.choose_class(model if model_type else {}, settings, byte_level), wanted

    for name in NAMES:
        for byte_level in (False, True):
            for found, wanted in choose(name, None, byte_level, False), choose(None, name, byte_level, False):
                assert found == wanted, (name, byte_level)
        found, wanted = choose(name, None, False, True)
        assert found == wanted or (found, name) == (None, "T5Tokenizer"), (name, "code")  # either of them is refused


def test_the_classes_of_model_types_are_those_of_transformers() -> None:
    from transformers.models.auto import tokenization_auto as auto

    named = {kind: str(name).removesuffix("Fast") for kind, name in auto.TOKENIZER_MAPPING_NAMES.items()}
    ours = tokenizer_folder.REGISTERED
    both = ours.keys() & named.keys()  # other releases of transformers know other types
    assert len(both) > len(ours) / 2
    assert {kind: named[kind] for kind in both} == {kind: ours[kind] for kind in both}
    wrong = {
        kind for kind in auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS if ours.get(kind) in tokenizer_folder.CLASSES
    }
    assert wrong == tokenizer_folder.CORRECTED & named.keys()
