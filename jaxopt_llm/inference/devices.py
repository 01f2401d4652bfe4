"""Choice of the devices for a model that is used without training, and of what runs on them."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxopt_llm.compiler.kernel_choice import choose_grouped_matmul
from jaxopt_llm.config import Config, MeshConfig, OffloadConfig, PrecisionConfig, ShardingConfig
from jaxopt_llm.core import tree
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.parallel.mesh import make_mesh, visible_devices
from jaxopt_llm.parallel.placement import Placement
from jaxopt_llm.step.validation import tensor_problems


def check_tensor(tensor: int, config: Config) -> None:
    """Raise InputError if the weights of the model cannot be split over this number of devices."""
    count = len(visible_devices())
    valid = [n for n in range(1, count + 1) if not count % n and not tensor_problems(config.model, 1, False, n)]
    if tensor not in valid:
        raise InputError(
            f"--tensor {tensor}: must divide the number of devices ({count}) and the model's heads and MLP width; "
            f"choose one of {', '.join(map(str, valid))}"
        )


def choose_local_grouped_matmul(precision: PrecisionConfig) -> str:
    """Return the grouped matmul implementation for this machine, independent of the run's choice."""
    return choose_grouped_matmul(visible_devices()[0], "auto", precision.compute_dtype)


def make_placement(needed: int, precision: PrecisionConfig, tensor: int = 1) -> Placement:
    """Return a placement for `needed` bytes of parameters that are used without training."""
    devices = visible_devices()
    limit = (devices[0].memory_stats() or {}).get("bytes_limit")
    chosen = choose_devices(needed, devices, limit, tensor)
    return Placement(
        make_mesh(MeshConfig(fsdp=len(chosen) // tensor, tensor=tensor), chosen),
        ShardingConfig(zero_stage=3),
        precision,
        OffloadConfig(parameters=not fits_in_memory(needed, chosen, limit)),
    )


def choose_devices(
    needed: int, devices: Sequence[jax.Device], limit: int | None, tensor: int = 1
) -> Sequence[jax.Device]:
    """Return the first `tensor` devices if `needed` bytes of parameters fit there; otherwise all devices."""
    return devices[:tensor] if fits_in_memory(needed, devices[:tensor], limit) else devices


def fits_in_memory(needed: int, devices: Sequence[jax.Device], limit: int | None) -> bool:
    """Return whether `needed` bytes of parameters, split over devices, leave a quarter of their memory free.

    limit: memory of one device in bytes; None if the device has no limit. The free quarter is for activations and the
        cache.
    """
    return limit is None or needed <= 0.75 * limit * len(devices)


def count_bytes(leaves: tree.Tree, dtype: str | None = None) -> int:
    """Return the number of bytes of specs, in `dtype` or in their own dtypes."""
    return sum(math.prod(leaf.shape) * jnp.dtype(dtype or leaf.dtype).itemsize for leaf in jax.tree.leaves(leaves))
