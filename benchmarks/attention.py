"""Compare all implementations of attention: TFLOP/s of the forward and the backward, and distance from float32.

    python benchmarks/attention.py [--head-dims 128 64 256] [--lengths 2048 8192 32768] [--documents 1 6] [--both-ways]
                                   [--dtype bfloat16] [--only NAME ...] [--runs 5] [--json FILE] [--write-table [FILE]]
    python benchmarks/attention.py --tune [--head-dims 128] [--lengths 8192]

Runs on the first device with 16,384 tokens, 4096 / head_dim query heads and a quarter as many key-value heads. The mask
is causal; --both-ways measures without a mask, too. --documents gives the number of documents in a row: with more than
one, the mask is that of packed documents of different lengths, cuDNN is compiled for its default limit, and xla is not
timed. The implementations are ours, cuDNN among them, and tokamax's if it is installed. A call that an implementation
does not support is reported with the reason. FLOPs are four products of queries, keys and head_dim of a document in the
forward and ten in the backward, and half of them if causal; recomputation is not counted. The implementations run in
alternation; figures are medians. --json is written after each size, so that an interrupted run keeps its figures.
Distance is relative to the norm of the xla implementation in float32: once for the result, once for the gradient that
is farthest away.

--write-table writes the seconds of the causal calls into the table that `--training.attention auto` reads,
jaxopt_llm/kernels/attention_measured.json, or into FILE. It replaces older figures of the same calls. An implementation
whose rounding error is more than twice that of xla is left out.

--tune tries the tiles of the Pallas kernels one by one and prints the fastest first. On a CPU the sizes are tiny and
kernels run in the interpreter of Pallas, so the figures mean nothing.
"""

import argparse
import dataclasses
import functools
import importlib
import importlib.util
import itertools
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from outcomes import compared, save

from jaxopt_llm.core import errors
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.core.files import replace_durably
from jaxopt_llm.kernels import (
    attention_auto,
    attention_cudnn,
    attention_pallas,
    attention_triton,
    attention_xla,
    support,
)
from jaxopt_llm.kernels.attention import attend, get_compute_capability
from jaxopt_llm.kernels.attention_auto import Measurement
from jaxopt_llm.kernels.attention_pallas import BLOCKS
from jaxopt_llm.kernels.attention_types import (
    AttentionParameters,
    AttentionResiduals,
    Tile,
    Tiles,
    make_document_ranges,
)

CALLS = 10  # calls in a row per measurement: the time of a single call would include the host
ON_CPU = jax.default_backend() == "cpu"
CAPABILITY = get_compute_capability(jax.devices()[0]) or support.PALLAS_CAPABILITY  # the interpreter has none
TOKENS, WIDTH, GROUPED = (256, 128, 4) if ON_CPU else (16_384, 4096, 4)

OWN = ("xla", "pallas", "triton", "cudnn")

Attention = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]  # q, k, v -> out


@dataclass(frozen=True)
class Pallas:
    """Pallas implementation with given tiles, which runs in the interpreter on a CPU."""

    blocks: Tiles | None = None
    reads_out: ClassVar[bool] = False

    @property
    def forward(self) -> Any:
        return functools.partial(attention_pallas.forward, blocks=self.blocks, interpret=ON_CPU)

    @property
    def backward(self) -> Any:
        return functools.partial(attention_pallas.backward, blocks=self.blocks, interpret=ON_CPU)


@dataclass(frozen=True)
class Case:
    head_dim: int
    length: int
    causal: bool
    dtype: str
    documents: int = 1

    @property
    def rows(self) -> int:
        return max(TOKENS // self.length, 1)

    def segment_ids(self) -> np.ndarray:
        """Return the document of each position of a row. The documents have different lengths."""
        cuts = np.random.default_rng(0).choice(np.arange(1, self.length), self.documents - 1, replace=False)
        return np.searchsorted(np.sort(cuts), np.arange(self.length), side="right").astype(np.int32)

    def operands(self) -> tuple[jax.Array, ...]:
        """Return q, k, v and the gradient of the result."""
        rows, heads = self.rows, WIDTH // self.head_dim
        random = np.random.default_rng(0)

        def draw(heads: int) -> jax.Array:
            return jnp.asarray(random.normal(size=(rows, self.length, heads, self.head_dim)), self.dtype)

        return draw(heads), draw(max(heads // GROUPED, 1)), draw(max(heads // GROUPED, 1)), draw(heads)

    @property
    def products(self) -> float:
        """FLOPs of one product of all queries, keys and head_dim of the documents; half of them if causal."""
        pairs = int((np.bincount(self.segment_ids()).astype(np.int64) ** 2).sum())
        return 2 * self.rows * pairs * WIDTH * (0.5 if self.causal else 1.0)

    def own(self, implementation: Any, kernel: Any = None) -> Attention:
        """Return attention by an implementation. It raises ValueError for what `kernel` does not support."""
        problems = kernel.problems(self.head_dim, self.dtype, CAPABILITY) if kernel else []
        segments = 1 if self.documents == 1 else attention_cudnn.DOCUMENTS_PER_ROW
        parameters = AttentionParameters(self.head_dim**-0.5, keys_after=0 if self.causal else None, segments=segments)
        ids = self.segment_ids()

        def run(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            if problems:
                raise ValueError("; ".join(problems))
            key_ranges = make_document_ranges(jnp.broadcast_to(ids, q.shape[:2]), self.causal)
            return attend(implementation, parameters, q, k, v, key_ranges)

        return run

    def ways(self) -> dict[str, Attention]:
        found = {"xla": self.own(attention_xla), "pallas": self.own(Pallas(), attention_pallas)}
        if not ON_CPU:
            found["triton"] = self.own(attention_triton, attention_triton)
            found["cudnn"] = self.own(attention_cudnn, attention_cudnn)
            if importlib.util.find_spec("tokamax"):
                found |= {f"tokamax {name}": self.tokamax(name) for name in ("mosaic", "triton")}
        return found

    def tokamax(self, implementation: str) -> Attention:
        """Return attention by tokamax. If the package is installed but cannot be imported, a call raises that error."""
        if self.documents > 1:
            return functools.partial(refuse, ValueError("tokamax's public function takes no documents"))
        try:
            library: Any = importlib.import_module("tokamax")
        except Exception as error:  # an import may raise anything; the error is shown
            return functools.partial(refuse, error)
        return functools.partial(library.dot_product_attention, is_causal=self.causal, implementation=implementation)


def refuse(error: Exception, *_: jax.Array) -> jax.Array:
    raise error


@dataclass(frozen=True)
class Prepared:
    """Compiled forward and backward, bound to their arguments."""

    forward: Callable[[], Any]
    backward: Callable[[], Any]


def prepare(function: Attention, operands: tuple[jax.Array, ...], autotune: bool = True) -> Prepared:
    """Compile a forward and a backward. Raises the error of an implementation that does not support the call.

    Args:
        operands: q, k, v and the gradient of the result.
        autotune: whether XLA looks for the fastest matmuls, which takes a minute for the many shapes of `xla`.
    """
    q, k, v, gradient = operands
    options = None if autotune or ON_CPU else {"xla_gpu_autotune_level": 0}
    compiled = functools.partial(jax.jit, compiler_options=options)
    forward = compiled(function)
    out, pull = compiled(lambda q, k, v: jax.vjp(function, q, k, v))(q, k, v)
    backward = compiled(lambda pull, gradient: pull(gradient))
    jax.block_until_ready((out, forward(q, k, v), backward(pull, gradient)))
    return Prepared(functools.partial(forward, q, k, v), functools.partial(backward, pull, gradient))


def seconds(run: Callable[[], Any]) -> float:
    """Return the seconds of one call."""
    clock = time.perf_counter()
    for _ in range(CALLS):
        last = run()
    jax.block_until_ready(last)
    return (time.perf_counter() - clock) / CALLS


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:200]


def distance(found: Any, expected: Any) -> float:
    """Return the largest distance of two corresponding arrays, relative to the norm of the expected one."""

    def one(a: jax.Array, b: jax.Array) -> jax.Array:
        b = b.astype(jnp.float32)
        return jnp.linalg.norm(a.astype(jnp.float32) - b) / jnp.linalg.norm(b)

    return max(float(one(a, b)) for a, b in zip(found, expected, strict=True))


def compare(case: Case, only: list[str], runs: int) -> list[dict[str, Any]]:
    operands, prepared, rows = case.operands(), {}, []
    with jax.default_matmul_precision("highest"):
        wide = tuple(x.astype(jnp.float32) for x in operands)
        exact = prepare(case.own(attention_xla), wide, autotune=False)
        expected, expected_gradients = exact.forward(), exact.backward()
    for name, function in case.ways().items():
        if only and name not in only:
            continue
        row: dict[str, Any] = {"name": name, **dataclasses.asdict(case)}
        rows.append(row)
        try:
            one = prepare(function, operands, autotune=name != "xla" or case.documents == 1)
        except Exception as error:  # a library may raise anything for unsupported calls; the error is shown
            row["unavailable"] = first_line(error)
            continue
        row["distance"] = distance([one.forward()], [expected])
        row["gradient_distance"] = distance(one.backward(), expected_gradients)
        if name == "xla" and case.documents > 1:
            row["untimed"] = "not timed: it computes the scores between all documents, as if they were one"
        else:
            prepared[name] = one
    del expected, expected_gradients, exact, wide
    times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in prepared}
    for _ in range(runs):
        for name, each in prepared.items():
            times[name][0].append(seconds(each.forward))
            times[name][1].append(seconds(each.backward))
    for row in rows:
        if row["name"] in times:
            row["forward_seconds"], row["backward_seconds"] = map(statistics.median, times[row["name"]])
            row["forward_tflops"] = 2 * case.products / row["forward_seconds"] / 1e12
            row["backward_tflops"] = 5 * case.products / row["backward_seconds"] / 1e12
    return rows


def measured(case: Case, rows: list[dict[str, Any]], device: jax.Device) -> Measurement:
    """Convert the rows of `compare` into a row of the table."""
    ours = {row["name"]: row for row in rows if row["name"] in OWN and "unavailable" not in row}

    def sound(row: dict[str, Any]) -> bool:
        return all(row[each] <= 2 * ours["xla"][each] for each in ("distance", "gradient_distance"))

    return Measurement(
        capability=device.compute_capability,
        dtype=case.dtype,
        head_dim=case.head_dim,
        length=case.length,
        documents=case.documents,
        device=device.device_kind,
        jax=jax.__version__,
        seconds={
            name: row["forward_seconds"] + row["backward_seconds"]
            for name, row in ours.items()
            if sound(row) and "untimed" not in row
        },
    )


def line(row: dict[str, Any]) -> str:
    mask = "causal" if row["causal"] else "both"
    which = f"{row['head_dim']:>8} {row['length']:>7} {mask:>7} {row['documents']:>5}  {row['name']:<15}"
    if why := row.get("unavailable") or row.get("untimed"):
        return f"{which} {why}"
    return (
        f"{which} {row['forward_tflops']:9.1f} {row['backward_tflops']:9.1f} {1e3 * row['forward_seconds']:9.3f} "
        f"{1e3 * row['backward_seconds']:9.3f} {row['distance']:9.1e} {row['gradient_distance']:9.1e}"
    )


HEAD = (
    f"{'head_dim':>8} {'length':>7} {'mask':>7} {'docs':>5}  {'':<15} {'forward':>9} {'backward':>9} {'ms':>9} "
    f"{'ms':>9} {'distance':>9} {'gradients':>9}"
)


def tune(case: Case, runs: int) -> dict[str, list[dict[str, Any]]]:
    """Return the tiles of each kernel with their milliseconds: fastest first, last those that do not compile."""
    q, k, v, gradient = case.operands()
    key_ranges = make_document_ranges(jnp.zeros(q.shape[:2], jnp.int32), case.causal)
    parameters = AttentionParameters(case.head_dim**-0.5)
    default = BLOCKS[case.head_dim, q.dtype.itemsize]
    out, log_sum = jax.jit(functools.partial(attention_pallas.forward, parameters, interpret=ON_CPU))(
        q, k, v, key_ranges
    )
    delta = jnp.einsum("BSHK,BSHK->BHS", gradient, out, preferred_element_type=jnp.float32)
    residuals = AttentionResiduals(q, k, v, key_ranges, log_sum, delta)

    def forward(blocks: Tiles) -> Callable[[], Any]:
        run = jax.jit(functools.partial(attention_pallas.forward, parameters, blocks=blocks, interpret=ON_CPU))
        return functools.partial(run, q, k, v, key_ranges)

    def backward(which: tuple[int, ...], blocks: Tiles) -> Callable[[], Any]:
        """Return only these results of the backward, so that XLA runs only the kernel that they need."""
        whole = functools.partial(attention_pallas.backward, parameters, blocks=blocks, interpret=ON_CPU)
        run = jax.jit(lambda *of: [whole(*of)[i] for i in which])
        return functools.partial(run, residuals, gradient)

    kernels: dict[str, Callable[[Tiles], Callable[[], Any]]] = {
        "forward": forward,
        "d_queries": functools.partial(backward, (0,)),
        "d_keys": functools.partial(backward, (1, 2)),
    }
    tiles = [
        Tile(*each) for each in itertools.product((32, 64, 128), (32, 64, 128), (4, 8), (1, 2, 3, 4))
    ]  # fmt: skip
    found: dict[str, list[dict[str, Any]]] = {}
    for name, kernel in kernels.items():
        rows = found[name] = []
        for tile in tiles[:2] if ON_CPU else tiles:
            row: dict[str, Any] = dataclasses.asdict(tile)
            rows.append(row)
            try:
                run = kernel(dataclasses.replace(default, **{name: tile}))
                jax.block_until_ready(run())
                row["ms"] = 1e3 * statistics.median(seconds(run) for _ in range(runs))
            except jax.errors.JaxRuntimeError as error:  # not enough shared memory or registers
                row["unavailable"] = first_line(error)
        rows.sort(key=lambda row: row.get("ms", float("inf")))
        print(f"{name}, head_dim {case.head_dim}, {case.length}; by default {getattr(default, name)}")
        for row in rows[:6]:
            print(f"  {row}", flush=True)
    return found


def main() -> int:
    parser = errors.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes, lengths = ([64], [64]) if ON_CPU else ([128, 64, 256], [2048, 8192, 32_768])
    parser.add_argument("--head-dims", type=int, nargs="+", default=sizes)
    parser.add_argument("--lengths", type=int, nargs="+", default=lengths)
    parser.add_argument("--documents", type=int, nargs="+", default=[1, 6], help="documents in a row (default: 1 6)")
    parser.add_argument("--both-ways", action="store_true", help="measure without a causal mask, too")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--only", nargs="+", default=[], help="measure only these implementations")
    parser.add_argument("--runs", type=int, default=5, help="measurements of each implementation (default: 5)")
    parser.add_argument("--tune", action="store_true", help="try the tiles of the Pallas kernels instead")
    parser.add_argument(
        "--write-table",
        type=Path,
        nargs="?",
        const=attention_auto.TABLE,
        metavar="FILE",
        help="write the seconds of causal calls into the table that `auto` reads, or into FILE",
    )
    parser.add_argument("--json", type=Path, help="file for the figures; the table is written next to it as .txt")
    asked = parser.parse_args()
    if asked.write_table and (asked.only or asked.tune):
        raise InputError("--write-table: the table must compare all implementations; leave --only and --tune out")
    if asked.write_table and ON_CPU:
        raise InputError("--write-table: a CPU's figures mean nothing; run it on the GPU that the table is for")
    masks = (True, False) if asked.both_ways else (True,)
    sizes_and_masks = itertools.product(asked.head_dims, asked.documents, asked.lengths, masks)
    cases = [Case(head_dim, length, causal, asked.dtype, docs) for head_dim, docs, length, causal in sizes_and_masks]
    report: dict[str, Any] = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "tokens": TOKENS,
        "dtype": asked.dtype,
    }
    if asked.tune:
        report["tiles"] = [{**dataclasses.asdict(case), **tune(case, asked.runs)} for case in cases]
        save(asked.json, report, json.dumps(report, indent=2))
        return 0
    head = f"{report['device']}, jax {jax.__version__}, {asked.dtype}; TFLOP/s\n{HEAD}"
    one = functools.partial(compare, only=asked.only, runs=asked.runs)
    for case, rows in compared(cases, one, line, head, report, asked.json):
        if asked.write_table and case.causal:
            write_table([measured(case, rows, jax.devices()[0])], asked.write_table)
    return 0


def write_table(rows: Iterable[Measurement], file: Path) -> None:
    """Write rows into the table. They replace rows of the same calls."""
    known = {row.key: row for row in (attention_auto.read_table(file) if file.exists() else [])}
    known |= {row.key: row for row in rows}
    lines = [json.dumps(dataclasses.asdict(known[key])) for key in sorted(known)]
    replace_durably(file, "[\n" + ",\n".join(lines) + "\n]\n")


if __name__ == "__main__":
    errors.run_command(main)
