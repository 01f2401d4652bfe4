"""The device mesh: six named axes, of which those of size 1 are off."""

import math
import os
from collections.abc import Sequence
from dataclasses import astuple, dataclass

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from jaxopt_llm.errors import InputError
from jaxopt_llm.parallel.precision import Matmul

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
    """devices along the experts; of a dense model, which has none, one more axis like fsdp"""
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


# What lets GPUs compute while they exchange. Collectives are scheduled around computation by their estimated time (XLA
# 0.10.2 does so on several GPUs unasked); reductions of gradients are spread over layers unasked, and double buffering
# of loops doubles the program for nothing.
SCHEDULED: dict[str, str | bool | int] = {"xla_gpu_enable_latency_hiding_scheduler": True}
# A layer's weights are gathered while the layer before computes, for one layer's gathered weights more and, seen in
# XLA 0.10.2, constants of attention's masks that it then keeps (10B, 4 rows a GPU: 2.9 GiB). XLA does it to every loop:
# of one over microbatches it would keep copies of gradients (10B, 4 microbatches: 27.2 -> 35.7 GiB), and under sequence
# parallelism it sums over `tensor` once more what nobody reads. From jax 0.11 on the option has another name
# (xla_gpu_pipeline_all_gather) and harms: the backward's gathers all come after its last product (10B, 8 GPUs: 48% of
# the gathered bytes move beside products). Without it 77% do, all but those of the attention's own weights.
GATHERED_AHEAD: dict[str, str | bool | int] = (
    {"xla_gpu_enable_pipelined_all_gather": True} if jax.__version_info__ < (0, 11) else {}
)
# Of a ring keys, values and the gradients of both are sent at once: by its own choice XLA has one collective at a time
# beside computation, and waits for the others.
AT_ONCE: dict[str, str | bool | int] = {"xla_gpu_experimental_parallel_collective_overlap_limit": 4}
# Passes of XLA's that make programs compute something else, and say nothing:
# - What is gathered and sliced again becomes a permute; devices whose slice is their own are left out of it, and get
#   zeros (seen in 0.10.2: gradients between the stages of a pipeline). Without it there is the gather.
# - What a loop that counts down slices out of host memory jax 0.10.2 copies from the wrong end (openxla/xla#46231): a
#   backward would find the activations, or the weights, of other layers. Without it the slice is a kernel's, which
#   reads the right ones; 0.11.2 copies them as it should.
WRONG_PASSES = ["all-gather-to-collective-permute-simplifier"] + (
    ["dynamic-slice-annotator"] if jax.__version_info__ < (0, 11, 2) else []
)
CORRECT: dict[str, str | bool | int] = {"xla_disable_hlo_passes": ",".join(WRONG_PASSES)}

# Triton's matmuls come first where they are on, with operands widened to 16 bits; only of what they leave does XLA make
# cuBLASLt's calls in fp8.
CUBLAS: dict[str, str | bool | int] = {"xla_gpu_enable_triton_gemm": False}


def compiler_options(
    mesh: Mesh | AbstractMesh, microbatches: int, matmul: Matmul = "compute_dtype"
) -> dict[str, str | bool | int]:
    """For programs over the mesh, with so many microbatches and products formed so (see PrecisionConfig). On CPUs XLA
    aborts on 16-bit sums over devices in a region that is manual over `pipeline` alone, in the pass that would widen
    them."""
    if not isinstance(mesh, Mesh):
        return {}
    stages = mesh.shape["pipeline"]
    if mesh.devices.flat[0].platform == "cpu":
        return {"xla_disable_hlo_passes": "all-reduce-promotion"} if stages > 1 else {}
    products = CUBLAS if matmul == "fp8" else {}
    if mesh.size == 1:
        return CORRECT | products
    ahead = GATHERED_AHEAD if gathers_ahead(mesh, microbatches) else {}
    return CORRECT | products | SCHEDULED | ahead | (AT_ONCE if mesh.shape["context"] > 1 else {})


def gathers_ahead(mesh: Mesh | AbstractMesh, microbatches: int) -> bool:
    """Whether GPUs are told to gather a layer's weights while another computes: not in a loop over microbatches, nor
    under `tensor`."""
    return bool(GATHERED_AHEAD) and microbatches * mesh.shape["pipeline"] * mesh.shape["tensor"] == 1


def visible_devices() -> list[jax.Device]:
    """Those of the default backend. Raises InputError where JAX can open none."""
    try:
        return jax.devices()
    except (RuntimeError, AssertionError) as error:  # the latter for JAX_PLATFORMS=cuda without a GPU
        raise InputError(f"no device to run on ({error}); see JAX_PLATFORMS and the GPU's driver") from error


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
