"""Choice of kernels for a device, and checks that the device supports the configured ones.

A device can be real or one of a topology of the same kind: both give the same result.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from jaxopt_llm.config import Matmul
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.kernels import grouped_matmul_pallas
from jaxopt_llm.kernels.attention import find_unsupported, get_compute_capability
from jaxopt_llm.kernels.attention_auto import AttentionCall, AttentionChoice, choose_fastest

FLOAT8_CAPABILITY = (8, 9)


def check_matmul(device: Any, matmul: Matmul) -> None:
    """Raise InputError for fp8 on a GPU without fp8 tensor cores.

    Such a GPU would multiply in 16 bits: fp8 would only cost accuracy. CPUs emulate fp8.
    """
    capability = get_compute_capability(device)
    if matmul == "fp8" and capability is not None and capability < FLOAT8_CAPABILITY:
        raise InputError(
            f"precision.matmul=fp8: {device.device_kind} has no fp8 tensor cores (H100, H200, B200 and other GPUs of "
            "compute capability 8.9 and above have them); set --precision.matmul int8, or compute_dtype with "
            "--precision.compute-dtype bfloat16"
        )


def choose_attention(
    device: Any, requested: str, call: AttentionCall, excluded: Mapping[str, str] = MappingProxyType({})
) -> AttentionChoice:
    """Return the requested implementation of attention, or the fastest one for "auto".

    Args:
        requested: value of training.attention.
        excluded: further implementations that cannot be used, with the reasons.

    Raises:
        InputError: the requested implementation does not support the device or the call.
    """
    capability = get_compute_capability(device)
    problems = find_unsupported(call, capability)
    for name, reason in excluded.items():
        problems[name].append(reason)
    if requested == "auto":
        return choose_fastest(call, capability, problems)
    supported = " or ".join(name for name, found in problems.items() if not found)
    remedy = f"set --training.attention auto or {supported}"
    if problems[requested] and capability is None:
        raise InputError(f"training.attention={requested} runs on GPUs only, not on {device.device_kind}; {remedy}")
    if problems[requested]:
        raise InputError(f"training.attention={requested}: {'; '.join(problems[requested])}; {remedy}")
    return AttentionChoice(requested)


def choose_grouped_matmul(device: Any, requested: str, dtype: str) -> str:
    """Return the requested implementation of the experts' matmuls. "auto" is the kernel if it is supported.

    Args:
        requested: value of training.grouped_matmul.

    Raises:
        InputError: the requested implementation does not support the device or the dtype.
    """
    capability = get_compute_capability(device)
    if capability is None:
        found = [f"it runs on GPUs only, not on {device.device_kind}"]
    else:
        found = grouped_matmul_pallas.problems(dtype, capability)
    if requested == "auto":
        return "xla" if found else "pallas"
    if requested == "pallas" and found:
        raise InputError(f"training.grouped_matmul=pallas: {'; '.join(found)}; set --training.grouped-matmul auto")
    return requested
