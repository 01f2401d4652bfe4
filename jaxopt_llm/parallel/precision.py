"""The dtypes of mixed precision, and the loss scaling that float16 wants. They ride on the placement: whether a 16-bit
copy rests is ZeRO's business."""

from dataclasses import dataclass, replace
from typing import Literal, Protocol

Float = Literal["float32", "bfloat16", "float16"]
Matmul = Literal["compute_dtype", "fp8", "int8", "int8_qat", "int4_qat"]


class Exactness(Protocol):
    """What is read here of a parameter (model/param.py's ParamSpec)."""

    @property
    def exact(self) -> bool: ...


@dataclass(frozen=True)
class PrecisionConfig:
    param_dtype: Literal["float32"] = "float32"
    """dtype of the master parameters; optimizer.state_dtype is that of the moments"""
    compute_dtype: Float = "bfloat16"
    """dtype of activations and of the weights that meet them; norms, softmax and loss stay in float32. On GPUs JAX
    multiplies float32 in TF32 unless JAX_DEFAULT_MATMUL_PRECISION=highest is set"""
    reduce_dtype: Float = "float32"
    """dtype in which gradients are formed and summed over devices; over microbatches they are summed in float32"""
    loss_scaling: Literal["none", "dynamic"] = "none"
    """dynamic, for float16: the loss is multiplied by a scale that holds gradients within float16's range; a step that
    overflows all the same is skipped and halves it (see training/loss_scale.py)"""
    initial_loss_scale: float = 65536.0
    """factor on the loss in the first step; a power of two rounds nothing"""
    loss_scale_growth_interval: int = 2000
    """steps in a row without an overflow that double the loss scale"""
    min_loss_scale: float = 1.0
    """factor on the loss; a scale that overflows have brought below it ends the run, with exit code 3"""
    matmul: Matmul = "compute_dtype"
    """in what the products of the blocks with their weights are formed, forward and backward. fp8: e4m3, incoming
    gradients e5m2, one scale per tensor of its own maximum; int8: forward alone, one scale per token and per output
    channel; int8_qat and int4_qat: in compute_dtype, of weights rounded to codes. See docs/precision.md"""
    compute_dtype_layers: int = 0
    """layers at the model's start, and as many at its end, whose products stay in compute_dtype whatever matmul says;
    embedding and head always do"""

    @property
    def scales_loss(self) -> bool:
        return self.loss_scaling == "dynamic"

    @property
    def quantises(self) -> bool:
        return self.matmul != "compute_dtype"

    def of(self, spec: Exactness) -> "PrecisionConfig":
        """What one parameter and its gradient are in."""
        return replace(self, compute_dtype="float32", reduce_dtype="float32") if spec.exact else self

    def for_evaluation(self) -> "PrecisionConfig":
        """What measures and uses the weights: fp8 and int8 make training faster, the codes of quantisation-aware
        training are what is trained."""
        faster_alone = self.matmul in ("fp8", "int8")
        return replace(self, matmul="compute_dtype", compute_dtype_layers=0) if faster_alone else self

    def problems(self) -> list[str]:
        found = []
        if self.reduce_dtype not in ("float32", self.compute_dtype) and "float16" in (
            self.compute_dtype,
            self.reduce_dtype,
        ):
            # No product of cuBLAS has operands of the one and a result of the other.
            found.append(
                f"precision.reduce_dtype={self.reduce_dtype} does not go with "
                f"precision.compute_dtype={self.compute_dtype}: set --precision.reduce-dtype float32"
            )
        if self.matmul == "fp8" and self.compute_dtype == "float16":
            # A scale is the 448th of a tensor's largest value: float16 has not its range.
            found.append(
                "precision.matmul=fp8 does not go with precision.compute_dtype=float16: set --precision.compute-dtype "
                "bfloat16"
            )
        if self.compute_dtype_layers < 0:
            found.append(f"precision.compute_dtype_layers={self.compute_dtype_layers}: must be at least 0")
        if self.compute_dtype_layers and not self.quantises:
            found.append(
                f"precision.compute_dtype_layers={self.compute_dtype_layers} exempts layers from precision.matmul, "
                "which quantises none: set that, or this to 0"
            )
        if self.scales_loss and self.compute_dtype != "float16":
            found.append(
                "precision.loss_scaling=dynamic does nothing for the range of bfloat16 and float32: set "
                "--precision.loss-scaling none, or --precision.compute-dtype float16"
            )
        for name in ("initial_loss_scale", "loss_scale_growth_interval", "min_loss_scale"):
            value = getattr(self, name)
            if not self.scales_loss and value != getattr(PrecisionConfig, name):
                found.append(f"precision.{name}={value} wants --precision.loss-scaling dynamic")
            if value <= 0:
                found.append(f"precision.{name}={value}: must be above 0")
        if self.initial_loss_scale < self.min_loss_scale:
            found.append(
                f"precision.initial_loss_scale={self.initial_loss_scale} is below "
                f"precision.min_loss_scale={self.min_loss_scale}"
            )
        return found
