"""Codes of the messages between groups and outer server, against those of the collectives."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxopt_llm.outer import codes
from jaxopt_llm.outer.codes import Layout
from jaxopt_llm.parallel import blocks

LAYOUT = Layout(((5, 0), (6 * 64, 64), (3, 0), (2 * 128, 128)))


@pytest.mark.core
@pytest.mark.parametrize(("form", "bits"), [("int8", 8), ("int4", 4)])
@pytest.mark.parametrize("chunk", [128, 2**22])
def test_the_codes_are_those_of_the_collectives(
    form: str, bits: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codes, "_CHUNK", chunk)
    vector = np.random.default_rng(0).standard_normal(LAYOUT.size).astype(np.float32)
    vector[5 : 5 + 64] = 0  # a block of zeros
    vector[5 + 64] = np.inf
    data = LAYOUT.encode(vector, form)
    assert data.size == LAYOUT.count_bytes(form)
    decoded = LAYOUT.decode(data, form)
    np.testing.assert_array_equal(decoded[:5], vector[:5])
    np.testing.assert_array_equal(decoded[389:392], vector[389:392])
    for part, values in ((slice(5, 389), 64), (slice(392, 648), 128)):
        by_jax = blocks.decode(*blocks.encode(jnp.asarray(vector[part]), values, bits), bits)
        np.testing.assert_allclose(decoded[part], by_jax, rtol=3e-7)  # XLA may multiply by 1/7
    assert np.isnan(decoded[5 + 64 : 5 + 128]).all() and not decoded[5 : 5 + 64].any()


def test_exact_vectors_are_float32() -> None:
    vector = np.random.default_rng(0).standard_normal(LAYOUT.size).astype(np.float32)
    data = LAYOUT.encode(vector, "exact")
    assert data.size == 4 * LAYOUT.size == LAYOUT.count_bytes("exact")
    np.testing.assert_array_equal(LAYOUT.decode(data, "exact"), vector)


def test_bfloat16_rounds_as_jax_does() -> None:
    vector = np.random.default_rng(0).standard_normal(LAYOUT.size).astype(np.float32)
    vector[:5] = np.inf, -np.inf, np.nan, 3.4e38, 1 + 2.0**-8  # a tie
    data = LAYOUT.encode(vector, "bfloat16")
    assert data.size == 2 * LAYOUT.size == LAYOUT.count_bytes("bfloat16")
    expected = np.asarray(jnp.asarray(vector).astype(jnp.bfloat16).astype(jnp.float32))
    np.testing.assert_array_equal(LAYOUT.decode(data, "bfloat16"), expected)


@pytest.mark.parametrize(
    "segments",
    [None, {}, [[3]], [[3, 0.0]], [[-1, 0]], [[0, 0]], [[100, 64]], [[64, 16]], [["64", 64]], [[True, 0]], [3]],
)
def test_what_is_no_layout_is_refused(segments: object) -> None:
    with pytest.raises(ValueError, match="not a layout"):
        Layout.parse(segments)
