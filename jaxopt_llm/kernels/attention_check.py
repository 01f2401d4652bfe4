"""Check of a kernel of attention on the GPU at hand, before it is used.

A kernel can be wrong on a GPU, a driver or a version of a library on which nobody has run it. A small call is therefore
compared with XLA's operations. The verdict is kept beside the compiled programs.
"""

import functools
import hashlib
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxopt_llm import kernels
from jaxopt_llm.core import errors, json_files
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.core.files import replace_durably
from jaxopt_llm.kernels import attention, attention_pallas, attention_xla
from jaxopt_llm.kernels.attention_auto import FALLBACK, AttentionCall
from jaxopt_llm.kernels.attention_types import AttentionParameters, AttentionResiduals, KeyRanges, make_document_ranges

FILE = "attention_checks.json"
ROWS, LENGTH, KV_HEADS = 2, 320, 2  # no block of a kernel divides this length
# Norm of the difference to float32, relative to the norm of the right array. Rounding to bfloat16 gives about 0.005; a
# wrong scale, mask, document or group of heads gives more than 0.1.
TOLERANCE = 0.02


def check_attention(name: str, call: AttentionCall, group: int) -> str:
    """Return how an implementation fails on the first local device; "" if it is right.

    Args:
        group: query heads of a key-value head.
    """
    return _find_failure((name, call, group), lambda: _compare(name, call, group))


def check_ring(kernel: Any, softcap: float | None, q: jax.Array, v: jax.Array) -> bool:
    """Return whether a kernel for one query over a ring of keys is right on the first local device.

    If it is not, a warning says how it fails.

    Args:
        kernel: what `attention.select_for_ring` returns.
        softcap: bound of the scores.
        q, v: queries [B, 1, H, K] and values [B, T, G, V] of a call; their dtype, heads and head size count.

    Raises:
        InputError: it is wrong, in a job of several processes. These run one program, and must not choose apart.
    """
    group, call = q.shape[2] // v.shape[2], AttentionCall(q.shape[3], q.dtype, LENGTH, 1, None, softcap)
    return _is_right_over_rings(kernel, call, group)


@functools.cache
def _is_right_over_rings(kernel: Any, call: AttentionCall, group: int) -> bool:
    failure = _find_failure(("ring", call, group), lambda: _compare_over_rings(kernel, call, group))
    if failure and jax.process_count() > 1:
        raise InputError(f"attention of generation: pallas {failure}; run it in one process, which then uses xla")
    if failure:
        logging.getLogger(__name__).warning("attention of generation: pallas %s, so that xla is used", failure)
    return not failure


def _find_failure(check: tuple[str, AttentionCall, int], compare: Callable[[], str]) -> str:
    """Return the kept verdict of a check, or what `compare` returns.

    Only the verdict of a call that ran is kept: another failure may be due to the state of the machine.
    """
    device = jax.local_devices()[0]
    file, key = _verdicts_file(), _make_key(*check, device)
    verdicts: dict[str, str] = json_files.read(file, f"remove {file}") if file and file.exists() else {}
    if key in verdicts:
        return verdicts[key]
    try:
        with jax.default_device(device):
            failure = compare()
    except Exception as error:  # a compiler or a library may raise anything; the error is shown
        return f"fails on this GPU ({errors.describe_error(error).splitlines()[0][:200]})"
    if file:
        replace_durably(file, json.dumps(verdicts | {key: failure}, indent=2) + "\n")
    return failure


def _verdicts_file() -> Path | None:
    folder = jax.config.values["jax_compilation_cache_dir"]
    enabled = jax.config.values["jax_enable_compilation_cache"]
    return Path(folder) / FILE if folder and enabled and Path(folder).is_dir() else None


def _make_key(name: str, call: AttentionCall, group: int, device: Any) -> str:
    """Return everything that can change the verdict."""
    sources = hashlib.sha256()
    for path in sorted(Path(kernels.__path__[0]).glob("*.py")):
        sources.update(path.read_bytes())
    versions = jax.__version__, device.device_kind, device.client.platform_version, sources.hexdigest()[:16]
    dtype = jnp.dtype(call.dtype).name
    mask = call.segments, call.window, call.softcap, *(["ring"] * (call.parts > 1))
    return "; ".join(map(str, (name, call.head_dim, dtype, *mask, group, *versions)))


def _compare(name: str, call: AttentionCall, group: int) -> str:
    """Return which arrays are wrong in a small call with the head size, dtype, heads, window and documents of a run.

    In a ring also in a call for the rectangles of another device's part, if the kernel gets these.
    """
    random = np.random.default_rng(0)
    heads = group * KV_HEADS, KV_HEADS, KV_HEADS, group * KV_HEADS
    arrays = [jnp.asarray(random.normal(size=(ROWS, LENGTH, n, call.head_dim)), call.dtype) for n in heads]
    ids = np.zeros((ROWS, LENGTH), np.int32)
    if call.segments != 1:
        ids[0, 1:], ids[0, 97:], ids[1, 250:] = 1, 2, 1
    wide = [x.astype(jnp.float32) for x in arrays]
    results, right = _run(name, call, ids, arrays), _run(FALLBACK, call, ids, wide)
    if call.parts > 1 and not attention.IMPLEMENTATIONS[name].skips_keys:
        results |= _run_rectangles(name, call, arrays)
        right |= _run_rectangles(FALLBACK, call, wide)
    return _describe_differences(results, right)


def _describe_differences(results: dict[str, jax.Array], right: dict[str, jax.Array]) -> str:
    wrong = {each: _distance(results[each], right[each]) for each in right}
    # A comparison with NaN is False.
    listed = [f"{each} by {distance:.2g}" for each, distance in wrong.items() if not distance <= TOLERANCE]
    return f"is wrong on this GPU ({', '.join(listed)} of its norm)" if listed else ""


# First and last position that the query of a row sees in a ring of LENGTH keys: some of the first keys, keys on both
# sides of the ring's end, all keys, none.
RING_RANGES = ((0, 200), (LENGTH + 3, LENGTH + 180), (181, LENGTH + 180), (1, 0))
MANY_ROWS = attention_pallas.RING_PROGRAMS // KV_HEADS  # with these, the kernel does not divide the keys into parts


def _compare_over_rings(kernel: Any, call: AttentionCall, group: int) -> str:
    """Return whether the output of one query over a ring is wrong, with few rows and with many."""
    parameters = AttentionParameters(call.head_dim**-0.5, call.softcap or None, ring=True)
    random, results, right = np.random.default_rng(0), dict[str, jax.Array](), dict[str, jax.Array]()
    for rows in (len(RING_RANGES), MANY_ROWS):
        shapes = (rows, 1, group * KV_HEADS), (rows, LENGTH, KV_HEADS), (rows, LENGTH, KV_HEADS)
        arrays = [jnp.asarray(random.normal(size=(*shape, call.head_dim)), call.dtype) for shape in shapes]
        ranges = KeyRanges(*jnp.asarray(np.resize(RING_RANGES, (rows, 2)).T[..., None], jnp.int32))  # [B, 1] each
        name, wide = f"the output of {rows} rows", [x.astype(jnp.float32) for x in arrays]
        results[name] = jax.jit(functools.partial(attention.attend, kernel, parameters))(*arrays, ranges)
        with jax.default_matmul_precision("highest"):
            right[name] = jax.jit(functools.partial(attention.attend, attention_xla, parameters))(*wide, ranges)
    return _describe_differences(results, right)


def _run(name: str, call: AttentionCall, ids: np.ndarray, arrays: list[jax.Array]) -> dict[str, jax.Array]:
    window = None if call.window is None else min(call.window, LENGTH // 4)
    parameters = AttentionParameters(
        call.head_dim**-0.5,
        call.softcap or None,
        keys_before=None if window is None else window - 1,
        keys_after=0,
        window=window,
        segments=call.segments,
    )
    ranges = make_document_ranges(jnp.asarray(ids)).limit_to_window(window)

    @jax.jit
    def run(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        attend = functools.partial(attention.attend, attention.IMPLEMENTATIONS[name], parameters)
        out, pull = jax.vjp(lambda q, k, v: attend(q, k, v, ranges), *arrays[:3])
        return out, *pull(arrays[3])

    with jax.default_matmul_precision("highest" if name == FALLBACK else None):
        return dict(zip(("the output", "d_q", "d_k", "d_v"), run(*arrays), strict=True))


def _run_rectangles(name: str, call: AttentionCall, arrays: list[jax.Array]) -> dict[str, jax.Array]:
    """Run the call of a ring for another device's part, and its backward by statistics over more than these keys.

    With packed documents, 200 queries see the last 230 keys in the first row, and nothing is visible in the second.
    """
    kernel = attention.IMPLEMENTATIONS[name]
    parameters = AttentionParameters(call.head_dim**-0.5, segments=call.segments, rectangles=True)
    first = np.zeros((ROWS, LENGTH), np.int32)
    if call.segments != 1:
        first[0], first[0, 200:], first[1] = LENGTH - 230, LENGTH, LENGTH
    ranges = KeyRanges(jnp.asarray(first), jnp.full_like(first, LENGTH - 1))

    @jax.jit
    def run(q: jax.Array, k: jax.Array, v: jax.Array, gradient: jax.Array) -> tuple[jax.Array, ...]:
        part, log_sum = kernel.forward(parameters, q, k, v, ranges)
        over_all = jnp.where(jnp.isinf(log_sum), 0.0, log_sum) + 0.7  # the part is half of all
        residuals = AttentionResiduals(q, k, v, ranges, over_all)
        if kernel.reads_out:
            residuals = residuals._replace(out=0.5 * part)
        else:
            residuals = residuals._replace(delta=0.5 * jnp.einsum("BSHK,BSHK->BHS", gradient, part))
        return part, *kernel.backward(parameters, residuals, gradient)

    with jax.default_matmul_precision("highest" if name == FALLBACK else None):
        names = (f"{each} of another device's part" for each in ("the output", "d_q", "d_k", "d_v"))
        return dict(zip(names, run(*arrays), strict=True))


def _distance(result: jax.Array, right: jax.Array) -> float:
    return float(jnp.linalg.norm(result.astype(jnp.float32) - right) / jnp.linalg.norm(right))
