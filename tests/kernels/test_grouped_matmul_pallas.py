"""Pallas kernels of grouped matmul: the tiles of their programs, reads and writes, and their programs for GPUs.

Their results in the interpreter are in test_grouped_matmul.py. The interpreter runs the kernels' Python, masks and
loops, not Triton. Only a GPU can show rounding on tensor cores, registers and speed.
"""

import functools
import itertools
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
import test_grouped_matmul as products
import toy
from jax.extend.core import jaxprs_in_params
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from marks import slow

from jaxopt_llm.compiler import hlo, topology
from jaxopt_llm.compiler.topology import gpu_topology
from jaxopt_llm.kernels import grouped_matmul_pallas as kernel
from jaxopt_llm.kernels.grouped_matmul_pallas import BLOCKS, Blocks

pytestmark = pytest.mark.core


@pytest.mark.parametrize("length, groups, block", [(7, 3, 2), (8, 3, 4), (1, 3, 4), (8, 3, 1)])
def test_tiles_cover_every_row_of_a_group_once(length: int, groups: int, block: int) -> None:
    """Check all possible sizes."""
    every = [each for each in itertools.product(range(length + 1), repeat=groups) if sum(each) <= length]
    all_tiles = jax.jit(jax.vmap(lambda sizes: kernel._tiles(sizes, length, block)))(np.array(every, np.int32))
    most = 0
    for sizes, tiles in zip(every, np.asarray(all_tiles), strict=True):
        group_of_row = np.repeat(np.arange(groups + 1), (*sizes, length - sum(sizes)))
        found = np.full(length, -1)
        for group, begin, end in tiles:
            rows = slice(begin, min(begin + block, end))
            assert (found[rows] == -1).all() and (group_of_row[rows] == group).all()
            found[rows] = group
        assert (found == group_of_row).all()
        most = max(most, int((tiles[:, 1] < tiles[:, 2]).sum()))
    assert most == len(tiles)  # no more than the worst sizes need


@pytest.mark.parametrize("rows, columns", [(1, 1), (3, 5), (8, 3), (19, 4)])
def test_programs_take_every_tile_once_and_rows_of_a_band_together(rows: int, columns: int) -> None:
    row, column = (
        np.asarray(each)
        for each in jax.vmap(lambda i: kernel._locate_tile(i, rows, columns))(jnp.arange(rows * columns))
    )
    assert set(zip(row.tolist(), column.tolist(), strict=True)) == set(itertools.product(range(rows), range(columns)))
    band = row // kernel.BAND
    assert (np.diff(band) >= 0).all()
    assert (np.diff(column)[np.diff(band) == 0] >= 0).all()


def test_sizes_of_more_rows_than_there_are() -> None:
    """Check that nothing after the last row is read or written."""
    sizes = np.array([3, 9, 4], np.int32)
    tiles, bounds = np.asarray(kernel._tiles(sizes, 8, 4)), np.stack(kernel._bounds(sizes, 8))
    assert tiles[:, 2].max() == bounds.max() == 8
    assert (bounds[0] <= bounds[1]).all()


def test_programs_run_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the programs in reverse: in order, each program would repair what the previous one overwrote."""
    locate = kernel._locate_tile
    monkeypatch.setattr(kernel, "_locate_tile", lambda i, rows, columns: locate(rows * columns - 1 - i, rows, columns))
    for sizes in ("cut blocks", "one row left"):
        case = products.arrays(products.SIZES[sizes])
        implementation = products.Interpreted(Blocks(8, 16, 8, 4, 2))
        products.assert_equal(products.run.__wrapped__(implementation)(*case), case)


def test_loads_and_stores_are_masked() -> None:
    """Check the masks, as the interpreter drops writes and pads reads after the last row, but a GPU does not."""
    case = products.arrays(products.SIZES["cut blocks"])
    implementation = products.Interpreted(Blocks(8, 16, 8, 4, 2))
    whole = functools.partial(products.forward_and_backward, implementation, None)
    bodies = [each.params["jaxpr"] for each in equations(jax.make_jaxpr(whole)(*case).jaxpr, "pallas_call")]
    assert len(bodies) == 3
    loads, stores = (
        [each.params["args_tree"].unflatten(each.invars) for body in bodies for each in equations(body, name)]
        for name in ("masked_load", "masked_swap")
    )
    assert len(loads) == 6 and all(mask is not None for _, _, mask, _ in loads)
    assert len(stores) == 3 and all(mask is not None for _, _, _, mask in stores)


def equations(jaxpr: Any, name: str) -> list[Any]:
    """List the equations of this primitive, also inside other equations, except kernels."""
    found = []
    for each in jaxpr.eqns:
        if each.primitive.name == name:
            found.append(each)
        else:
            found += [inner for body in jaxprs_in_params(each.params) for inner in equations(body, name)]
    return found


def test_unsupported_calls() -> None:
    assert not kernel.problems(jnp.bfloat16, (8, 0))
    dtype, capability = kernel.problems(jnp.float64, (7, 5))
    assert "float64" in dtype and "xla" in dtype and "(7, 5)" in capability


@pytest.mark.gpu
@pytest.mark.parametrize(
    "dtype, precision, tolerance",
    [("float32", "highest", 1e-5), ("float32", "default", 5e-3), ("float16", None, 2e-3), ("bfloat16", None, 1e-2)],
)
def test_results_on_a_gpu_match_the_reference(
    gpu: jax.Device, dtype: str, precision: str | None, tolerance: float
) -> None:
    """Compare each array as a whole, relative to its norm, for sizes that no block divides, and odd sizes."""
    implementation = products.Interpreted(BLOCKS[jnp.dtype(dtype).itemsize]) if gpu.platform == "cpu" else kernel
    for sizes, rows, inputs, outputs in (
        ((150, 0, 129, 1, 20), 310, 136, 264),
        ((5, 60), 66, 33, 35),
        ((0, 0), 1, 16, 16),
    ):
        case = products.arrays(sizes, rows, inputs, outputs, jnp.dtype(dtype))
        with jax.default_matmul_precision(precision):
            found = jax.jit(functools.partial(products.forward_and_backward, implementation, None))(*case)
        left = slice(sum(sizes), None)
        for name, got, want in zip(products.NAMES, found, products.expected(*case), strict=True):
            assert got.devices() == {gpu}
            assert toy.distance(got, want) < tolerance if want.any() else not got.any(), name
            assert name == "dw" or not got[left].any()


# ---- Programs for GPUs, compiled but not run.


def program(
    chip: str,
    dtype: Any = jnp.bfloat16,
    *,
    rows: int = 2048,
    inputs: int = 512,
    outputs: int = 1536,
    groups: int = 8,
    options: dict[str, Any] | None = None,
) -> jax.stages.Compiled:
    """Compile forward and backward. options: XLA's, to compile also to machine code, by NVIDIA's assembler."""
    mesh = Mesh(np.array(gpu_topology(chip, gpus_per_host=1)), ("data",), axis_types=(AxisType.Auto,))

    def array(*shape: int, dtype: Any = dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    mapped = jax.shard_map(
        functools.partial(products.forward_and_backward, kernel, None),
        mesh=mesh,
        in_specs=PartitionSpec(),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    operands = array(rows, inputs), array(groups, inputs, outputs), array(rows, outputs), array(groups, dtype=jnp.int32)
    lowered = jax.jit(mapped).trace(*operands).lower(lowering_platforms=("cuda",))
    return topology.compile_without_gpu(lowered) if options is None else topology.run_xla(lowered, options)


@pytest.mark.parametrize("chip", ["a100", "4090", "h100", "b200"])
@pytest.mark.parametrize(
    "dtype, precision", [(jnp.bfloat16, None), (jnp.float16, None), (jnp.float32, "default"), (jnp.float32, "highest")]
)
def test_blocks_fit_into_shared_memory(chip: str, dtype: Any, precision: str | None) -> None:
    """Otherwise XLA would not compile."""
    with jax.default_matmul_precision(precision):
        text = str(program(chip, dtype).as_text())
    assert text.count("__gpu$xla.gpu.triton") == 3


def test_the_program_holds_no_array_of_every_group_and_every_row() -> None:
    """Check that there is no copy of the matrices either, transposed or not, even in the buffer of a result.

    There are only arguments, the kernels' results, and the small arrays that tell programs where to work.
    """
    compiled = program("h200", rows=16384, inputs=4096, outputs=14336)
    arrays = programs.list_array_shapes(str(compiled.as_text()))
    assert {each.opcode for each in arrays if each.bytes > 16384} == {"parameter", "custom-call", "tuple"}
    assert hlo.read_memory(compiled).temporaries < 16384


def test_calls_are_known_by_name() -> None:
    """Check the names by which the FLOP counter knows the calls: 2 × rows × the matrix of a group each."""
    text = str(program("h200").as_text())
    assert [text.count(f'name = "{name}"') for name in ("_grouped_matmul", "_grouped_matmul_weight_gradient")] == [2, 1]


@pytest.mark.skipif(shutil.which("ptxas") is None, reason="NVIDIA's ptxas is not installed")
@pytest.mark.parametrize("chip", ["4090", "h100", *slow("a100", "b200")])
@pytest.mark.parametrize("dtype, precision", [(jnp.bfloat16, None), (jnp.float32, "default"), (jnp.float32, "highest")])
def test_no_register_is_spilled(chip: str, dtype: Any, precision: str | None) -> None:
    """Compile for 128 matrices of a real size, whose bytes need 64-bit addresses."""
    options = {
        "xla_gpu_fail_ptx_compilation_on_register_spilling": True,
        "xla_backend_optimization_level": 3,  # this and the next option are off in other tests
        "xla_llvm_disable_expensive_passes": False,
    }
    with jax.default_matmul_precision(precision):
        program(chip, dtype, rows=16384, inputs=4096, outputs=14336, groups=128, options=options)
