"""FLOPs of convolutions, read off programs compiled for a GPU and for the CPU."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from jaxopt_llm.compiler.hlo import count_convolution_flops
from jaxopt_llm.compiler.topology import gpu_topology

pytestmark = pytest.mark.core

ROWS, SIZE, INPUTS, OUTPUTS = 4, 16, 8, 32


def convolve(image: jax.Array, kernel: jax.Array, **options: Any) -> jax.Array:
    dimensions = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(image, kernel, padding="SAME", dimension_numbers=dimensions, **options)


def loss(image: jax.Array, kernel: jax.Array, **options: Any) -> jax.Array:
    return jnp.sum(convolve(image, kernel, **options).astype(jnp.float32) ** 2)


def compile_text(function: Callable[..., Any], device: jax.Device, channels: int, window: int = 3) -> str:
    place = SingleDeviceSharding(device)
    image = jax.ShapeDtypeStruct((ROWS, SIZE, SIZE, INPUTS), jnp.bfloat16, sharding=place)
    kernel = jax.ShapeDtypeStruct((window, window, channels, OUTPUTS), jnp.bfloat16, sharding=place)
    return str(jax.jit(function).lower(image, kernel).compile().as_text())


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize(("groups", "stride"), [(1, 1), (1, 2), (INPUTS, 1)])
def test_each_output_is_a_sum_over_window_and_channels(platform: str, groups: int, stride: int) -> None:
    device = gpu_topology("h200")[0] if platform == "gpu" else jax.devices()[0]
    channels, outputs = INPUTS // groups, ROWS * (SIZE // stride) ** 2 * OUTPUTS

    def forward(image: jax.Array, kernel: jax.Array) -> jax.Array:
        return convolve(image, kernel, window_strides=(stride, stride), feature_group_count=groups)

    found = count_convolution_flops(compile_text(forward, device, channels))
    assert sum(found.values()) == 2 * outputs * 3 * 3 * channels


def test_both_backwards_have_the_products_of_the_forward() -> None:
    """The forward and the gradients by the kernel and by the image, each a call of cuDNN."""

    def gradients(image: jax.Array, kernel: jax.Array) -> Any:
        return jax.value_and_grad(loss, argnums=(0, 1))(image, kernel, window_strides=(1, 1))

    text = compile_text(gradients, gpu_topology("h200")[0], INPUTS)
    assert text.count('custom_call_target="__cudnn$conv') == 3
    products = ROWS * SIZE**2 * OUTPUTS * 3 * 3 * INPUTS
    assert count_convolution_flops(text) == {"bf16": 3 * 2 * products}
