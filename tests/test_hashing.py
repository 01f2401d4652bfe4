"""Random bits by place."""

import numpy as np
import pytest

from jaxopt_llm import hashing

pytestmark = pytest.mark.core


def test_every_place_of_an_array_has_bits_of_its_own() -> None:
    np.testing.assert_array_equal(hashing.places((3, 4, 5)), np.arange(60).reshape(3, 4, 5))
    bits = np.asarray(hashing.mix(hashing.places((300, 400))))
    assert len(set(bits.ravel().tolist())) == bits.size
