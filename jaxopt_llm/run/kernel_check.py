"""Check of an attention kernel on a GPU before the first step: a small call, compared with XLA's operations.

A kernel can be wrong on a GPU, a driver or a version of a library on which nobody has run it. The verdict is kept
beside the compiled programs.
"""

import functools
import hashlib
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxopt_llm import kernels
from jaxopt_llm.core import errors, json_files
from jaxopt_llm.core.files import replace_durably
from jaxopt_llm.kernels import attention
from jaxopt_llm.kernels.attention_auto import FALLBACK, AttentionCall
from jaxopt_llm.kernels.attention_types import AttentionParameters, AttentionResiduals, KeyRanges, make_document_ranges

FILE = "attention_checks.json"
ROWS, LENGTH, KV_HEADS = 2, 320, 2  # no block of a kernel divides this length
# Norm of the difference to float32, relative to the norm of the right array. Rounding to bfloat16 gives about 0.005; a
# wrong scale, mask, document or group of heads gives more than 0.1.
TOLERANCE = 0.02


def check_attention(name: str, call: AttentionCall, group: int) -> str:
    """Return how an implementation fails on the first local device; "" if it is right.

    Only the verdict of a call that ran is kept: another failure may be due to the state of the machine.

    Args:
        group: query heads of a key-value head.
    """
    device = jax.local_devices()[0]
    file, key = _verdicts_file(), _make_key(name, call, group, device)
    verdicts: dict[str, str] = json_files.read(file, f"remove {file}") if file and file.exists() else {}
    if key in verdicts:
        return verdicts[key]
    try:
        with jax.default_device(device):
            failure = _compare(name, call, group)
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
    found, right = _run(name, call, ids, arrays), _run(FALLBACK, call, ids, wide)
    if call.parts > 1 and not attention.IMPLEMENTATIONS[name].skips_keys:
        found |= _run_rectangles(name, call, arrays)
        right |= _run_rectangles(FALLBACK, call, wide)
    wrong = {each: _distance(found[each], right[each]) for each in right}
    # A comparison with NaN is False.
    listed = [f"{each} by {distance:.2g}" for each, distance in wrong.items() if not distance <= TOLERANCE]
    return f"is wrong on this GPU ({', '.join(listed)} of its norm)" if listed else ""


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


def _distance(found: jax.Array, right: jax.Array) -> float:
    return float(jnp.linalg.norm(found.astype(jnp.float32) - right) / jnp.linalg.norm(right))
