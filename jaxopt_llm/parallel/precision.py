"""The three dtypes of mixed precision. They ride on the placement: whether a 16-bit copy rests is ZeRO's business."""

from dataclasses import dataclass
from typing import Literal

Float = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class PrecisionConfig:
    param_dtype: Literal["float32"] = "float32"
    """dtype of the master parameters and of the optimizer's moments"""
    compute_dtype: Float = "bfloat16"
    """dtype of activations and of the weights that meet them; norms, softmax and loss stay in float32. On GPUs JAX
    multiplies float32 in TF32 unless JAX_DEFAULT_MATMUL_PRECISION=highest is set"""
    reduce_dtype: Float = "float32"
    """dtype in which gradients are formed and summed over devices; over microbatches they are summed in float32"""
