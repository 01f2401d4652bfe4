"""What writing a token reads, writes and needs beside weights and cache, read off programs compiled for GPUs."""

import math
import re

import decode_bytes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from jaxopt_llm.config import Config, MeshConfig, ModelConfig
from jaxopt_llm.config.fields import replace_fields
from jaxopt_llm.execution.decode import TokenGenerator, empty_rows
from jaxopt_llm.model import cache
from jaxopt_llm.model.decoder import Decoder
from jaxopt_llm.planning.step_plan import count_rollout_bytes

ROWS, LENGTH, LAYERS = 4, 2048, 16
CONFIG = ModelConfig(vocabulary_size=512, width=128, layers=LAYERS, heads=4, kv_heads=2, head_dim=64, mlp_width=256)
CACHE = 2 * LAYERS * ROWS * LENGTH * CONFIG.kv_heads * CONFIG.head_dim * 2


LATENT = replace_fields(
    CONFIG,
    {
        "heads": 16,
        "kv_heads": 16,
        "head_dim": 48,
        "mla.kv_rank": 48,
        "mla.query_rank": 32,
        "mla.rotary_head_dim": 16,
        "mla.value_head_dim": 40,
    },
)
LATENT_CACHE = LAYERS * ROWS * LENGTH * (48 + 16) * 2
MESHES: list[dict[str, int]] = [{}, {"tensor": 2}, {"fsdp": 2, "tensor": 2}]
# Layers of Llama 3 8B. In a narrower model, activations are more of all bytes.
LLAMA = ModelConfig(
    vocabulary_size=16_384, width=4096, layers=4, heads=32, kv_heads=8, head_dim=128, mlp_width=14_336, tied_head=False
)
WINDOWS = replace_fields(LLAMA, {"pattern": ("sliding", "global"), "window": 512, "qk_norm": "head"})


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_the_cache_is_there_once_and_divided(axes: dict[str, int]) -> None:
    memory = compiled(CONFIG, axes).memory_analysis()
    devices = MeshConfig(**axes).devices
    assert memory.alias_size_in_bytes == CACHE // devices
    assert memory.temp_size_in_bytes < CACHE // LAYERS // devices  # less than one layer's


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_of_latents_nothing_else_is_kept_and_no_key_is_formed(axes: dict[str, int]) -> None:
    """They are whole on the devices along `tensor`, and 18 times smaller than keys and values of the heads."""
    program, rows = compiled(LATENT, axes), ROWS // axes.get("fsdp", 1)
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes == LATENT_CACHE * rows // ROWS
    assert memory.temp_size_in_bytes < 4 * LATENT_CACHE * rows // ROWS // LAYERS
    shapes = {tuple(map(int, found.split(","))) for found in re.findall(r"bf16\[([0-9,]+)\]", program.as_text())}
    latents = rows, 1, LENGTH, 48 + 16
    assert latents in shapes
    keys = rows * LENGTH * LATENT.heads // axes.get("tensor", 1) * min(LATENT.key_dim, LATENT.value_dim)
    assert max(math.prod(shape) for shape in shapes - {latents}) < keys


@pytest.mark.parametrize(
    ("config", "axes", "rows", "slots", "most"),
    [
        (LLAMA, {}, 1, 4096, 1.1),
        (LLAMA, {}, 32, 4096, 1.1),
        (LLAMA, {}, 256, 2048, 1.1),
        (WINDOWS, {}, 32, 4096, 1.1),
        (LLAMA, {"tensor": 2}, 256, 2048, 1.15),  # what `tensor` does not divide: inputs and outputs of products
    ],
    ids=["1", "32", "256", "windows", "tensor"],
)
def test_a_token_reads_each_weight_and_each_filled_slot_about_once(
    config: ModelConfig, axes: dict[str, int], rows: int, slots: int, most: float
) -> None:
    """The rest are activations. With scores in memory, XLA moves 1.17 times the bytes; out of stacks, 2.9 to 4.8."""
    step = decode_bytes.compile_step(config, "h100", MeshConfig(**axes), rows, slots)
    moved, _ = decode_bytes.count_work(step.program, "h100")
    assert step.weights + step.cache <= moved <= most * (step.weights + step.cache)


def test_a_layer_with_a_window_keeps_and_reads_the_window() -> None:
    layers, slot = WINDOWS.layers // 2, 2 * 32 * WINDOWS.kv_heads * WINDOWS.head_dim * 2
    whole, windows = (decode_bytes.compile_step(each, "h100", MeshConfig(), 32, 4096) for each in (LLAMA, WINDOWS))
    saved = layers * (4096 - WINDOWS.window - cache.REWIND) * slot
    assert whole.cache - windows.cache == saved
    memory = windows.program.memory_analysis()
    assert memory.alias_size_in_bytes == windows.cache
    moved = [decode_bytes.count_work(each.program, "h100")[0] for each in (whole, windows)]
    assert moved[0] - moved[1] > 0.97 * saved


@pytest.mark.parametrize("axes", [{}, {"fsdp": 2, "tensor": 2}], ids=str)
def test_the_planned_cache_of_rollouts_is_that_of_the_program(axes: dict[str, int]) -> None:
    """The program changes the caches in place, and nothing else."""
    config = replace_fields(
        Config(model=replace_fields(CONFIG, {"pattern": ("sliding", "global"), "window": 512})),
        {
            "mesh": MeshConfig(**axes),
            "training.objective": "grpo",
            "rollouts.prompts": 2,
            "rollouts.group_size": 2,
            "training.sequence_length": LENGTH - 1,
            "precision.compute_dtype": "bfloat16",
        },
    )
    planned = count_rollout_bytes(config)
    assert planned == compiled(config.model, axes).memory_analysis().alias_size_in_bytes
    whole = count_rollout_bytes(replace_fields(config, {"model.pattern": ("global",)}))
    assert 2 * planned == whole * (1 + (512 + cache.REWIND) / LENGTH)


def test_a_token_reads_latents_as_keys_and_as_values_and_copies_nothing() -> None:
    """If latents and rotary keys were two arrays, they would be joined: as many bytes again."""
    sizes = {"kv_heads": 32, "mla.kv_rank": 512, "mla.rotary_head_dim": 64, "mla.value_head_dim": 128}
    config = replace_fields(LLAMA, sizes | {"head_dim": 192})
    step = decode_bytes.compile_step(config, "h100", MeshConfig(), 32, 4096)
    moved, _ = decode_bytes.count_work(step.program, "h100")
    assert moved <= 1.25 * (step.weights + 2 * step.cache)


def test_weights_that_fsdp_divides_are_gathered_layer_by_layer() -> None:
    config = replace_fields(LLAMA, {"layers": 12, "vocabulary_size": 512})
    step = decode_bytes.compile_step(config, "h100", MeshConfig(fsdp=8), 8, 256)
    layer = step.weights // config.layers
    assert step.program.memory_analysis().temp_size_in_bytes < 3 * layer


def test_all_layers_of_a_kind_are_traced_and_lowered_once() -> None:
    config = replace_fields(toy.CONFIG, {"layers": 17})  # 8 periods of two kinds, and a segment of one
    model, placement = Decoder(config), toy.placement()
    params = toy.by_layer(jax.tree.map(lambda spec: jnp.zeros(spec.shape), model.specs))
    generator = TokenGenerator(model, params, placement, config.vocabulary_size, 1, 16)
    text = generator._programs.step.lower(params, generator._caches, empty_rows(1), np.ones(1, np.bool_)).as_text()
    assert len(re.findall(r"func\.func private @run_period", text)) == 2
    assert len(re.findall(r"call @run_period", text)) == 9


def compiled(config: ModelConfig, axes: dict[str, int]) -> jax.stages.Compiled:
    """The program that writes a token."""
    return decode_bytes.compile_step(config, "h200", MeshConfig(**axes), ROWS, LENGTH).program
