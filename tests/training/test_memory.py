"""What is held at a step's peak, by kind and by name, as it is told."""

import math
from dataclasses import replace

import pytest
import toy

from jaxopt_llm.execution.schedules import PipelineConfig
from jaxopt_llm.execution.stacks import RematConfig
from jaxopt_llm.parallel.buffers import Buffer
from jaxopt_llm.training import memory
from jaxopt_llm.training.activations import Activations
from jaxopt_llm.training.lora import LoraConfig
from jaxopt_llm.training.memory import GIB, Held, Known, Memory
from jaxopt_llm.training.optimizer import OptimizerConfig
from jaxopt_llm.training.program import make_program
from jaxopt_llm.training.schedule import ScheduleConfig
from jaxopt_llm.training.step import TrainingConfig

KNOWN = Known(
    gradients={(36, 640): "segment_0/block_0/mlp/up", (640,): "outer/final_norm/scale"},
    kept={(4, 36, 128): "block_input", (4, 8, 36, 128): "query, key"},
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
        ("jit(step)/transpose(jvp())/while", "while", (1, 36, 640), "gradients", "of segment_0/block_0/mlp/up"),
        ("jit(step)/update/while/body/mul", "fusion", (8,), "optimizer", "update/mul"),
        ("jit(step)/jvp()/while", "while", (36, 4096, 640), "activations", "forward while"),
        ("jit(step)/jvp()/while/body/dynamic_slice", "fusion", (1, 40, 640), "gathered_weights",
         "forward dynamic_slice"),
        ("jit(step)/jvp()/while/body/add", "fusion", (1, 40, 640), "activations", "forward add"),
        ("jit(step)/forward/while", "while", (36, 1, 600), "activations", "forward"),
        ("jit(step)/vmap(transpose(jvp()))/while", "while", (1, 36, 640), "gradients", "of segment_0/block_0/mlp/up"),
        ("jit(step)/vmap(jvp())/while", "while", (36, 1, 640), "activations", "forward while"),
        ("", "while", (36, 1, 4, 8, 128), "activations", "of all layers, query, key"),
        ("jit(step)/(jvp()/while/body/a/b/c/d:transpose(jvp())/e)", "fusion", (8,), "activations", "backward b/c/d"),
        ("", "copy", (8,), "other", "copy"),
    ],
)  # fmt: skip
def test_what_a_temporary_is(source: str, opcode: str, shape: tuple[int, ...], kind: str, name: str) -> None:
    each = buffer(source, opcode, shape)
    assert (memory.kind(each, KNOWN), memory.source_name(each, KNOWN)) == (kind, name)


def test_the_table() -> None:
    held = Memory(3 * GIB, GIB // 2, 6 * GIB, 4 * GIB, 0, GIB // 4)
    arrays = (
        Held(2 * GIB, "float32[32,512,11008]", "optimizer", "moments segment_0/0/mu/block_0/mlp/up"),
        Held(GIB, "2 × bf16[32,4,4096,4096]", "gathered_weights", "forward gather_weight"),
    )
    assert [*memory.kind_lines(held), *memory.largest_lines(arrays)] == [
        "memory of each GPU         GiB",
        "  parameters              3.00",
        "  gradients               0.50",
        "  optimizer               6.00",
        "  activations             4.00",
        "  gathered weights        0.00",
        "  other                   0.25",
        "  peak                   13.75",
        "the largest arrays",
        "  optimizer               2.00   moments segment_0/0/mu/block_0/mlp/up: float32[32,512,11008]",
        "  gathered weights        1.00   forward gather_weight: 2 × bf16[32,4,4096,4096]",
    ]


def test_what_an_interleaved_stage_sums_and_keeps_is_known() -> None:
    """Gradients of all its runs of layers, and of one; and what waits between the stages."""
    model = replace(toy.CONFIG, layers=8, pattern=("global",))
    placement = toy.placement(pipeline=2, tensor=2)
    training, pipeline = (
        TrainingConfig(batch_size=8, sequence_length=16, accumulation=4),
        PipelineConfig("interleaved", 2),
    )
    arguments = (OptimizerConfig(), ScheduleConfig(1, 10), RematConfig(), LoraConfig(), placement)
    program = make_program(model, training, *arguments, pipelined=pipeline)
    known = Known.of(program, Activations(model, training, placement), RematConfig(), waiting=5)
    width, mlp = model.width, model.mlp_width // 2
    for layers in ((2, 2), (4,), (2,)):  # as they rest, summed, of one run
        assert "segment_0/block_0/mlp/up" in known.gradients[(*layers, width, mlp)]
    waiting = buffer("jit(step)/shard_map/while", "while", (5, 2, 16 // 2, width))
    assert memory.kind(waiting, known) == "activations"
    assert memory.source_name(waiting, known) == "of all layers, inputs of runs of them"


def test_what_layers_with_experts_keep_is_known() -> None:
    """Rows for the experts of a device, of its own and of others' tokens, and what the shared expert keeps beside."""
    model = replace(toy.UNIFORM, layers=3, experts=8, experts_per_token=3, expert_width=20, shared_expert_width=12)
    placement, training = toy.placement(expert=4, tensor=2), TrainingConfig(batch_size=8, sequence_length=16)
    remat = RematConfig("none")
    arguments = (OptimizerConfig(), ScheduleConfig(1, 10), remat, LoraConfig(), placement)
    known = Known.of(make_program(model, training, *arguments), Activations(model, training, placement), remat, 0)

    def name(*shape: int) -> str:
        return memory.source_name(buffer("jit(step)/jvp()/while", "while", (3, *shape)), known)

    rows = 8 * 16 * 2  # of all tokens, two choices each that can be this device's
    assert name(rows, 20 // 2) == "of all layers, mlp_gate, mlp_up"
    assert name(rows, model.width) == "of all layers, rows for experts"
    assert name(2, 16, 12 // 2) == "of all layers, mlp_gate, mlp_up"
    assert "rows for experts" not in str(Activations(model, training, placement).kept(RematConfig("dots")))


def test_of_latents_it_is_known_what_a_layer_keeps_of_them() -> None:
    """Whole on the devices along `tensor`, which divides heads."""
    switches = {"kv_heads": 4, "head_dim": 10, "latent_rank": 8, "rotary_head_dim": 4, "value_head_dim": 3}
    training, placement = TrainingConfig(batch_size=2, sequence_length=16), toy.placement(tensor=2)
    latents = replace(toy.UNIFORM, **switches)
    with_queries, without_queries, ordinary = (
        dict(Activations(model, training, placement).kept(RematConfig("save_qkv")))
        for model in (replace(latents, query_rank=6), latents, toy.UNIFORM)
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
