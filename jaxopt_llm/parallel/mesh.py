"""The device mesh: six named axes, of which those of size 1 are off."""

import math
import os
from collections.abc import Sequence
from dataclasses import astuple, dataclass

import jax
import numpy as np
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import AxisType, Mesh

from jaxopt_llm.errors import InputError

# Outermost first. `tensor` is innermost and so falls on the fastest links; `pipeline` moves least and crosses hosts
# first. XLA also wants `pipeline` first: a nested shard_map over later axes only is the form that it accepts.
AXES = ("pipeline", "data", "fsdp", "expert", "context", "tensor")
BATCH_AXES = ("data", "fsdp", "expert")  # the axes that the batch is split over


@dataclass(frozen=True)
class MeshConfig:
    pipeline: int = 1
    """devices along the pipeline's stages"""
    data: int = 1
    """devices that hold replicas: across nodes, with fsdp inside one, it is hybrid sharding"""
    fsdp: int = 1
    """devices that split the batch and, by sharding.zero_stage, the training state"""
    expert: int = 1
    """devices along the experts; of a dense model, which has none, one more axis like fsdp, over which gradients are
    reduced in every microbatch"""
    context: int = 1
    """devices along the sequence"""
    tensor: int = 1
    """devices along heads, MLP width and vocabulary"""

    @property
    def devices(self) -> int:
        return math.prod(astuple(self))

    @property
    def batch_shards(self) -> int:
        """Into how many parts the rows of a microbatch are split."""
        return math.prod(getattr(self, axis) for axis in BATCH_AXES)


# Of XLA's on CPUs, for each device; its own choice is one for each device or core. A collective holds one while it
# waits for the other devices, and a device can wait in several at once: a stage of a pipeline in its neighbours'
# permutes and in its tensor group's sums. Where all threads wait, and what they wait for has none to run on, XLA ends
# the process after 40 s.
CPU_THREADS = 8


def simulate_cpu_devices(count: int, processes: int = 1) -> None:
    """Lets the CPU pose as so many devices in this process. Must run before JAX touches a backend."""
    jax.config.update("jax_num_cpu_devices", count)
    if count * processes > 1:
        os.environ["PJRT_NPROC"] = str(CPU_THREADS * count)


def visible_devices() -> list[jax.Device]:
    """Those of the default backend. Raises InputError where JAX can open none."""
    try:
        devices = jax.devices()
    except (RuntimeError, AssertionError) as error:  # the latter for JAX_PLATFORMS=cuda without a GPU
        raise InputError(f"no device to run on ({error}); see JAX_PLATFORMS and the GPU's driver") from error
    if devices[0].platform == "cpu" and len(devices) > 1:
        restore_no_programs()
    return devices


def restore_no_programs() -> None:
    """Turn JAX's cache of compiled programs off, because XLA restores those for several CPU devices wrongly.

    All collectives of a program that was compiled are ordered by one resource. When the program is restored, every loop
    gets a resource of its own, so that two devices can begin the collectives of two loops in different orders and wait
    for each other for ever (openxla/xla, xla/backends/cpu/runtime/thunk_proto_serdes.cc).
    """
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # JAX looks at the setting once


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh over exactly these devices (default: all of this job's).

    Raises InputError where their number is not the mesh's: JAX itself would use some and leave the rest idle.
    """
    devices = visible_devices() if devices is None else devices
    if len(devices) != config.devices:
        sizes = " × ".join(f"{axis} {getattr(config, axis)}" for axis in AXES if getattr(config, axis) > 1) or "all 1"
        raise InputError(
            f"mesh: {sizes} needs {config.devices} device(s) but {len(devices)} {devices[0].platform} device(s) are "
            f"visible; change --mesh.* so that the product is {len(devices)}, or limit the visible devices"
        )
    return Mesh(np.array(devices).reshape(astuple(config)), AXES, axis_types=(AxisType.Auto,) * len(AXES))
