"""The three dtypes of mixed precision. They ride on the placement: whether a 16-bit copy rests is ZeRO's business."""

from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp

Float = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class PrecisionConfig:
    param_dtype: Literal["float32"] = "float32"
    """dtype of the master parameters and of the optimizer's moments"""
    compute_dtype: Float = "bfloat16"
    """dtype of activations and of the weights that meet them; norms, softmax and loss stay in float32"""
    reduce_dtype: Float = "float32"
    """dtype in which gradients are summed over devices; with a 16-bit compute copy at rest (ZeRO stages 1 and 2) each
    microbatch's gradient is a 16-bit value, as its parameter is"""

    @property
    def mixed(self) -> bool:
        return jnp.dtype(self.compute_dtype) != jnp.dtype(self.param_dtype)
