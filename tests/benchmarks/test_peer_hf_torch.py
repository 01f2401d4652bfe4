"""The benchmark's peer does the same work as ours: same parameters, loss and gradient; what it cannot do is refused."""

import dataclasses
import importlib.util
from collections.abc import Iterator
from typing import Any

import numpy as np
import peer_hf_torch
import pytest
import toy

from jaxopt_llm.config import Config, MeshConfig, PrecisionConfig
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.model import param
from jaxopt_llm.model.batch import Batch
from jaxopt_llm.model.decoder_specs import param_specs
from jaxopt_llm.model.model import Params

# A vocabulary without padding: the peer's softmax takes part in it.
MODEL = dataclasses.replace(toy.CONFIG, pattern=("global",), layers=2, kv_heads=2, vocabulary_size=256)
CONFIG = Config(model=MODEL, precision=PrecisionConfig(compute_dtype="float32"))


def named(params: Params) -> Iterator[tuple[str, np.ndarray]]:
    """Ours by the peer's names and shapes: [out, in] for every product."""
    non_layer, stack = params["non_layer"], params["segment_0"]["block_0"]
    yield "model.embed_tokens.weight", non_layer["embedding"]["table"]
    yield "model.norm.weight", non_layer["final_norm"]["scale"]
    if "head" in non_layer:
        yield "lm_head.weight", non_layer["head"]["table"]
    for layer in range(MODEL.layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", stack["attention_norm"]["scale"][layer]
        yield f"{prefix}.post_attention_layernorm.weight", stack["mlp_norm"]["scale"][layer]
        for theirs, ours in (("q", "query"), ("k", "key"), ("v", "value")):
            yield f"{prefix}.self_attn.{theirs}_proj.weight", stack["attention"][ours][layer].reshape(MODEL.width, -1).T
        yield f"{prefix}.self_attn.o_proj.weight", stack["attention"]["output"][layer].reshape(-1, MODEL.width).T
        for name in ("gate", "up", "down"):
            yield f"{prefix}.mlp.{name}_proj.weight", stack["mlp"][name][layer].T


@pytest.mark.parametrize("tied", [True, False])
def test_parameters_loss_and_gradient_are_the_same(tied: bool) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    config = dataclasses.replace(CONFIG, model=dataclasses.replace(MODEL, tied_head=tied))
    work = peer_hf_torch.work(config)
    model = peer_hf_torch.make_model(work)
    specs = param_specs(config.model)
    assert sum(parameter.numel() for parameter in model.parameters()) == param.count_parameters(specs)
    params = toy.params(specs)
    for name, value in named(params):
        model.get_parameter(name).data = torch.tensor(value)

    random = np.random.default_rng(0)
    tokens, targets = random.integers(MODEL.vocabulary_size, size=(2, 2, 12))
    ones, positions = np.ones_like(tokens), np.broadcast_to(np.arange(12), (2, 12))
    batch = Batch(tokens=tokens, targets=targets, loss_mask=ones == 1, segment_ids=ones, positions=positions)
    loss = peer_hf_torch.make_loss(model, work, "cpu")(torch.tensor(tokens), torch.tensor(targets))
    loss.backward()
    expected, gradients = toy.reference_mean(config.model, params, batch)
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    for name, gradient in named(gradients):
        np.testing.assert_allclose(model.get_parameter(name).grad, gradient, rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    "change, part",
    [
        ({"model": toy.CONFIG}, "--model.pattern global"),
        ({"model": dataclasses.replace(MODEL, biases="qkv")}, "--model.biases none"),
        ({"mesh": MeshConfig(fsdp=2)}, "2 devices"),
        ({"precision": PrecisionConfig(reduce_dtype="bfloat16")}, "precision.reduce_dtype"),
        ({"precision": PrecisionConfig(compute_dtype="float16")}, "precision.compute_dtype=float16"),
        ({}, "[peer]'"),
    ],
)
def test_what_it_cannot_do_is_refused(change: dict[str, Any], part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError) as refused:
        peer_hf_torch.work(dataclasses.replace(CONFIG, **change))
    assert part in str(refused.value)
