"""Bytes to ids and back."""

import numpy as np
import pytest

from jaxopt_llm.data.tokenizer import ByteTokenizer

tokenizer = ByteTokenizer()


def test_every_byte_is_its_own_id() -> None:
    ids = tokenizer.encode(bytes(range(256)))
    assert ids.dtype == np.int32
    assert ids.tolist() == list(range(256))


@pytest.mark.parametrize("text", ["", "def f(x):\n\treturn x\n", "naïve ∂L/∂w 🙂\0"])
def test_text_round_trip(text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode(tokenizer.encode(text.encode()).tolist()) == text


def test_special_ids_are_the_top_of_the_vocabulary_and_are_not_text() -> None:
    special = [tokenizer.beginning_of_document, tokenizer.end_of_document]
    assert special == [256, 257] and tokenizer.vocabulary_size == 258
    assert tokenizer.decode([special[0], 104, 105, special[1]]) == "hi"


def test_half_a_character_decodes_to_the_replacement_character() -> None:
    assert tokenizer.decode(tokenizer.encode("é")[:1]) == "\N{REPLACEMENT CHARACTER}"


def test_a_negative_id_is_an_error() -> None:
    with pytest.raises(ValueError):
        tokenizer.decode([-1])
