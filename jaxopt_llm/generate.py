"""python -m jaxopt_llm.generate --checkpoint RUN_DIR --prompt TEXT [--tokens N]"""

import argparse
import functools
import io
import sys
from pathlib import Path
from typing import NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from jaxopt_llm import config as configuration
from jaxopt_llm import errors, tree
from jaxopt_llm.checkpoint.native import Checkpoints
from jaxopt_llm.data.tokenizer import load_tokenizer
from jaxopt_llm.errors import CheckpointError, InputError
from jaxopt_llm.execution import scan
from jaxopt_llm.model.context import Context
from jaxopt_llm.model.decoder import Params, Parts, make_parts
from jaxopt_llm.parallel.mesh import MeshConfig, make_mesh, visible_devices
from jaxopt_llm.parallel.sharding import Placement
from jaxopt_llm.training import lora

MOST_TOKENS = 100_000  # the cache holds keys and values of all of them


def greedy(
    parts: Parts, params: Params, prompt: jax.Array, count: int, vocabulary_size: int, end: int, placement: Placement
) -> jax.Array:
    """Continues a prompt with the likeliest token each time, over the same blocks as training, with a cache.

    prompt: int32 [1, P]. Returns int32 [count]; from the first `end` on, `end`.
    """
    length = prompt.shape[1]

    def context(first: jax.Array, tokens: int) -> Context:
        positions = first + jnp.arange(tokens, dtype=jnp.int32)[None]
        return Context(positions, jnp.ones_like(positions), placement, cache_index=first)

    def likeliest(logits: jax.Array) -> jax.Array:
        return jnp.argmax(logits[:, -1, :vocabulary_size], axis=-1).astype(jnp.int32)

    def step(carry: tuple[jax.Array, Params], index: jax.Array) -> tuple[tuple[jax.Array, Params], jax.Array]:
        token, caches = carry
        logits, caches = scan.forward(parts, params, token[:, None], context(length + index, 1), caches)
        chosen = jnp.where(token == end, end, likeliest(logits))
        return (chosen, caches), token[0]

    caches = scan.make_caches(parts, 1, length + count, placement.precision.compute_dtype)
    logits, caches = scan.forward(parts, params, prompt, context(jnp.int32(0), length), caches)
    return jax.lax.scan(step, (likeliest(logits), caches), jnp.arange(count))[1]


def generate(run: Path, prompt: str, count: int) -> str:
    """The prompt and what the run's last checkpoint continues it with, up to `count` tokens."""
    try:
        config = configuration.from_json((run / "config.json").read_text())
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"--checkpoint {run}: not a run directory ({error})") from error
    tokenizer = load_tokenizer(config.data)
    beginning = [] if tokenizer.beginning is None else [tokenizer.beginning]
    ids = np.concatenate([beginning, *tokenizer.encode([prompt.encode(errors="surrogateescape")])]).astype(np.int32)
    placement = Placement(make_mesh(MeshConfig(), visible_devices()[:1]), 0, config.precision)
    parts, trained, frozen = lora.adapt(make_parts(config.model), config.lora, config.precision)
    trees = {"masters": trained, "frozen": frozen}
    held = {name: placement.abstract(specs) for name, specs in trees.items() if jax.tree.leaves(specs)}
    with Checkpoints(run / "checkpoints") as checkpoints:
        step = checkpoints.latest_step()
        if step is None:
            raise CheckpointError(f"--checkpoint {run}: it has no checkpoint yet")
        restored = checkpoints.restore(step, **held)
    params = tree.merge(restored["masters"], restored.get("frozen", frozen))
    write = jax.jit(
        functools.partial(
            greedy,
            parts,
            count=count,
            vocabulary_size=config.model.vocabulary_size,
            end=tokenizer.end,
            placement=placement,
        )
    )
    return prompt + tokenizer.decode(np.asarray(write(params, ids[None])))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InputError(message)


def main() -> int:
    parser = _Parser(prog="python -m jaxopt_llm.generate", description=__doc__)
    parser.add_argument("--checkpoint", type=Path, required=True, metavar="RUN_DIR", help="directory of a training run")
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="the text to continue")
    parser.add_argument("--tokens", type=int, default=200, metavar="N", help="most tokens to add (default: 200)")
    arguments = parser.parse_args(sys.argv[1:])
    if not 1 <= arguments.tokens <= MOST_TOKENS:
        raise InputError(f"--tokens {arguments.tokens}: must lie between 1 and {MOST_TOKENS:,}")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character shows a question mark
    print(generate(arguments.checkpoint, arguments.prompt, arguments.tokens))
    return 0


if __name__ == "__main__":
    errors.run(main)
