"""Options of XLA's compiler for training programs by jax version, with their benefits and costs.

The options are compiler options of `jax.jit`, which reports an unknown name as an error. In XLA_FLAGS an unknown name
ends the process. Options of the user are added last.

Options that were tried and are not set. The program was 4 layers of 10B compiled for 8 H200s (jax 0.10.2 and 0.11.2),
in which all but 1% of the gathered and reduced bytes overlap with other kernels:
- Combining collectives up to 1 GiB: 0.5 GiB more memory; with 0.11.2, 44% of the gathers and 77% of the reductions are
  then exposed.
- Pipelined all-reduce: 1.6 GiB more memory.
- Double buffering of loops: twice the program for the same overlap.
Two options cannot be judged from a compiled program, only on a GPU: command buffers, which are on by default, and the
choice between Triton and cuBLAS, which XLA makes by timing.
"""

from collections.abc import Mapping
from typing import Literal

import jax
import jax.numpy as jnp
from jax.errors import JaxRuntimeError
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxopt_llm.compiler.topology import without_cache
from jaxopt_llm.config import Matmul, XlaConfig
from jaxopt_llm.config.run import Options
from jaxopt_llm.core.errors import InputError

NO_USER_OPTIONS = XlaConfig()
Recomputed = Literal["nothing", "a part", "layers"]  # what the backward computes again of each layer

# Overlap of communication and computation on GPUs: XLA schedules collectives around computation by their estimated
# time. XLA 0.10.2 does this by default on several GPUs. In 0.11.2, without the option, a quarter of the gathers and
# three quarters of the reductions are exposed.
LATENCY_HIDING: Options = {"xla_gpu_enable_latency_hiding_scheduler": True}
# Gather the weights of a layer while the previous layer computes. Cost: one more layer of gathered weights and, seen in
# XLA 0.10.2, constants for the attention masks, which XLA then keeps (10B, 4 rows per GPU: 2.9 GiB).
# XLA applies this to every loop and every gather:
# - A loop over microbatches would keep copies of gradients (10B, 4 microbatches: 27.2 -> 35.7 GiB).
# - Under sequence parallelism, XLA adds one more sum over `tensor` that nothing reads.
# - With experts, a backward that runs a layer again also exchanges the tokens again. To exchange them early, it would
#   run all of attention once more.
# From jax 0.11 on the option has another name (xla_gpu_pipeline_all_gather) and is harmful: all gathers of the backward
# come after its last matmul (10B, 8 GPUs: 48% of the gathered bytes overlap with matmuls). Without it 77% overlap, all
# except the gathers of the attention weights.
PIPELINED_ALL_GATHER: Options = {"xla_gpu_enable_pipelined_all_gather": True} if jax.__version_info__ < (0, 11) else {}
# By default XLA starts a collective only when the one before has ended. A ring sends keys, values and the gradients of
# both at the same time; experts exchange tokens and their counts at the same time. Under ZeRO-3, the gather of the
# queries' weights takes the whole backward of attention by XLA's schedule, and the reductions that could run next to it
# wait. Between pipeline stages, the permutes are exposed without it (70B on 128 H100s: 1.8 of 46.3 s). It needs no more
# memory. Exposed time of 8B, without and with it:
# - 8 H100s: remat none 19 and 10 ms, save_qkv 27 and 14 ms, but full 26 and 61 ms.
# - 64 H100s: remat none 43 and 28 ms, full 53 and 30 ms.
# - 8 H100s with jax 0.10.2, remat none: 25 and 66 ms.
PARALLEL_COLLECTIVES: Options = {"xla_gpu_experimental_parallel_collective_overlap_limit": 4}
# XLA takes the matmuls of gradients for up to 64 times as long as they are, so that a late start of a reduction seems
# to suffice. In a backward that computes matmuls again it puts the gradients' matmuls last, and nothing is left to hide
# the reductions. With this option a collective starts as soon as its operands exist. Seconds of a step over several
# hosts, by the roofline of `plan`, without and with it:
# - 70B on 128 H100s, save_attention, 2 microbatches: 26.51 and 25.58 (1.18 and 0.25 exposed).
# - 8B on 64 H100s, save_attention, 4 microbatches: 6.79 and 6.70.
# - 8B on 64 H100s, save_attention, without microbatches: 1.68 and 1.72.
# - 8B on 64 H100s, remat none: 1.49 and 1.54; in 4 microbatches 5.96 and 6.00.
# So it is set for sums over microbatches with recomputation only.
# It is not set where other axes exchange activations, which was not compared over several hosts. On one host 8B and 10B
# are 3% slower with it, Qwen3 1.7% and Mixtral 0.5%; DeepSeek-V2-Lite is 2.5% faster, and 8B at 128k 0.8%.
EARLY_COLLECTIVES: Options = {"xla_gpu_experimental_collective_start_as_early_as_possible": True}
KNOWS_EARLY_COLLECTIVES = jax.__version_info__ >= (0, 11, 2)
# XLA combines small reductions, up to 30 MB of what a device keeps. The more devices, the larger are the arrays: on 64
# GPUs all gradients of an 8B layer are one reduction, which begins after the last of them and is exposed. With a limit
# for the whole array, only norms, keys and values are combined (share of the time of collectives that is exposed, with
# PARALLEL_COLLECTIVES, remat none: 8B on 8 H100s 14% -> 7%, on 64 H100s 58% -> 15%). With jax 0.10.2, 8 GPUs are slower
# with it (25 -> 47 ms exposed).
REDUCED_TOGETHER = 64 * 2**20  # bytes
REDUCE_SCATTER_THRESHOLD = "xla_gpu_reduce_scatter_combine_threshold_bytes"
SCHEDULES_WELL = jax.__version_info__ >= (0, 11)  # with the two options above
# XLA passes that change the result of a program without an error:
# - all-gather-to-collective-permute-simplifier replaces a gather that is sliced again with a permute. It leaves out
#   devices that keep their own slice, and these devices get zeros (seen in 0.10.2: gradients between the stages of a
#   pipeline). Without the pass the gather stays.
# - dynamic-slice-annotator: if a loop counts down and slices an array in host memory, jax 0.10.2 copies from the wrong
#   end (openxla/xla#46231). A backward would get the activations, or the weights, of other layers. Without the pass a
#   kernel slices, and it reads the right ones. 0.11.2 copies them correctly.
WRONG_PASSES = ["all-gather-to-collective-permute-simplifier"] + (
    ["dynamic-slice-annotator"] if jax.__version_info__ < (0, 11, 2) else []
)
DISABLE_PASSES = "xla_disable_hlo_passes"
NO_WRONG_PASSES: Options = {DISABLE_PASSES: ",".join(WRONG_PASSES)}
# If Triton's matmuls are enabled, XLA uses them first, with operands widened to 16 bits. It calls cuBLASLt in fp8 only
# for the remaining matmuls.
# With adapters, cuBLAS adds the product of an adapter to the product of its base (beta = 1); Triton's matmuls need a
# kernel for the sum (8B on one H200, rank 16: 8 ms less of a roofline of 554 ms).
NO_TRITON_MATMULS: Options = {"xla_gpu_enable_triton_gemm": False}
# XLA joins products of one input, such as queries, keys and values, if one of them is small. It does so before it looks
# for fp8, and multiplies the joined codes in 16 bits (8B on one H200: 26.4 of the 343 TFLOP of the blocks).
NO_JOINED_MATMULS: Options = {"xla_gpu_dot_merger_threshold_mb": 0}
# XLA 0.11.2 lets cuBLAS matmuls and jax-triton kernels write directly into the stack of residuals for the backward. It
# runs such a matmul or kernel twice if something else also reads its result (8B on one H200, remat none: 518 TFLOP
# instead of 448; with our Triton kernel, also the forward of attention). This option avoids the second run. Its price:
# 62% of the gathered bytes overlap with matmuls instead of 81% (10B on 8 GPUs, remat none; with remat full, 84% instead
# of 79%).
NO_DYNAMIC_SLICE_FUSION: Options = (
    {"xla_gpu_enable_dynamic_slice_fusion": False} if jax.__version_info__ >= (0, 11) else {}
)
# If a program needs 79% of a GPU's memory or more, XLA adds rematerialization of its own, which may save nothing (8B,
# two rows of 8192 tokens on one H200, remat none: 1168 TFLOP instead of 896, with a peak of 125.3 GiB in both cases),
# and schedules collectives for less memory. With this option it does neither, and no longer reduces programs that do
# not fit. On one GPU, programs that need less are the same with and without it. Over several GPUs it also hides more of
# the collectives of programs that need less (70B on 128 H100s in 54 of 80 GB: 25.8 instead of 26.8 s).
NO_OWN_REMAT: Options = {"xla_gpu_memory_limit_slop_factor": 150}
# On CPUs, the pass that widens 16-bit sums over devices aborts in a region that is manual over `pipeline` only.
NO_WIDER_SUMS: Options = {DISABLE_PASSES: "all-reduce-promotion"}


def compiler_options(
    mesh: Mesh | AbstractMesh,
    microbatches: int = 1,
    matmul: Matmul = "compute_dtype",
    user: XlaConfig = NO_USER_OPTIONS,
    recomputed: Recomputed = "nothing",
    adapters: bool = False,
) -> Options:
    """Return the compiler options for programs over the mesh.

    Args:
        microbatches: number of microbatches in a step.
        matmul: value of precision.matmul.
        adapters: whether LoRA adapters are trained.
        user: settings of `xla`. Its options override the options of this module. Passes that the user disables are
            disabled in addition to WRONG_PASSES, which would compute wrong results.
        recomputed: `layers` if the backward runs all of a layer again (remat.policy full).
    """
    no_triton = matmul == "fp8" or adapters
    ours, theirs = _default_options(mesh, microbatches, no_triton, recomputed), user.parse_options()
    if matmul == "fp8" and _is_gpu(mesh):
        ours = ours | NO_JOINED_MATMULS
    if user.own_remat == "off" and _is_gpu(mesh):
        ours = ours | NO_OWN_REMAT
    if DISABLE_PASSES in ours and DISABLE_PASSES in theirs:
        theirs[DISABLE_PASSES] = f"{ours[DISABLE_PASSES]},{theirs[DISABLE_PASSES]}"
    return ours | theirs


def initialization_options(mesh: Mesh | AbstractMesh) -> Options:
    """Return the compiler options of the program that draws initial values.

    On CPUs, LLVM takes most of the program's time at its usual level. With level 1, a toy compiles in a fifth of the
    time, and the program for 410M values compiles and runs in at most half of the time. The values are the same.
    """
    return {} if _is_gpu(mesh) else {"xla_backend_optimization_level": 1}


def _is_gpu(mesh: Mesh | AbstractMesh) -> bool:
    return isinstance(mesh, Mesh) and mesh.devices.flat[0].platform != "cpu"


def _default_options(mesh: Mesh | AbstractMesh, microbatches: int, no_triton: bool, recomputed: Recomputed) -> Options:
    if not isinstance(mesh, Mesh):
        return {}
    if mesh.devices.flat[0].platform == "cpu":
        return NO_WIDER_SUMS if mesh.shape["pipeline"] > 1 else {}
    single = NO_WRONG_PASSES | NO_DYNAMIC_SLICE_FUSION | (NO_TRITON_MATMULS if no_triton else {})
    if mesh.size == 1:
        return single
    gathers = PIPELINED_ALL_GATHER if pipelines_all_gather(mesh.shape, microbatches) else {}
    several = single | LATENCY_HIDING | gathers
    hides_more = SCHEDULES_WELL and not (recomputed == "layers" and _is_one_host(mesh))
    if hides_more or max(mesh.shape["context"], mesh.shape["expert"]) > 1:
        several |= PARALLEL_COLLECTIVES
    is_zero_alone = mesh.size == mesh.shape["data"] * mesh.shape["fsdp"] and not _is_one_host(mesh)
    if KNOWS_EARLY_COLLECTIVES and is_zero_alone and microbatches > 1 and recomputed != "nothing":
        several |= EARLY_COLLECTIVES
    storage = mesh.shape["fsdp"] * mesh.shape["expert"] * mesh.shape["context"]
    if SCHEDULES_WELL and storage > 1:
        several |= {REDUCE_SCATTER_THRESHOLD: REDUCED_TOGETHER // storage}
    return several


def _is_one_host(mesh: Mesh) -> bool:
    return len({device.process_index for device in mesh.devices.flat}) == 1


def pipelines_all_gather(axis_sizes: Mapping[str, int], microbatches: int) -> bool:
    """Return whether GPUs gather the weights of a layer while the previous layer computes.

    They do not in a loop over microbatches, or under `pipeline`, `tensor` or `expert`. See PIPELINED_ALL_GATHER.
    """
    product = microbatches * axis_sizes["pipeline"] * axis_sizes["tensor"] * axis_sizes["expert"]
    return bool(PIPELINED_ALL_GATHER) and product == 1


def check_options(user: XlaConfig, mesh: Mesh) -> None:
    """Compile an empty program with each of the user's options.

    Raises:
        InputError: the installed XLA does not know an option or does not accept its value.
    """
    scalar = jax.ShapeDtypeStruct((), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec()))
    found = []
    for option in user.options:
        empty = jax.jit(lambda x: None, compiler_options=XlaConfig((option,)).parse_options())
        try:
            with without_cache():
                empty.lower(scalar).compile()
        except JaxRuntimeError as error:
            message = str(error).splitlines()[0]
            found.append(f"xla.options: {option}: XLA of jax {jax.__version__} rejects it: {message}")
    if found:
        raise InputError("; ".join(found))
