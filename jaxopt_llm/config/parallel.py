"""Settings of the device mesh, of what is divided over it, and of rematerialisation and offload."""

import math
import re
from dataclasses import dataclass
from typing import Literal

from jaxopt_llm.config.metadata import AT_LEAST_ONE, AUTO, NON_NEGATIVE, Bounds, Section, setting

# Outermost first. `tensor` is innermost, so it uses the fastest links. `pipeline` moves the least data, so it crosses
# hosts first. XLA also requires `pipeline` first: it accepts a nested shard_map only if its axes come later.
AXES = ("pipeline", "data", "fsdp", "expert", "context", "tensor")


BATCH_AXES = ("data", "fsdp", "expert")  # the axes that the batch is split over


@dataclass(frozen=True)
class MeshConfig(Section, path="mesh"):
    pipeline: int = setting(1, in_backward=1, bounds=AT_LEAST_ONE)
    """Number of pipeline stages (pipeline parallelism, PP)."""
    data: int = setting(1, bounds=AT_LEAST_ONE)
    """Number of replicas (data parallelism, DP). Across nodes, with fsdp inside a node, this is hybrid sharding (HSDP;
    torchtitan: data_parallel_replicate_degree)."""
    fsdp: int | Literal["auto"] = setting("auto", bounds=AT_LEAST_ONE)
    """Number of devices that split the batch and, according to sharding.zero_stage, the training state (FSDP, ZeRO;
    torchtitan: data_parallel_shard_degree). auto: all visible devices that the other axes leave over; if they do
    not divide training.batch_size, the largest number that does. Where the whole state takes at most a quarter of a
    device's memory, mesh.data gets them instead, unless a setting of sharding.* is set. training.accumulation falls, so
    that a device has no more rows at a time than on one device. The start of the run writes the numbers into
    config.json."""
    expert: int = setting(1, bounds=AT_LEAST_ONE)
    """Number of devices that split the experts and the batch (expert parallelism, EP). In a dense model it is another
    axis like fsdp, over which gradients are reduced in every microbatch."""
    context: int = setting(1, bounds=AT_LEAST_ONE)
    """Number of devices that split the sequence (context parallelism, CP)."""
    tensor: int = setting(1, bounds=AT_LEAST_ONE)
    """Number of devices that split heads, MLP width and vocabulary (tensor parallelism, TP)."""

    def size(self, axis: str) -> int:
        """Return the number of devices along an axis. `auto` counts as 1 until the start of a run resolves it."""
        size = getattr(self, axis)
        return 1 if size == AUTO else int(size)

    @property
    def sizes(self) -> dict[str, int]:
        """Number of devices along each axis, outermost first."""
        return {axis: self.size(axis) for axis in AXES}

    @property
    def devices(self) -> int:
        return math.prod(self.sizes.values())

    @property
    def batch_shards(self) -> int:
        """Number of parts into which the rows of a microbatch are split."""
        return math.prod(self.size(axis) for axis in BATCH_AXES)


@dataclass(frozen=True)
class ShardingConfig(Section, path="sharding"):
    zero_stage: Literal[0, 1, 2, 3] = 3
    """ZeRO stage: the state that mesh.fsdp, mesh.context and mesh.expert shard together. 0 = nothing, 1 = master
    weights and moments, 2 = also gradients, 3 = also compute parameters (Rajbhandari et al. 2020; DeepSpeed: stage)."""
    sequence_parallel: bool = False
    """Also split norms and the residual stream along the sequence over mesh.tensor (Korthikanti et al. 2022;
    Megatron-LM: sequence-parallel)."""
    context_exchange: Literal["auto", "ring", "all_to_all"] = "auto"
    """Communication of attention over mesh.context. ring: keys and values go around the devices while attention to
    those that arrived before is computed (ring attention). all_to_all: each device trades its part of the sequence for
    a part of the heads, and back (DeepSpeed-Ulysses). auto: the one with the faster step by the arithmetic of `plan`,
    with the attention kernel that each can use; on CPUs ring."""
    expert_exchange: Literal["auto", "gather", "all_to_all"] = "auto"
    """Communication of MoE layers over mesh.expert. gather: every token goes to all devices of the axis. all_to_all:
    each choice goes to the device of its expert, in buffers of fixed size. auto: the one that takes less time by a
    roofline of links and memory."""
    expert_room: float = setting(
        1.2,
        bounds=AT_LEAST_ONE,
        search=(2.0, 1.5, 1.2, 1.1),
        search_rank=9,
        price="an uneven load takes more rounds",
    )
    """With all_to_all: size of the buffer between two devices, as a multiple of the choices of an even load.
    Choices that do not fit go in further rounds of a quarter of an even load; none is dropped. Must be at least 1."""
    optimizer_over_data: bool = False
    """Also divide master weights and moments over mesh.data. Each replica keeps a compute copy, divided as zero_stage
    sets, which is gathered once per step: with fsdp inside a host and data between hosts, no gather of a layer crosses
    hosts (ZeRO++: hpZ; Megatron-FSDP: outer_dp_sharding_strategy=optim)."""
    int8_gathers: tuple[Literal["data", "fsdp", "expert", "context"], ...] = setting(
        (),
        resume="if_allowed",
        search=((), ("data",), ("data", "fsdp")),
        search_rank=5,
        price="the model computes with weights rounded to 8 bits",
    )
    """Mesh axes over which weights are gathered as int8 codes in blocks (ZeRO++: qwZ). A gather over several axes sends
    codes if one of them is named. The masters stay exact, and evaluation reads them exactly where it can. `data` needs
    optimizer_over_data. Weights that precision.matmul or lora.base already turns into codes are gathered as those.
    Empty = none."""
    data_gradients: Literal["exact", "int8", "int4"] = setting(
        "exact",
        resume="if_allowed",
        search=("exact", "int8", "int4"),
        search_rank=6,
        price="gradients are rounded to blocks of codes between replicas",
    )
    """Format in which gradients are exchanged over mesh.data. exact: precision.reduce_dtype. int8, int4: codes in
    blocks, sent once and summed in float32 (ZeRO++: qgZ)."""
    fsdp_gradients: Literal["exact", "int8", "int4"] = setting(
        "exact",
        resume="if_allowed",
        search=("exact", "int8", "int4"),
        search_rank=7,
        price="each device's part of a gradient is rounded to blocks of codes",
    )
    """Format in which gradients are reduced over the axes that divide them: mesh.fsdp, mesh.context and mesh.expert.
    exact: precision.reduce_dtype. int8, int4: as data_gradients, in every microbatch (ZeRO++: qgZ). Useful where fsdp
    crosses hosts. It needs mesh.fsdp above 1, and ZeRO stage 2 or 3."""

    @property
    def has_ring(self) -> bool:
        """Return whether attention over mesh.context is a ring. `auto` counts as one until the start of a run."""
        return self.context_exchange != "all_to_all"


Schedule = Literal["gpipe", "1f1b", "interleaved"]
Residuals = Literal["auto", "store", "recompute"]
WITH_CHUNKS: tuple[Schedule, ...] = ("interleaved",)  # the schedules with several chunks of a stage


@dataclass(frozen=True)
class PipelineConfig(Section, path="pipeline"):
    schedule: Schedule = "1f1b"
    """Order of the forward and backward passes. gpipe: all forwards, then all backwards (Huang et al. 2019). 1f1b: each
    backward as early as possible, so that the number of stored inputs does not grow with the number of microbatches
    (Narayanan et al. 2019). interleaved: 1f1b with pipeline.virtual_stages (Narayanan et al. 2021)."""
    virtual_stages: int = setting(1, bounds=AT_LEAST_ONE)
    """Number of chunks of consecutive layers per stage, interleaved with those of the other stages; it divides the idle
    time by this number (Megatron-LM: virtual pipeline stages). Above 1 only with schedule=interleaved."""
    split: tuple[int, ...] = ()
    """Number of layers in each chunk, in the order of the model. Empty = as equal as possible."""
    residuals: Residuals = "auto"
    """What a chunk keeps from its forward for its backward. store: what remat.policy names of each of its layers, as
    without a pipeline. recompute: only its input; the backward runs the whole chunk forward again. auto: store, if the
    memory suffices with some policy. The start of the run writes the choice into config.json."""

    def problems(self) -> list[str]:
        found, chunks = self.find_out_of_range(), self.virtual_stages
        if self.schedule in WITH_CHUNKS and chunks < 2:
            found.append(
                f"pipeline.schedule={self.schedule} with pipeline.virtual_stages={chunks}: set "
                "--pipeline.virtual-stages to at least 2"
            )
        if self.schedule not in WITH_CHUNKS and chunks > 1:
            found.append(
                f"pipeline.virtual_stages={chunks} with pipeline.schedule={self.schedule}: set "
                f"--pipeline.schedule {' or '.join(WITH_CHUNKS)}, or --pipeline.virtual-stages 1"
            )
        if any(layers < 1 for layers in self.split):
            found.append(f"pipeline.split={self.split}: each chunk needs at least 1 layer")
        return found


_ADDRESS = "must be host:port, with the name or IP address of a host"


def find_address_problem(text: str) -> str:
    """Return why a text is no address of the form host:port; "" if it is one.

    A name with an empty label, or with a label of more than 63 characters, is wrong: look-ups of it raise UnicodeError.
    """
    port = re.fullmatch(r".+:([0-9]{1,9})", text)
    if port is None:
        return _ADDRESS
    if not 0 < int(port[1]) < 2**16:
        return "the port must be 1 to 65535"
    try:
        parse_address(text)[0].encode("idna")
    except UnicodeError:
        return _ADDRESS
    return ""


def parse_address(text: str) -> tuple[str, int]:
    """Return host and port of an address, without the brackets of an IPv6 host."""
    host, port = text.rsplit(":", 1)
    return host.strip("[]"), int(port)


@dataclass(frozen=True)
class DistributedConfig(Section, path="distributed"):
    coordinator: str = ""
    """Address at which process 0 listens, as host:port. Empty = from the environment of torchrun, SLURM, Open MPI or
    Kubernetes."""
    processes: int = setting(0, bounds=NON_NEGATIVE)
    """Number of processes of the job, one per host with all devices of the host. 0 = from the environment, or 1 if it
    has none."""
    process_id: int = setting(-1, bounds=Bounds(minimum=-1))
    """Rank of this process, from 0. -1 = from the environment."""
    timeout_seconds: int = setting(300, bounds=AT_LEAST_ONE)
    """Seconds after which the job ends if a process has not joined or no longer answers."""

    def problems(self) -> list[str]:
        found = self.find_out_of_range()
        if self.coordinator and (why := find_address_problem(self.coordinator)):
            found.append(f"distributed.coordinator={self.coordinator}: {why}")
        return found


Policy = Literal["auto", "none", "full", "dots", "save_attention", "save_qkv"]


@dataclass(frozen=True)
class RematConfig(Section, path="remat"):
    policy: Policy | tuple[str, ...] = setting("auto", in_backward="full")
    """Activations of each block that are kept for the backward pass in addition to the block's input; the others are
    recomputed (activation checkpointing). none: keep all except elementwise results; dots: keep all products with
    weights, but not attention; save_qkv: keep queries, keys, values and the result of attention; save_attention: keep
    only the result of attention; full: keep nothing; or a list of intermediates, whose names depend on the model
    (docs/rematerialisation.md). auto: the policy that recomputes least of those with which the compiled step leaves 5%
    of the memory free; full with remat.every, remat.offload or optimizer.in_backward. The start of the run resolves it
    in config.json, and a resumed run keeps it on the same GPUs."""
    every: int = setting(1, in_backward=1, bounds=AT_LEAST_ONE)
    """Number of consecutive layers that the backward pass recomputes together from the input of the first one; the
    forward pass keeps nothing of the layers in between (Megatron-LM: recompute-method uniform). During this
    recomputation, remat.policy applies. 1 = remat.policy only."""
    offload: tuple[str, ...] = setting((), in_backward=())
    """Activations that stay in pinned host memory between the forward and the backward pass, even if remat.policy does
    not keep them (activation offloading). Empty = none."""

    @property
    def enabled(self) -> bool:
        """Use of `jax.checkpoint` for the blocks. Without it, JAX itself keeps the activations of policy `none`."""
        return self.policy != "none" or bool(self.offload)

    def problems(self) -> list[str]:
        found = self.find_out_of_range()
        if not self.policy:
            found.append("remat.policy is empty: give a policy or an intermediate; full keeps only block inputs")
        if self.every > 1 and self.offload:
            remedy = "set --remat.every 1, or leave out --remat.offload"
            found.append(f"remat.every={self.every} keeps nothing to offload: {remedy}")
        return found

    def group_size(self, kinds: int, repeats: int) -> int:
        """Return the number of periods that the backward pass recomputes together.

        kinds: layers of a period. repeats: periods in the stack.
        """
        return min(max(self.every // kinds, 1), repeats)


@dataclass(frozen=True)
class OffloadConfig(Section, path="offload"):
    optimizer: bool = False
    """Keep the optimizer state in pinned host memory; the update transfers one layer at a time (ZeRO-Offload, Ren et
    al. 2021; DeepSpeed: offload_optimizer). This covers the moments and, where the model reads a compute copy (ZeRO
    stages 1 and 2, sharding.optimizer_over_data), the master weights."""
    parameters: bool = False
    """Keep the parameters of the blocks in pinned host memory; forward, backward and update transfer one layer at a
    time (ZeRO-Infinity, Rajbhandari et al. 2021; DeepSpeed: offload_param). With lora.rank, only the frozen base."""
