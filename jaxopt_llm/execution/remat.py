"""Rematerialisation of blocks: the intermediates that `remat.policy` keeps for the backward."""

import functools
from typing import Any

import jax

from jaxopt_llm.compiler.xla_options import Recomputed
from jaxopt_llm.config import RematConfig
from jaxopt_llm.core.intermediate import Intermediate, Role

# The roles whose intermediates each policy keeps of a block in addition to its input. Under every policy, elementwise
# results are computed again, and no gathered weight is kept, because it is no intermediate.
ROLES_BY_POLICY: dict[str, frozenset[Role]] = {
    "none": frozenset({"projection", "attention", "product"}),
    "dots": frozenset({"projection", "product"}),
    "save_qkv": frozenset({"projection", "attention"}),
    "save_attention": frozenset({"attention"}),
    "full": frozenset(),
    "auto": frozenset(),  # until a policy is chosen (planning/settings_choice.py)
}

checkpoint = functools.partial(jax.checkpoint, prevent_cse=False)  # XLA merges no recomputation within a scan


def keeps_inputs_only(remat: RematConfig) -> bool:
    """Return whether `remat.policy` keeps nothing of a block but its input."""
    return isinstance(remat.policy, str) and not ROLES_BY_POLICY[remat.policy]


def is_kept(remat: RematConfig, intermediate: Intermediate) -> bool:
    """Return whether `remat.policy` keeps an intermediate, on the device or, by `remat.offload`, on the host."""
    if isinstance(remat.policy, str):
        return intermediate.role in ROLES_BY_POLICY[remat.policy] or intermediate in remat.offload
    return intermediate in remat.policy or intermediate in remat.offload


def name_recomputed(remat: RematConfig) -> Recomputed:
    """Return what the backward computes again of each layer, apart from elementwise operations."""
    if remat.policy == "none":
        return "nothing"
    return "layers" if keeps_inputs_only(remat) else "a part"


def checkpoint_policy(remat: RematConfig) -> Any:
    """Return the policy as `jax.checkpoint` takes it."""
    by_name = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=["saved"],
        names_which_can_be_offloaded=["offloaded"],
        offload_src="device",
        offload_dst="pinned_host",
    )

    def policy(primitive: Any, *shapes: Any, **params: Any) -> Any:
        name = params.get("name")
        if isinstance(name, Intermediate) and is_kept(remat, name):
            params["name"] = "offloaded" if name in remat.offload else "saved"
        return by_name(primitive, *shapes, **params)

    return policy
