"""Rematerialisation of blocks: the activations that each `remat.policy` keeps for the backward."""

import functools
from typing import Any

import jax

from jaxopt_llm.compiler.xla_options import Recomputed
from jaxopt_llm.config import Intermediate, RematConfig

QKV: tuple[Intermediate, ...] = ("query_latent", "latent", "rotary_key", "query", "key", "value")
PROJECTIONS: tuple[Intermediate, ...] = (*QKV, "attention_output", "mlp_gate", "mlp_up", "mlp_output")
# The intermediates that each policy keeps of a block in addition to its input. Under every policy, elementwise results
# are computed again, and no gathered weight is kept, because it has none of these names.
SAVED_BY_POLICY: dict[str, tuple[Intermediate, ...]] = {
    "none": (*PROJECTIONS, "attention"),
    "dots": PROJECTIONS,
    "save_qkv": (*QKV, "attention"),
    "save_attention": ("attention",),
    "full": (),
    "auto": (),  # until a policy is chosen (planning/settings_choice.py)
}

checkpoint = functools.partial(jax.checkpoint, prevent_cse=False)  # XLA merges no recomputation within a scan


def saved_intermediates(remat: RematConfig) -> tuple[Intermediate, ...]:
    """Return the names that `remat.policy` keeps."""
    return SAVED_BY_POLICY[remat.policy] if isinstance(remat.policy, str) else remat.policy


def name_recomputed(remat: RematConfig) -> Recomputed:
    """Return what the backward computes again of each layer, apart from elementwise operations."""
    if remat.policy == "none":
        return "nothing"
    return "a part" if saved_intermediates(remat) else "layers"


def checkpoint_policy(remat: RematConfig) -> Any:
    """Return the policy as `jax.checkpoint` takes it."""
    saved = saved_intermediates(remat)
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[name for name in saved if name not in remat.offload],
        names_which_can_be_offloaded=list(remat.offload),
        offload_src="device",
        offload_dst="pinned_host",
    )
