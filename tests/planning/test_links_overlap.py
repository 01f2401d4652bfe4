"""Time in which a program waits for its collectives: programs whose kernels take a known time, and a compiled step."""

import jax
import pytest

from jaxopt_llm.compiler import hlo, topology
from jaxopt_llm.compiler.chips import CHIPS
from jaxopt_llm.compiler.instructions import parse_module
from jaxopt_llm.config import cli, fields
from jaxopt_llm.parallel.mesh import make_mesh
from jaxopt_llm.parallel.placement import Placement
from jaxopt_llm.planning.links import find_exposed_seconds, sum_traffic
from jaxopt_llm.planning.search.roofline import seconds_in_memory
from jaxopt_llm.step.program import make_program

CHIP = CHIPS["h100"]
KERNEL = seconds_in_memory(2 * 2**20, CHIP)  # of each `copy` below


def module(*entry: str, body: str = "") -> str:
    """Return a program that runs these instructions; body: the instructions of a loop with 4 trips."""
    loop = f"""%body (b: bf16[524288]) -> bf16[524288] {{
  %b = bf16[524288]{{0}} parameter(0)
{body}
  ROOT %result = bf16[524288]{{0}} bitcast(%b)
}}

%condition (c: bf16[524288]) -> pred[] {{
  %c = bf16[524288]{{0}} parameter(0)
  ROOT %yes = pred[] constant(true)
}}
"""
    lines = "\n".join(f"  {line}" for line in entry)
    return f"HloModule step, is_scheduled=true\n\n{loop if body else ''}\nENTRY %main (x: bf16[524288]) -> bf16[524288] {{\n  %x = bf16[524288]{{0}} parameter(0)\n{lines}\n  ROOT %out = bf16[524288]{{0}} bitcast(%x)\n}}\n"  # noqa: E501


def copy(name: str) -> str:
    return f"%{name} = bf16[524288]{{0}} copy(%x)"


def start(name: str) -> str:
    return f"%{name} = (bf16[65536]{{0}}, bf16[524288]{{0}}) all-gather-start(%x)"


def done(name: str) -> str:
    return f"%{name}.done = bf16[524288]{{0}} all-gather-done(%{name})"


LOOP = (
    '%loop = bf16[524288]{0} while(%x), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"4"}}'
)


def waits(text: str, **seconds: float) -> dict[str, float]:
    """Return the exposed time of each collective, in kernels; seconds: the time of a run, in kernels."""
    found = find_exposed_seconds(parse_module(text), {name: KERNEL * each for name, each in seconds.items()}, CHIP)
    return {name: each / KERNEL for name, each in found.items()}


@pytest.mark.core
def test_a_collective_is_hidden_for_the_time_of_the_kernels_next_to_it() -> None:
    text = module(copy("before"), start("a"), copy("one"), copy("two"), done("a"), copy("after"))
    assert waits(text, a=1.5) == {"a": pytest.approx(0)}
    assert waits(text, a=5) == {"a": pytest.approx(3)}


def test_a_synchronous_collective_is_exposed() -> None:
    text = module(copy("before"), "%a = bf16[524288]{0} all-reduce(%x)", copy("after"))
    assert waits(text, a=2) == {"a": pytest.approx(2)}


def test_collectives_run_one_after_another() -> None:
    text = module(start("a"), start("b"), copy("one"), copy("two"), done("b"), done("a"))
    # `b` ends after 4 kernels. Only two kernels run next to `a` and `b`; the program waits for each in its own time.
    assert waits(text, a=1, b=3) == {"a": pytest.approx(0), "b": pytest.approx(2)}
    assert waits(text, a=3, b=1) == {"a": pytest.approx(1), "b": pytest.approx(1)}


def test_waits_in_a_loop_count_in_each_trip() -> None:
    body = "\n".join("  " + each.replace("%x", "%b") for each in (start("a"), copy("one"), done("a")))
    assert waits(module(LOOP, body=body), a=3) == {"a": pytest.approx(4 * 2)}


def test_a_loop_hides_a_collective_by_the_time_that_its_own_collectives_leave() -> None:
    body = "\n".join("  " + each.replace("%x", "%b") for each in (start("a"), copy("one"), copy("two"), done("a")))
    text = module(start("outer"), LOOP, done("outer"), body=body)
    # The loop takes 8 kernels, and its own collectives use the links for 4 of them.
    assert waits(text, outer=4, a=1) == {"outer": pytest.approx(0), "a": pytest.approx(0)}
    assert waits(text, outer=7, a=1) == {"outer": pytest.approx(3), "a": pytest.approx(0)}


def test_a_wrapped_collective_ends_at_its_done() -> None:
    wrapped = "%wrapped (w: bf16[524288]) -> bf16[65536] {\n  %w = bf16[524288]{0} parameter(0)\n  ROOT %a = bf16[65536]{0} reduce-scatter(%w)\n}\n"  # noqa: E501
    text = module(
        "%s = ((bf16[524288]{0}), bf16[65536]{0}) async-start(%x), calls=%wrapped",
        copy("one"),
        "%u = ((bf16[524288]{0}), bf16[65536]{0}) async-update(%s), calls=%wrapped",
        copy("two"),
        "%d = bf16[65536]{0} async-done(%u), calls=%wrapped",
    )
    assert waits(text.replace("ENTRY", wrapped + "\nENTRY"), a=3) == {"a": pytest.approx(1)}


EXPOSED = 0.1  # share of the time of a step's collectives


def exposed_share(*options: str, hosts: int = 1) -> float:
    """Return the exposed share of the collectives of four layers of Llama 3 8B under ZeRO-3 on hosts with 8 H100s."""
    changes = {"model.layers": 4, "model.vocabulary_size": 8192, "training.attention": "cudnn", "remat.policy": "none"}
    changes |= {"data.documents_per_row": 1, "xla.options": ("xla_gpu_enable_triton_gemm=False", *options)}
    changes |= {"mesh.fsdp": 8 * hosts, "training.batch_size": 16 * hosts}
    config = fields.replace_fields(cli.load_recipe("llama3_8b.py"), changes)
    mesh = make_mesh(config.mesh, topology.gpu_topology("h100", hosts))
    placement = Placement(mesh, config.sharding, config.precision, config.offload)
    program = make_program(config, placement, keep_frozen=False)
    lowered = topology.lower_without_gpu(program.step, program.state, program.batch)
    text = str(topology.compile_without_gpu(lowered).as_text())
    traffic = [*sum_traffic(hlo.list_collectives(text, mesh), mesh, CHIP, 8)]
    return sum(each.seconds * (1 - each.overlapped) for each in traffic) / sum(each.seconds for each in traffic)


@pytest.mark.core
@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="XLA of jax 0.10 exposes more: docs/sharding.md")
def test_the_collectives_of_zero_3_are_hidden() -> None:
    assert exposed_share() < EXPOSED
    assert exposed_share("xla_gpu_enable_latency_hiding_scheduler=False") > 2 * EXPOSED


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="XLA of jax 0.10 exposes more: docs/sharding.md")
def test_xla_takes_each_host_for_an_nvlink_domain_of_its_own() -> None:
    """Check that it schedules collectives between hosts by the network: otherwise twice as much is exposed."""
    assert exposed_share(hosts=2) < EXPOSED
