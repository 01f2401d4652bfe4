"""The ids and the texts of AutoTokenizer of transformers, for small tokenizers in the shapes of published ones."""

from pathlib import Path

import pytest
from tokenizer_shapes import SHAPES, texts

from jaxopt_llm.data import tokenizer_classes
from jaxopt_llm.data.tokenizer import JsonTokenizer

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
