"""Implementations of `jaxopt_llm.attention` in a user's loss: chosen for the devices of a program, divided over them.

The choice is made while the loss is traced, by `kernels.attention.SELECT`.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from jaxopt_llm.compiler.kernel_choice import choose_attention
from jaxopt_llm.config.metadata import AUTO
from jaxopt_llm.kernels.attention import IMPLEMENTATIONS, AttentionRequest, Implementation, exclude_sizes
from jaxopt_llm.kernels.attention_auto import FALLBACK, AttentionChoice
from jaxopt_llm.kernels.copied_heads import CopiedHeads
from jaxopt_llm.parallel.mesh import visible_devices
from jaxopt_llm.parallel.per_device import PerDevice
from jaxopt_llm.parallel.placement import Placement
from jaxopt_llm.training.attention_choice import choose_working


@dataclass(frozen=True, eq=False)
class AttentionSelector:
    """Selector of the implementation of each call of `attention` in a loss, for one placement.

    Selectors are compared by identity: JAX's caches have them in their keys, so that a function that the loss jits is
    traced anew for each program, and each program has all of its calls in `choices`.

    Attributes:
        requested: value of `training.attention`.
        device: a device of the placement, or one like it.
        choices: choices so far, with warnings of what the user probably did not intend.
    """

    placement: Placement
    requested: str
    device: Any
    choices: dict[AttentionRequest, AttentionChoice] = field(default_factory=dict)

    def __call__(self, request: AttentionRequest) -> Implementation:
        if request not in self.choices:
            self.choices[request] = self._choose(request)
        name = self.choices[request].name
        if name == FALLBACK:
            return IMPLEMENTATIONS[name]  # XLA divides its own operations
        divides = self._divides_heads(request)
        kernel = PerDevice(IMPLEMENTATIONS[name], self.placement, divides)
        copies = math.lcm(request.kv_heads, self.placement.size("tensor")) // request.kv_heads if divides else 1
        return CopiedHeads(kernel, copies) if copies > 1 else kernel

    def warnings(self) -> Iterator[str]:
        """Yield what the user probably did not intend about the calls so far."""
        yield from dict.fromkeys(choice.warning for choice in self.choices.values() if choice.warning)
        tensor = self.placement.size("tensor")
        for request, choice in self.choices.items():
            if choice.name != FALLBACK and not self._divides_heads(request):
                yield (
                    f"mesh.tensor={tensor} does not divide the {request.heads} heads of an attention: each device "
                    "along it computes all of them"
                )

    def _divides_heads(self, request: AttentionRequest) -> bool:
        return request.heads % self.placement.size("tensor") == 0

    def _choose(self, request: AttentionRequest) -> AttentionChoice:
        is_gpu = self.device.platform == "gpu"
        if isinstance(self.placement.mesh, AbstractMesh) and not is_gpu:
            return AttentionChoice(FALLBACK)  # nothing is refused: the program may be planned for GPUs
        requested = self.requested if request.requested == AUTO else request.requested
        axes = self.placement.batch_axes
        if requested != FALLBACK and is_gpu and request.rows % self.placement.size(*axes):
            sizes = " × ".join(f"mesh.{axis}={self.placement.size(axis)}" for axis in axes)
            reason = f"{sizes} does not divide its {request.rows} rows, and a kernel needs whole rows on each device"
            return AttentionChoice(FALLBACK, reason, f"an attention is computed by XLA's operations, because {reason}")
        excluded = exclude_sizes(request.call.head_dim, request.value_dim)
        if self.device not in visible_devices():  # it is only compiled for
            return choose_attention(self.device, requested, request.call, excluded)
        with jax.ensure_compile_time_eval():  # the check of a kernel runs now, and is no part of the loss
            group = request.heads // request.kv_heads
            return choose_working(self.device, requested, request.call, group, excluded)


def make_selector(placement: Placement, requested: str) -> AttentionSelector:
    """Return the selector for a placement. requested: value of `training.attention`."""
    mesh = placement.mesh
    device = mesh.devices.flat[0] if isinstance(mesh, Mesh) else visible_devices()[0]
    return AttentionSelector(placement, requested, device)
