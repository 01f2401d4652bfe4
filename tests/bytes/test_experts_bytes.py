"""What a mixture of experts costs: what tokens travel, and what a device holds, read off programs for eight H200s."""

import math
from typing import Any

import pytest
from compiled_steps import ROWS, SEQUENCE, WIDTH, Compiled, compiled
from marks import slow
from test_attention_bytes import TRITON

from jaxopt_llm.compiler import hlo, instructions, topology
from jaxopt_llm.compiler.chips import CHIPS
from jaxopt_llm.compiler.topology import gpu_topology
from jaxopt_llm.config import MeshConfig, ShardingConfig, cli
from jaxopt_llm.parallel.mesh import make_mesh
from jaxopt_llm.parallel.placement import Placement
from jaxopt_llm.planning import breakdown
from jaxopt_llm.planning.free_memory import count_chip_bytes
from jaxopt_llm.planning.search.roofline import Cluster
from jaxopt_llm.planning.settings_choice import list_candidates
from jaxopt_llm.step.program import make_program

ON_64 = MeshConfig(fsdp=8, expert=8)
LAYERS, EXPERTS, INNER, CHOSEN = 8, 8, 1024, 2
MIXTURE = (("moe.experts", EXPERTS), ("moe.expert_width", INNER), ("moe.experts_per_token", CHOSEN))
GROUPS = {"moe.router": "sigmoid", "moe.router_groups": 4, "moe.router_groups_per_token": 2, "moe.router_bias": True}
SPLIT, SPLIT_BY_TENSOR = MeshConfig(fsdp=2, expert=4), MeshConfig(fsdp=2, expert=2, tensor=2)
ON_EXPERT_ALONE = MeshConfig(expert=8)
MESHES = [SPLIT, SPLIT_BY_TENSOR, *slow((ON_EXPERT_ALONE,))]


def mixed(
    mesh: MeshConfig,
    remat: str = "full",
    exchange: str = "gather",
    sequence_parallel: bool = False,
    **switches: Any,
) -> Compiled:
    sharding = {"expert_exchange": exchange, "sequence_parallel": sequence_parallel}
    return compiled(
        LAYERS, mesh, 3, remat, switches=(*MIXTURE, *switches.items()), shape=(rows(mesh), SEQUENCE), **sharding
    )


def tokens_over(axis: str, step: Compiled) -> list[hlo.Collective]:
    """Not weights, nor their gradients, which XLA sums over one axis after the other."""
    found = [each for each in step.collectives if each.axes == (axis,)]
    return [each for each in found if "shard_map" in each.source]


def rows(mesh: MeshConfig) -> int:
    return max(ROWS, mesh.size("fsdp") * mesh.expert)


@pytest.mark.parametrize("mesh", [SPLIT, *slow((SPLIT_BY_TENSOR,), (ON_64,))])
@pytest.mark.slow
def test_gathered_tokens_travel_once_there_and_once_back(mesh: MeshConfig) -> None:
    """Over `expert` alone, whatever the number of experts per token: brought together forward, again in the forward
    that is run again, and their results' gradients backward; summed on the way back forward and backward."""
    sent = tokens_over("expert", mixed(mesh))
    together = (
        rows(mesh) // mesh.size("fsdp") * SEQUENCE * WIDTH * 2
    )  # bytes of what the devices along `expert` have of the batch
    by_kind = {
        kind: sum(each.array_bytes * each.times for each in sent if each.kind == kind) / LAYERS
        for kind in ("all-gather", "reduce-scatter")
    }
    assert by_kind["reduce-scatter"] == pytest.approx(2 * together, rel=0.02)
    assert by_kind["all-gather"] == pytest.approx(3 * together, rel=0.05)  # and a few numbers for each choice
    assert not [each for each in sent if each.kind not in by_kind]


@pytest.mark.parametrize(
    "mesh", [pytest.param(SPLIT, marks=pytest.mark.core), *slow((SPLIT_BY_TENSOR,), (ON_EXPERT_ALONE,), (ON_64,))]
)
def test_choices_travel_with_their_room(mesh: MeshConfig) -> None:
    """Over `expert` alone: to their experts forward, in the forward that is run again, and their results' gradients
    backward; back forward and backward."""
    sent = tokens_over("expert", mixed(mesh, exchange="all_to_all"))
    own = rows(mesh) // (mesh.size("fsdp") * mesh.expert) * SEQUENCE
    room = math.ceil(ShardingConfig().expert_room * own * CHOSEN / mesh.expert)  # rows for the experts of one device
    once = mesh.expert * room * WIDTH * 2
    tokens = (
        sum(each.wire_bytes * each.times for each in sent if each.kind == "all-to-all" and each.array_bytes >= once)
        / LAYERS
    )
    assert tokens == 5 * once * (mesh.expert - 1) / mesh.expert
    # And a few numbers for each choice.
    assert sum(each.wire_bytes * each.times for each in sent) / LAYERS < 1.05 * tokens


@pytest.mark.parametrize(
    ("exchange", "sequence_parallel"),
    [("gather", False), ("all_to_all", True), *slow(("gather", True), ("all_to_all", False))],
)
@pytest.mark.slow
def test_tensor_sums_a_devices_own_tokens(exchange: str, sequence_parallel: bool) -> None:
    """What comes together over `expert`, after that has divided it; as Megatron's sequence parallelism has it, in parts
    that are gathered on the way there: forward, in the forward that is run again, and backward."""
    step = mixed(SPLIT_BY_TENSOR, exchange=exchange, sequence_parallel=sequence_parallel)
    own = rows(SPLIT_BY_TENSOR) // (SPLIT_BY_TENSOR.size("fsdp") * SPLIT_BY_TENSOR.expert) * SEQUENCE * WIDTH * 2
    moved = dict.fromkeys(("all-reduce", "reduce-scatter", "all-gather"), 0.0)
    for each in tokens_over("tensor", step):
        moved[each.kind] += each.array_bytes * each.times / LAYERS / own
    expected = (0, 2, 3) if sequence_parallel else (2, 0, 0)
    assert list(moved.values()) == pytest.approx(expected, abs=0.04)  # and logits, and a few numbers for each choice


@pytest.mark.parametrize("groups", [{}, pytest.param(GROUPS, marks=pytest.mark.slow)], ids=["", "groups"])
def test_over_fsdp_no_token_travels(groups: dict[str, Any]) -> None:
    """Nor its choice: weights come together there, and their gradients are summed."""
    step = mixed(SPLIT_BY_TENSOR, **groups)
    sources = {each.source for each in step.collectives if "fsdp" in each.axes and each.kind == "all-gather"}
    assert sources and all("gather_weight" in source for source in sources), sources


@pytest.mark.parametrize(("exchange", "least"), [("gather", 5), *slow(("all_to_all", 2))])
@pytest.mark.slow
def test_a_shared_expert_is_computed_beside_the_exchange(exchange: str, least: int) -> None:
    """Of five in a layer: there and back, there again, and both again backward."""
    switches = (*MIXTURE, ("moe.shared_expert_width", 2 * INNER))
    text = compiled(4, SPLIT, 3, attention="pallas", switches=switches, expert_exchange=exchange, shape=(8, 8192)).text
    started: dict[str, int] = {}
    products, beside = 0, []
    for computation, instruction, _ in instructions.walk_instructions(text):
        products += "__cublas" in instruction.attributes or instruction.find(TRITON) is not None
        if instruction.opcode.removesuffix("-start") in hlo.COLLECTIVES and "shard_map" in instruction.source:
            size = sum(array.bytes for name in instruction.operands for array in computation[name].results)
            if size >= 8192 * WIDTH * 2:
                started[instruction.name] = products
        elif instruction.opcode.endswith("-done") and instruction.operands[0] in started:
            beside.append(products - started[instruction.operands[0]])
    assert len(beside) == 5
    assert sum(each > 0 for each in beside) >= least


def find_grouped_matmuls(text: str) -> list[tuple[int, int]]:
    """Return the rows and the rows that an even load fills of each grouped matmul that runs."""
    found = []
    for computation, instruction, run in instructions.walk_instructions(text):
        if instructions.count_runs(instruction, run) and (grouped := hlo.grouped_matmul(computation, instruction)):
            found.append((grouped.shape[0], round(grouped.filled)))
    return found


@pytest.mark.parametrize("mesh", [pytest.param(ON_EXPERT_ALONE, marks=pytest.mark.core), *slow((SPLIT,), (ON_64,))])
def test_a_step_has_few_rows_for_its_choices(mesh: MeshConfig) -> None:
    """By default: at most 1.3 for each choice, in every product of experts. `gather` has four or eight."""
    choices = rows(mesh) // (mesh.size("fsdp") * mesh.expert) * SEQUENCE * CHOSEN
    found = find_grouped_matmuls(mixed(mesh, exchange="auto").text)
    assert len(found) == 11 and {filled for _, filled in found} == {choices}
    assert max(length for length, _ in found) <= 1.3 * choices
    assert min(length for length, _ in find_grouped_matmuls(mixed(mesh).text)) >= 4 * choices


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["mixtral_8x7b.py", "qwen3_30b_a3b.py", "deepseek_v2_lite.py"])
def test_the_recipes_have_few_rows_for_their_choices(recipe: str) -> None:
    """With the first settings that a run on eight H200s tries."""
    host = Cluster("h200", 1, 8)
    (first, *_), _ = list_candidates(cli.load_recipe(recipe), host, count_chip_bytes(host.chip))
    config = first.config
    placement = Placement(make_mesh(config.mesh, gpu_topology("h200", 1, 8)), config.sharding, config.precision)
    program = make_program(config, placement, keep_frozen=False)
    lowered = topology.lower_without_gpu(program.step, program.state, program.batch)
    found = find_grouped_matmuls(str(topology.compile_without_gpu(lowered).as_text()))
    rows_of_device = config.training.batch_size // config.training.accumulation // host.devices
    choices = rows_of_device * config.training.sequence_length * config.model.moe.experts_per_token
    assert len(found) == 9 and {filled for _, filled in found} == {choices}
    assert choices <= min(found)[0] <= max(found)[0] <= 1.3 * choices


def test_matrices_of_experts_are_cast_once_a_pass() -> None:
    """Further rounds, which may not run, read the copies of the first one: no float32 matrix is copied for them."""
    text = mixed(ON_EXPERT_ALONE, exchange="auto").text
    moved = {part.name: part.bytes for part in breakdown.break_down_step(text, (), CHIPS["h200"])}
    own = LAYERS * 3 * WIDTH * INNER * EXPERTS // ON_EXPERT_ALONE.expert
    once = 2 * (4 + 2) * own  # forward and backward, read and written; other weights are a fifth of that
    assert once < moved[breakdown.CASTS] < 1.3 * once


@pytest.mark.slow
def test_rows_take_the_room_of_a_round() -> None:
    """Not that of all choices: eight devices have eight times the tokens of one, and no more rows than their share."""
    gather, rounds = (
        mixed(MeshConfig(expert=8), "none", exchange).memory.temporaries for exchange in ("gather", "all_to_all")
    )
    taken = ROWS * SEQUENCE, ShardingConfig().expert_room * SEQUENCE * CHOSEN  # one expert a device
    assert gather - rounds > 0.8 * LAYERS * (taken[0] - taken[1]) * 2 * INNER * 2  # gate and up


@pytest.mark.parametrize("mesh", MESHES)
def test_a_device_holds_its_experts_alone(mesh: MeshConfig) -> None:
    step = mixed(mesh)
    masters = step.program.state.masters["segment_0"]["block_0"]["mlp"]
    for name in ("gate", "up", "down"):
        own = masters[name].sharding.shard_shape(masters[name].shape)
        assert math.prod(own) * mesh.devices == math.prod(masters[name].shape) == LAYERS * EXPERTS * WIDTH * INNER
    # Nor are others gathered: whole over `fsdp`, divided over `expert` and `tensor`.
    gathered = [each for each in step.collectives if each.axes == ("fsdp",) and each.kind == "all-gather"]
    assert (
        max((each.array_bytes for each in gathered), default=0)
        <= 2 * 3 * EXPERTS * WIDTH * INNER * 2 / mesh.expert / mesh.tensor
    )  # three matrices, of two layers


@pytest.mark.slow
def test_groups_and_a_bias_that_follows_the_load_move_counts_alone() -> None:
    """Numbers by expert, not by token: of each layer its bias, its load, that again, and the bias's gradient."""
    moved = [sum(each.array_bytes * each.times for each in mixed(SPLIT, **more).collectives) for more in ({}, GROUPS)]
    assert 0 < moved[1] - moved[0] <= LAYERS * 5 * EXPERTS * 4


def test_products_are_the_kernels() -> None:
    """Of each matrix one forward and two backward, and of the first ones another in the forward that is run again."""
    step = mixed(SPLIT)
    names = [
        instruction.find(r'name = \\?"(_grouped_matmul\w*)')
        for _, instruction, run in instructions.walk_instructions(step.text)
        if instruction.find(TRITON)
        for _ in range(instructions.count_runs(instruction, run))
    ]
    assert names.count("_grouped_matmul") == LAYERS * (3 + 2 + 3)
    assert names.count("_grouped_matmul_weight_gradient") == LAYERS * 3


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("exchange", ["gather", "all_to_all"])
def test_products_are_counted_by_the_rows_that_are_filled_on_average(mesh: MeshConfig, exchange: str) -> None:
    """Of a token as many experts' as it is given, not those of the worst case that there is room for."""
    text = mixed(mesh, exchange=exchange).text
    without = "\n".join(
        line for line in text.splitlines() if "_grouped_matmul" not in line or "custom-call(" not in line
    )
    of_experts = hlo.count_dot_flops(text) - hlo.count_dot_flops(without)
    runs = 3 + 2 + 3 + 3  # three matrices: forward, two of them again, and twice backward
    assert of_experts == LAYERS * runs * 2 * ROWS * SEQUENCE * CHOSEN * WIDTH * INNER // mesh.devices
