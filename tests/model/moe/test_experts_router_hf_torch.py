"""Choices of experts compared with those of the routers in Hugging Face transformers."""

import jax.numpy as jnp
import numpy as np
import pytest
import toy

from jaxopt_llm.config import ModelConfig, MoEConfig
from jaxopt_llm.config.fields import replace_fields
from jaxopt_llm.model.moe.experts import choose_experts

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

CONFIG = ModelConfig(
    moe=MoEConfig(
        experts=16, experts_per_token=5, router_groups=4, router_groups_per_token=2, router_scale=2.5, router_bias=True
    ),
)
CONFIGS = {
    "v2": replace_fields(CONFIG, {"moe.router_renormalises": False, "moe.router_bias": False}),
    "v3": replace_fields(CONFIG, {"moe.router": "sigmoid"}),
    "v3 of one group": replace_fields(
        CONFIG, {"moe.router": "sigmoid", "moe.router_groups": 1, "moe.router_groups_per_token": 1}
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_experts_and_weights_match_hugging_face(name: str) -> None:
    config = CONFIGS[name]
    same = {
        "hidden_size": config.moe.experts,
        "num_attention_heads": 1,
        "num_experts_per_tok": config.moe.experts_per_token,
        "n_group": config.moe.router_groups,
        "topk_group": config.moe.router_groups_per_token,
        "routed_scaling_factor": config.moe.router_scale,
        "n_routed_experts": config.moe.experts,
    }
    random = np.random.default_rng(0)
    logits = random.normal(size=(2, 100, config.moe.experts)).astype(np.float32)
    bias = random.normal(scale=0.3, size=config.moe.experts).astype(np.float32) if config.moe.router_bias else None
    if name == "v2":
        from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter as Router

        theirs = Router(transformers.DeepseekV2Config(**same, topk_method="group_limited_greedy"))
    else:
        from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter as Router

        theirs = Router(transformers.DeepseekV3Config(**same, norm_topk_prob=True))
        theirs.e_score_correction_bias.copy_(torch.tensor(bias))
    theirs.weight.data = torch.eye(config.moe.experts)
    _, weights, experts = theirs(torch.tensor(logits))
    expected = np.zeros((200, config.moe.experts), np.float32)
    np.put_along_axis(expected, experts.numpy(), weights.detach().numpy(), axis=1)

    routing = choose_experts(
        jnp.asarray(logits), None if bias is None else jnp.asarray(bias), None, None, config.moe, toy.placement()
    )
    found = np.zeros((200, config.moe.experts), np.float32)
    np.put_along_axis(found, np.reshape(routing.experts, (200, -1)), np.reshape(routing.weights, (200, -1)), axis=1)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
