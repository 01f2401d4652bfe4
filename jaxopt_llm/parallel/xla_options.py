"""Options of XLA's compiler for training programs, by jax version: each with what it buys, and the user's own on top.

They are compiler options of `jax.jit`, where an unknown name is an error; in XLA_FLAGS it ends the process.

Tried and left as they are, with 4 layers of 10B compiled for 8 H200s (jax 0.10.2; 0.11.2), where what is gathered and
reduced moves beside other kernels but for 1%: combining collectives up to 1 GiB (0.5 GiB more memory; of 0.11.2's
gathers 44% then wait, and 77% of its reductions), pipelined all-reduce (1.6 GiB more), double buffering of loops (twice
the program for the same overlap), several collectives at a time where there is no ring (0.2 GiB more). Command buffers,
on by default, and the choice between Triton and cuBLAS, which is made by timing, do not show in a compiled program:
only a GPU can tell.

A user's to set: xla_gpu_memory_limit_slop_factor=150. From 79% of a GPU's memory on XLA computes things again on its
own, and may save nothing by it (8B, two rows of 8192 tokens on one H200, remat none: 1168 TFLOP for 896, with 125.3 GiB
at the peak in either case). With this it does not, and mends no more what would not fit.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.errors import JaxRuntimeError
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxopt_llm.errors import InputError
from jaxopt_llm.parallel.precision import Matmul
from jaxopt_llm.parallel.topology import without_cache

Options = dict[str, str | bool | int]


@dataclass(frozen=True)
class XlaConfig:
    options: tuple[str, ...] = ()
    """NAME=VALUE each, as in xla_gpu_autotune_level=0: options of XLA's compiler for the step and the held-out loss, in
    place of our own (parallel/xla_options.py) or beside them; names are those of the installed jaxlib"""

    def problems(self) -> list[str]:
        found = [
            f"xla.options: {each!r}: must be NAME=VALUE, of a NAME that begins with xla_"
            for each in self.options
            if not each.startswith("xla_") or "=" not in each
        ]
        names = [each.partition("=")[0] for each in self.options]
        return found + [f"xla.options: {name} is given twice" for name in dict.fromkeys(names) if names.count(name) > 1]

    def parsed(self) -> Options:
        """XLA reads numbers and enumerations from text itself."""
        pairs = (each.partition("=") for each in self.options)
        return {name: {"true": True, "false": False}.get(value.lower(), value) for name, _, value in pairs}


OURS = XlaConfig()

# What lets GPUs compute while they exchange: collectives are scheduled around computation by their estimated time. XLA
# 0.10.2 does so on several GPUs unasked; of 0.11.2's, without it, a quarter of the gathers and three quarters of the
# reductions wait.
SCHEDULED: Options = {"xla_gpu_enable_latency_hiding_scheduler": True}
# A layer's weights are gathered while the layer before computes, for one layer's gathered weights more and, seen in
# XLA 0.10.2, constants of attention's masks that it then keeps (10B, 4 rows a GPU: 2.9 GiB). XLA does it to every
# loop: of one over microbatches it would keep copies of gradients (10B, 4 microbatches: 27.2 -> 35.7 GiB), and under
# sequence parallelism it sums over `tensor` once more what nobody reads. And to every gather: a backward that runs a
# layer again brings experts their tokens together again, and to do so early it would run all of attention once more.
# From jax 0.11 on the option has another name (xla_gpu_pipeline_all_gather) and harms: the backward's gathers all
# come after its last product (10B, 8 GPUs: 48% of the gathered bytes move beside products). Without it 77% do, all
# but those of the attention's own weights.
GATHERED_AHEAD: Options = {"xla_gpu_enable_pipelined_all_gather": True} if jax.__version_info__ < (0, 11) else {}
# Of a ring keys, values and the gradients of both are sent at once, of experts tokens and numbers of them: by its own
# choice XLA has one collective at a time beside computation, and waits for the others.
AT_ONCE: Options = {"xla_gpu_experimental_parallel_collective_overlap_limit": 4}
# Passes of XLA's that make programs compute something else, and say nothing:
# - What is gathered and sliced again becomes a permute; devices whose slice is their own are left out of it, and get
#   zeros (seen in 0.10.2: gradients between the stages of a pipeline). Without it there is the gather.
# - What a loop that counts down slices out of host memory jax 0.10.2 copies from the wrong end (openxla/xla#46231): a
#   backward would find the activations, or the weights, of other layers. Without it the slice is a kernel's, which
#   reads the right ones; 0.11.2 copies them as it should.
WRONG_PASSES = ["all-gather-to-collective-permute-simplifier"] + (
    ["dynamic-slice-annotator"] if jax.__version_info__ < (0, 11, 2) else []
)
PASSES = "xla_disable_hlo_passes"
CORRECT: Options = {PASSES: ",".join(WRONG_PASSES)}
# Triton's matmuls come first where they are on, with operands widened to 16 bits; only of what they leave does XLA make
# cuBLASLt's calls in fp8.
CUBLAS: Options = {"xla_gpu_enable_triton_gemm": False}
# XLA 0.11.2 lets products of cuBLAS's and kernels of jax-triton's write straight into the stack of what is kept for the
# backward, and runs those twice whose results are read beside (8B on one H200, remat none: 518 TFLOP for 448; with our
# Triton kernel attention's forward, too). The price of running them once: of the gathered bytes 62% move beside
# products where 81% did (10B on 8 GPUs, remat none; with remat full 84% for 79%).
ONCE: Options = {"xla_gpu_enable_dynamic_slice_fusion": False} if jax.__version_info__ >= (0, 11) else {}
# On CPUs XLA aborts on 16-bit sums over devices in a region that is manual over `pipeline` alone, in the pass that
# would widen them.
NARROW_SUMS: Options = {PASSES: "all-reduce-promotion"}


def compiler_options(
    mesh: Mesh | AbstractMesh,
    microbatches: int = 1,
    matmul: Matmul = "compute_dtype",
    own: XlaConfig = OURS,
) -> Options:
    """For programs over the mesh, with so many microbatches and products formed so (see PrecisionConfig).

    own: comes last. Passes that it disables are disabled beside ours, which computed something wrong.
    """
    ours, theirs = _ours(mesh, microbatches, matmul), own.parsed()
    if PASSES in ours and PASSES in theirs:
        theirs[PASSES] = f"{ours[PASSES]},{theirs[PASSES]}"
    return ours | theirs


def _ours(mesh: Mesh | AbstractMesh, microbatches: int, matmul: Matmul) -> Options:
    if not isinstance(mesh, Mesh):
        return {}
    if mesh.devices.flat[0].platform == "cpu":
        return NARROW_SUMS if mesh.shape["pipeline"] > 1 else {}
    on_one = CORRECT | ONCE | (CUBLAS if matmul == "fp8" else {})
    if mesh.size == 1:
        return on_one
    ahead = GATHERED_AHEAD if gathers_ahead(mesh.shape, microbatches) else {}
    several = max(mesh.shape["context"], mesh.shape["expert"]) > 1
    return on_one | SCHEDULED | ahead | (AT_ONCE if several else {})


def gathers_ahead(sizes: Mapping[str, int], microbatches: int) -> bool:
    """Whether GPUs are told to gather a layer's weights while another computes: not in a loop over microbatches, nor
    under `tensor` or `expert`. sizes: of the mesh's axes."""
    return bool(GATHERED_AHEAD) and microbatches * sizes["pipeline"] * sizes["tensor"] * sizes["expert"] == 1


def check(own: XlaConfig, mesh: Mesh) -> None:
    """Raises InputError for options that the installed XLA does not know or whose values it does not take: it is asked
    to compile nothing with them."""
    everywhere = jax.ShapeDtypeStruct((), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec()))
    found = []
    for each in own.options:
        nothing = jax.jit(lambda x: None, compiler_options=XlaConfig((each,)).parsed())
        try:
            with without_cache():
                nothing.lower(everywhere).compile()
        except JaxRuntimeError as error:
            found.append(f"xla.options: {each}: jax {jax.__version__}'s XLA says: {str(error).splitlines()[0]}")
    if found:
        raise InputError("; ".join(found))
