"""Memory at a step's peak: kinds, names and tables."""

import math
from dataclasses import replace

import pytest
import toy

from jaxopt_llm.compiler.buffers import Buffer
from jaxopt_llm.config import Config, MeshConfig, PipelineConfig, RematConfig, ShardingConfig, TrainingConfig
from jaxopt_llm.config.fields import replace_fields
from jaxopt_llm.planning import memory
from jaxopt_llm.planning.free_memory import GIB
from jaxopt_llm.planning.memory import Activations, KnownShapes, LiveArray, Memory
from jaxopt_llm.step.program import make_program

KNOWN = KnownShapes(
    gradients={(36, 640): "segment_0/block_0/mlp/up", (640,): "non_layer/final_norm/scale"},
    saved={(4, 36, 128): "block_input", (4, 8, 36, 128): "query, key"},
    fetched={(40, 640)},
)


def buffer(source: str, opcode: str, shape: tuple[int, ...], dtype: str = "f32") -> Buffer:
    return Buffer(math.prod(shape) * 4, dtype, shape, opcode, source)


@pytest.mark.parametrize(
    ("source", "opcode", "shape", "kind", "name"),
    [
        ("jit(step)/jvp()/while/body/gather_weight/sharding_constraint", "fusion", (8,), "gathered_weights",
         "forward gather_weight/sharding_constraint"),
        ("jit(step)/transpose(jvp(weight_gradient))/scatter-add", "fusion", (8,), "gradients", "backward scatter-add"),
        ("", "reduce-scatter", (8,), "gradients", "reduce-scatter"),
        ("jit(step)/transpose(jvp())/while", "while", (1, 36, 640), "gradients",
         "gradient of segment_0/block_0/mlp/up"),
        ("jit(step)/update/while/body/mul", "fusion", (8,), "optimizer", "update/mul"),
        ("jit(step)/jvp()/while", "while", (36, 4096, 640), "activations", "forward while"),
        ("jit(step)/jvp()/while/body/dynamic_slice", "fusion", (1, 40, 640), "gathered_weights",
         "forward dynamic_slice"),
        ("jit(step)/jvp()/while/body/add", "fusion", (1, 40, 640), "activations", "forward add"),
        ("jit(step)/forward/while", "while", (36, 1, 600), "activations", "forward"),
        ("jit(step)/vmap(transpose(jvp()))/while", "while", (1, 36, 640), "gradients",
         "gradient of segment_0/block_0/mlp/up"),
        ("jit(step)/vmap(jvp())/while", "while", (36, 1, 640), "activations", "forward while"),
        ("", "while", (36, 1, 4, 8, 128), "activations", "query, key of all layers"),
        ("jit(step)/(jvp()/while/body/a/b/c/d:transpose(jvp())/e)", "fusion", (8,), "activations", "backward b/c/d"),
        ("", "copy", (8,), "other", "copy"),
    ],
)  # fmt: skip
def test_temporaries_are_classified_and_named(
    source: str, opcode: str, shape: tuple[int, ...], kind: str, name: str
) -> None:
    each = buffer(source, opcode, shape)
    assert (memory.classify(each, KNOWN), memory.name_buffer(each, KNOWN)) == (kind, name)


def test_memory_tables() -> None:
    held = Memory(3 * GIB, GIB // 2, 6 * GIB, 4 * GIB, 0, GIB // 4)
    arrays = (
        LiveArray(2 * GIB, "float32[32,512,11008]", "optimizer", "moments segment_0/0/mu/block_0/mlp/up"),
        LiveArray(GIB, "2 × bf16[32,4,4096,4096]", "gathered_weights", "forward gather_weight"),
    )
    assert [*memory.format_kinds(held), *memory.format_largest(arrays)] == [
        "memory of each GPU         GiB",
        "  parameters              3.00",
        "  gradients               0.50",
        "  optimizer               6.00",
        "  activations             4.00",
        "  gathered weights        0.00",
        "  other                   0.25",
        "  peak                   13.75",
        "largest arrays",
        "  optimizer               2.00   moments segment_0/0/mu/block_0/mlp/up: float32[32,512,11008]",
        "  gathered weights        1.00   forward gather_weight: 2 × bf16[32,4,4096,4096]",
    ]


def test_known_shapes_of_an_interleaved_stage() -> None:
    """Check the gradients of all chunks and of one, and the inputs that wait on a stage."""
    model = replace(toy.CONFIG, layers=8, pattern=("global",))
    placement = toy.placement(pipeline=2, tensor=2)
    config = Config(
        model=model,
        training=TrainingConfig(batch_size=8, sequence_length=16, accumulation=4),
        mesh=MeshConfig(pipeline=2, tensor=2),
        pipeline=PipelineConfig("interleaved", 2),
    )
    known = KnownShapes.from_program(make_program(config, placement), config, placement)
    width, mlp = model.width, model.mlp_width // 2
    for layers in ((2, 2), (4,), (2,)):  # as stored, summed, of one chunk
        assert "segment_0/block_0/mlp/up" in known.gradients[(*layers, width, mlp)]
    waiting = buffer("jit(step)/shard_map/while", "while", (5, 2, 16 // 2, width))
    assert memory.classify(waiting, known) == "activations"
    assert memory.name_buffer(waiting, known) == "chunk inputs of all layers"


def test_known_shapes_of_layers_with_experts() -> None:
    """Check the rows of a device's experts, from its own and others' tokens, and those of the shared expert."""
    model = replace_fields(
        toy.UNIFORM,
        {
            "layers": 3,
            "moe.experts": 8,
            "moe.experts_per_token": 3,
            "moe.expert_width": 20,
            "moe.shared_expert_width": 12,
        },
    )
    placement, training = toy.placement(expert=4, tensor=2), TrainingConfig(batch_size=8, sequence_length=16)
    placement = replace(placement, sharding=ShardingConfig(expert_exchange="gather"))
    config = Config(model=model, training=training, remat=RematConfig("none"))
    known = KnownShapes.from_program(make_program(config, placement), config, placement)

    def name(*shape: int) -> str:
        return memory.name_buffer(buffer("jit(step)/jvp()/while", "while", (3, *shape)), known)

    rows = 8 * 16 * 2  # all tokens, each with two choices that can be this device's experts
    assert name(rows, 20 // 2) == "mlp_gate, mlp_up of all layers"
    assert name(rows, model.width) == "expert_rows of all layers"
    assert name(2, 16, 12 // 2) == "mlp_gate, mlp_up of all layers"
    kept = replace(config, remat=RematConfig("dots"))
    assert "expert_rows" not in dict(Activations(kept, placement).list_saved())


def test_saved_latents() -> None:
    """Check that latents are whole on the devices along `tensor`, which divides heads."""
    switches = {"kv_heads": 4, "head_dim": 10, "mla.kv_rank": 8, "mla.rotary_head_dim": 4, "mla.value_head_dim": 3}
    training, placement = TrainingConfig(batch_size=2, sequence_length=16), toy.placement(tensor=2)
    remat = RematConfig("save_qkv")
    latents = replace_fields(toy.UNIFORM, switches)
    with_queries, without_queries, ordinary = (
        dict(reversed(Activations(Config(model=model, training=training, remat=remat), placement).list_saved()))
        for model in (replace_fields(latents, {"mla.query_rank": 6}), latents, toy.UNIFORM)
    )
    assert {name: shape[2:] for name, shape in with_queries.items()} == {
        "block_input": (16,),
        "query_latent": (6,),
        "latent": (8,),
        "rotary_key": (4,),
        "query": (2, 10),
        "key": (2, 6),
        "value": (2, 3),
        "attention": (2, 3),
    }
    assert with_queries.keys() - without_queries.keys() == {"query_latent"}
    assert without_queries.keys() - ordinary.keys() == {"latent", "rotary_key"}
