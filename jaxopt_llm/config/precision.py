"""Settings of mixed precision: dtypes, quantised matmuls, and the loss scaling that float16 needs."""

from dataclasses import dataclass, replace
from typing import Literal, Protocol

from jaxopt_llm.config.metadata import AT_LEAST_ONE, NON_NEGATIVE, Section, setting

Float = Literal["float32", "bfloat16", "float16"]


Matmul = Literal["compute_dtype", "fp8", "int8", "int8_qat", "int4_qat"]


class Exactness(Protocol):
    """Interface to a parameter (ParamSpec of model/param.py), as far as this module reads it."""

    @property
    def exact(self) -> bool: ...


@dataclass(frozen=True)
class PrecisionConfig(Section, path="precision"):
    compute_dtype: Float = setting(
        "bfloat16", search=("float32", "bfloat16"), search_rank=3, price="none on GPUs, which are faster in 16 bits"
    )
    """Dtype of the activations and of the weights that multiply them; norms, softmax, loss and the master weights stay
    in float32, and optimizer.state_dtype sets the dtype of the moments. On GPUs,
    JAX multiplies float32 matrices in TF32 unless JAX_DEFAULT_MATMUL_PRECISION=highest is set in the environment.
    float16 has a loss scale, so that a resume cannot change to or from it."""
    reduce_dtype: Float = setting(
        "float32", search=("float32", "bfloat16"), search_rank=2, price="gradients are summed over devices in 16 bits"
    )
    """Dtype in which gradients are computed and summed over devices (PyTorch FSDP: reduce_dtype). Sums over
    microbatches are in float32."""
    initial_loss_scale: float = setting(65536.0, bounds=AT_LEAST_ONE)
    """With compute_dtype=float16, loss scale of the first step: the loss is multiplied by it, so that gradients stay
    within the range of float16; a step that still overflows is skipped and halves the scale (Micikevicius et al. 2018;
    PyTorch: GradScaler). A power of two adds no rounding error."""
    loss_scale_growth_interval: int = setting(2000, bounds=AT_LEAST_ONE)
    """Number of consecutive steps without overflow after which the loss scale doubles (GradScaler: growth_interval)."""
    matmul: Matmul = "compute_dtype"
    """Precision of the matmuls between activations and weights of the blocks, forward and backward; see
    docs/precision.md. fp8: e4m3, incoming gradients e5m2, one scale per tensor from its own maximum. int8: forward
    only, one scale per token and per output channel. int8_qat and int4_qat: compute_dtype, with weights rounded to
    codes (quantisation-aware training). Adapters are always multiplied in compute_dtype."""
    outlier_threshold: float = setting(0.0, bounds=NON_NEGATIVE)
    """With int8: columns of the inputs that hold a larger magnitude are multiplied in compute_dtype, all others as
    integers (LLM.int8(), whose authors use 6.0). 0 = none; see docs/precision.md."""
    compute_dtype_layers: int = setting(0, in_backward=0, bounds=NON_NEGATIVE)
    """Number of layers at the start of the model, and the same number at its end, whose matmuls stay in compute_dtype
    for every value of precision.matmul. The matmuls of embedding and head always do. 0 = none."""

    @property
    def scales_loss(self) -> bool:
        """True if the loss is multiplied by a scale, which float16 needs for the range of its gradients."""
        return self.compute_dtype == "float16"

    @property
    def quantises(self) -> bool:
        return self.matmul != "compute_dtype"

    def for_param(self, spec: Exactness) -> "PrecisionConfig":
        """Return the precision of one parameter and its gradient: float32 for an exact parameter."""
        return replace(self, compute_dtype="float32", reduce_dtype="float32") if spec.exact else self

    def for_evaluation(self) -> "PrecisionConfig":
        """Return the precision for evaluation and generation.

        fp8 and int8 only make training faster, so evaluation does not use them. The codes of quantisation-aware
        training are the trained model, so evaluation uses them.
        """
        if self.matmul not in ("fp8", "int8"):
            return self
        return replace(self, matmul="compute_dtype", outlier_threshold=0.0, compute_dtype_layers=0)

    def problems(self) -> list[str]:
        found = self.find_out_of_range()
        compute, reduced = self.compute_dtype, self.reduce_dtype
        if reduced not in ("float32", compute) and "float16" in (compute, reduced):
            # cuBLAS has no matmul with operands of one of these dtypes and a result of the other.
            found.append(
                f"precision.reduce_dtype={reduced} is not supported with precision.compute_dtype={compute}: set "
                "--precision.reduce-dtype float32"
            )
        if self.matmul == "fp8" and compute == "float16":
            # A scale is 1/448 of the largest value of a tensor, which can be outside the range of float16.
            found.append(
                "precision.matmul=fp8 does not support precision.compute_dtype=float16: set --precision.compute-dtype "
                "bfloat16"
            )
        if self.compute_dtype_layers and not self.quantises:
            found.append(
                f"precision.compute_dtype_layers={self.compute_dtype_layers} has no effect, because precision.matmul="
                f"{self.matmul} quantises none: set --precision.matmul, or --precision.compute-dtype-layers 0"
            )
        if self.outlier_threshold and self.matmul != "int8":
            found.append(
                f"precision.outlier_threshold={self.outlier_threshold} has no effect with precision.matmul="
                f"{self.matmul}: set --precision.matmul int8, or --precision.outlier-threshold 0"
            )
        for name in ("initial_loss_scale", "loss_scale_growth_interval"):
            value = getattr(self, name)
            if not self.scales_loss and value != getattr(PrecisionConfig, name):
                found.append(f"precision.{name}={value} has no effect without --precision.compute-dtype float16")
        return found
