"""Values with another head size than queries and keys, by XLA's operations and by a kernel of one size."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

from jaxopt_llm.kernels import attention_xla
from jaxopt_llm.kernels.attention import attend
from jaxopt_llm.kernels.attention_types import AttentionParameters, AttentionResiduals, make_document_ranges
from jaxopt_llm.kernels.attention_wrappers import Padded, common_size

pytestmark = pytest.mark.core


class OneSize:
    """Implementation that supports one head size only, like the kernels for GPUs."""

    reads_out = False

    def forward(self, parameters: AttentionParameters, q: Any, k: Any, v: Any, key_ranges: Any) -> Any:
        assert q.shape[-1] == k.shape[-1] == v.shape[-1] == 16
        return attention_xla.forward(parameters, q, k, v, key_ranges)

    def backward(self, parameters: AttentionParameters, residuals: AttentionResiduals, gradient: Any) -> Any:
        assert gradient.shape[-1] == 16
        return attention_xla.backward(parameters, residuals, gradient)


@pytest.mark.parametrize("implementation", [attention_xla, Padded(OneSize(), 16)], ids=["xla", "padded"])
@pytest.mark.parametrize(("head_dim", "value_dim"), [(12, 8), (6, 10)])
def test_output_and_gradients_match_the_reference(implementation: Any, head_dim: int, value_dim: int) -> None:
    random = np.random.default_rng(0)
    sizes = (4, head_dim), (2, head_dim), (2, value_dim), (4, value_dim)
    q, k, v, gradient = (random.normal(size=(2, 24, *size)).astype(np.float32) for size in sizes)
    segments = np.sort(random.integers(0, 3, (2, 24)), axis=1)
    parameters = AttentionParameters(0.4)

    def run(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return attend(implementation, parameters, q, k, v, make_document_ranges(jnp.asarray(segments)))

    out, back = jax.vjp(run, q, k, v)
    visible = (segments[:, :, None] == segments[:, None]) & np.tri(24, dtype=bool)
    wide = (np.asarray(each, np.float64) for each in (q, k, v))
    expected, expected_back = reference.attend(*wide, visible, parameters.scale)
    assert out.shape == (2, 24, 4, value_dim)
    for found, wanted in zip((out, *back(gradient)), (expected, *expected_back(gradient)), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


def test_the_common_size_is_one_that_kernels_support() -> None:
    sizes = {(192, 128): 256, (128, 128): 128, (96, 96): 96, (48, 40): 64, (128, 64): 128}
    assert {given: common_size(*given) for given in sizes} == sizes
