"""Settings that save device memory: rematerialisation and offload to host memory."""

from dataclasses import dataclass
from typing import Literal

from jaxopt_llm.config.metadata import AT_LEAST_ONE, find_out_of_range, setting

Policy = Literal["auto", "none", "full", "dots", "save_attention", "save_qkv"]


@dataclass(frozen=True)
class RematConfig:
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
        found = find_out_of_range("remat", self)
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
class OffloadConfig:
    optimizer: bool = False
    """Keep the optimizer state in pinned host memory; the update transfers one layer at a time (ZeRO-Offload, Ren et
    al. 2021; DeepSpeed: offload_optimizer). This covers the moments and, where the model reads a compute copy (ZeRO
    stages 1 and 2, sharding.optimizer_over_data), the master weights."""
    parameters: bool = False
    """Keep the parameters of the blocks in pinned host memory; forward, backward and update transfer one layer at a
    time (ZeRO-Infinity, Rajbhandari et al. 2021; DeepSpeed: offload_param). With lora.rank, only the frozen base."""

    def problems(self) -> list[str]:
        return []
