"""Random bits by index."""

import numpy as np
import pytest

from jaxopt_llm.core import hashing

pytestmark = pytest.mark.core


def test_every_element_of_an_array_has_its_own_bits() -> None:
    np.testing.assert_array_equal(hashing.linear_indices((3, 4, 5)), np.arange(60).reshape(3, 4, 5))
    bits = np.asarray(hashing.mix_bits(hashing.linear_indices((300, 400))))
    assert len(set(bits.ravel().tolist())) == bits.size
