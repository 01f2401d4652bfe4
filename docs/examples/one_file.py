"""The idea of jaxopt_llm in one file, with jax and optax alone: where arrays live is data.

Run it with `python one_file.py`: a decoder of Llama's kind trains on source text of Python, on eight simulated devices.

The model is written as for one device. Two tables say which mesh axis divides which dimension of the parameters and of
the activations, and one function adds ZeRO-3 (FSDP). XLA's partitioner inserts the collectives. Whatever the mesh is,
the losses are the same, up to the order of sums: change MESH and see. (`tensor` must divide G.)

Letters: B batch, S sequence, D width, H heads, G key-value heads, R = H / G, K size of a head, F MLP width, L layers,
T key positions, V vocabulary.
"""

import functools
import json
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")  # jax reads both when it starts devices

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

Tree = dict[str, Any]

V, D, L, H, G, K, F = 256, 64, 4, 4, 2, 16, 192
BATCH, SEQUENCE, STEPS = 16, 128, 100
MESH = {"fsdp": 4, "tensor": 2}  # with {"fsdp": 8, "tensor": 1} it is ZeRO-3 alone

# --- 1. Where arrays live.

# Each dimension has a name. The tables give a mesh axis to some names; all other dimensions are whole on each device.
# Tensor parallelism is this: heads, the MLP's hidden layer and the vocabulary are divided in both tables.
PARAMETER_AXES = {"heads": "tensor", "kv_heads": "tensor", "mlp": "tensor", "vocabulary": "tensor"}
ACTIVATION_AXES = {"batch": "fsdp", **PARAMETER_AXES}

# Shapes of the parameters, with the names of their dimensions. Those of the layers are stacks: L comes first.
SHAPES: Tree = {
    "embedding": ((V, D), ("rows", "embed")),
    "layers": {
        "attention_norm": ((L, D), ("layers", "embed")),
        "query": ((L, D, H, K), ("layers", "embed", "heads", "head_dim")),
        "key": ((L, D, G, K), ("layers", "embed", "kv_heads", "head_dim")),
        "value": ((L, D, G, K), ("layers", "embed", "kv_heads", "head_dim")),
        "output": ((L, H, K, D), ("layers", "heads", "head_dim", "embed")),
        "mlp_norm": ((L, D), ("layers", "embed")),
        "gate": ((L, D, F), ("layers", "embed", "mlp")),
        "up": ((L, D, F), ("layers", "embed", "mlp")),
        "down": ((L, F, D), ("layers", "mlp", "embed")),
    },
    "final_norm": ((D,), ("embed",)),
    "head": ((V, D), ("vocabulary", "embed")),
}


def is_shape(node: Any) -> bool:
    return isinstance(node, tuple)


def find_computed_spec(axes: tuple[str, ...]) -> PartitionSpec:
    """Return how the devices divide a parameter while a layer computes with it."""
    return PartitionSpec(*(PARAMETER_AXES.get(name) for name in axes))


def find_resting_spec(shape: tuple[int, ...], axes: tuple[str, ...]) -> PartitionSpec:
    """Return how the devices divide a parameter, its gradient and its moments at rest.

    This is ZeRO-3: `fsdp` divides the largest dimension that `tensor` leaves whole. A stack is divided within its
    layers, so that one layer can be gathered without the others.
    """
    dims = [PARAMETER_AXES.get(name) for name in axes]
    free = [i for i, name in enumerate(axes) if dims[i] is None and name != "layers" and shape[i] % MESH["fsdp"] == 0]
    if free:
        dims[max(free, key=lambda i: shape[i])] = "fsdp"
    return PartitionSpec(*dims)


def constrain(x: jax.Array, *names: str) -> jax.Array:
    """Divide an activation over the devices as the table says."""
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*(ACTIVATION_AXES.get(name) for name in names)))


def gather(weight: jax.Array, shape: tuple[int, ...], axes: tuple[str, ...]) -> jax.Array:
    """Gather a weight over `fsdp` before its use, and let the backward reduce-scatter its gradient.

    JAX would give the gradient the sharding of the gathered weight: every device would hold all of the sum.
    """

    @jax.custom_vjp
    def gathered(weight: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(weight, find_computed_spec(axes))

    def backward(_: None, gradient: jax.Array) -> tuple[jax.Array]:
        return (jax.lax.with_sharding_constraint(gradient, find_resting_spec(shape, axes)),)

    gathered.defvjp(lambda weight: (gathered(weight), None), backward)
    return gathered(weight)


# --- 2. The model, as for one device.


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * scale


def rotate(x: jax.Array) -> jax.Array:
    """Apply rotary position embeddings to x [B, S, H, K]."""
    frequencies = 10_000.0 ** (-np.arange(K // 2) / (K // 2))
    angles = np.arange(x.shape[1])[:, None] * frequencies.astype(np.float32)  # [S, K/2]
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    x1, x2 = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1)


def attend(weights: Tree, x: jax.Array) -> jax.Array:
    """Apply causal attention with grouped queries to x [B, S, D]."""
    q = constrain(rotate(jnp.einsum("BSD,DHK->BSHK", x, weights["query"])), "batch", "sequence", "heads", "head_dim")
    k = constrain(rotate(jnp.einsum("BSD,DGK->BSGK", x, weights["key"])), "batch", "sequence", "kv_heads", "head_dim")
    v = constrain(jnp.einsum("BSD,DGK->BSGK", x, weights["value"]), "batch", "sequence", "kv_heads", "head_dim")
    q = q.reshape(*q.shape[:2], G, H // G, K)
    scores = jnp.einsum("BSGRK,BTGK->BGRST", q, k) / K**0.5
    visible = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    shares = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1)
    mixed = jnp.einsum("BGRST,BTGK->BSGRK", shares, v).reshape(*x.shape[:2], H, K)
    return constrain(jnp.einsum("BSHK,HKD->BSD", mixed, weights["output"]), "batch", "sequence", "embed")


def transform(weights: Tree, x: jax.Array) -> jax.Array:
    """Apply the SwiGLU MLP to x [B, S, D]."""
    gate, up = (
        constrain(jnp.einsum("BSD,DF->BSF", x, weights[name]), "batch", "sequence", "mlp") for name in ("gate", "up")
    )
    return constrain(jnp.einsum("BSF,FD->BSD", jax.nn.silu(gate) * up, weights["down"]), "batch", "sequence", "embed")


def block(x: jax.Array, resting: Tree) -> tuple[jax.Array, None]:
    """Apply a layer to x [B, S, D]. resting: its weights as ZeRO-3 stores them; only here are they gathered."""
    weights = {name: gather(each, *(part[1:] for part in SHAPES["layers"][name])) for name, each in resting.items()}
    x = x + attend(weights, norm(x, weights["attention_norm"]))
    return x + transform(weights, norm(x, weights["mlp_norm"])), None


def compute_loss(params: Tree, tokens: jax.Array) -> jax.Array:
    """Return the mean cross-entropy of the next token. tokens: int32 [B, S + 1]."""
    embedding, head = (gather(params[name], *SHAPES[name]) for name in ("embedding", "head"))
    x = constrain(embedding[tokens[:, :-1]], "batch", "sequence", "embed")
    # One traced layer for all. Rematerialisation: only the input of each layer is kept. The backward runs the layer
    # again, and gathers its weights again.
    x, _ = jax.lax.scan(jax.checkpoint(block), x, params["layers"])
    x = norm(x, gather(params["final_norm"], *SHAPES["final_norm"]))
    logits = constrain(jnp.einsum("BSD,VD->BSV", x, head), "batch", "sequence", "vocabulary")
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]))


# --- 3. One step.


def is_decayed(path: tuple[Any, ...], _: Any) -> bool:
    return not str(path[-1].key).endswith("norm")


OPTIMIZER = optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.adamw(3e-3, b2=0.95, weight_decay=0.1, mask=functools.partial(jax.tree.map_with_path, is_decayed)),
)


def step(params: Tree, moments: Any, tokens: jax.Array) -> tuple[Tree, Any, jax.Array]:
    """Return the parameters and the moments after a step, and the loss before it."""
    loss, gradients = jax.value_and_grad(compute_loss)(params, tokens)
    updates, moments = OPTIMIZER.update(gradients, moments, params)
    return optax.apply_updates(params, updates), moments, loss


def initialize(seed: int = 0) -> Tree:
    """Return float32 parameters: normal with the variance 1 / fan-in, and norms of 1."""
    random = np.random.default_rng(seed)

    def draw(path: tuple[Any, ...], described: tuple[tuple[int, ...], tuple[str, ...]]) -> np.ndarray:
        shape, _ = described
        if not is_decayed(path, None):
            return np.ones(shape, np.float32)
        fan_in = {"output": H * K, "down": F}.get(str(path[-1].key), D)
        return random.normal(0, fan_in**-0.5, shape).astype(np.float32)

    return jax.tree.map_with_path(draw, SHAPES, is_leaf=is_shape)


def train(params: Tree, batches: np.ndarray) -> tuple[list[float], jax.stages.Compiled]:
    """Train on batches of tokens [N, B, S + 1]. Return the losses and the compiled step."""
    automatic = (jax.sharding.AxisType.Auto,) * len(MESH)  # the partitioner, not the user, divides what no table names
    mesh = jax.make_mesh(tuple(MESH.values()), tuple(MESH), automatic)
    place = functools.partial(NamedSharding, mesh)
    resting = jax.tree.map(lambda described: place(find_resting_spec(*described)), SHAPES, is_leaf=is_shape)
    params = jax.device_put(params, resting)
    # Moments rest as their parameters do; the count of steps has no dimension, and is whole.
    moments = OPTIMIZER.init(params)
    of_moments = optax.tree.map_params(
        OPTIMIZER, lambda _, sharding: sharding, moments, resting, transform_non_params=lambda _: place(PartitionSpec())
    )
    moments = jax.device_put(moments, of_moments)
    rows = place(PartitionSpec("fsdp"))
    jitted = jax.jit(
        step,
        in_shardings=(resting, of_moments, rows),
        out_shardings=(resting, of_moments, place(PartitionSpec())),
        donate_argnums=(0, 1),  # the new state takes the memory of the old one
    )
    with jax.set_mesh(mesh):
        compiled = jitted.lower(params, moments, batches[0]).compile()
        losses = []
        for tokens in batches:
            params, moments, loss = compiled(params, moments, jax.device_put(tokens, rows))
            losses.append(float(loss))
    return losses, compiled


def main(steps: int = STEPS) -> list[float]:
    text = b"".join(path.read_bytes() for path in sorted(Path(json.__file__).parent.glob("*.py")))
    begins = np.random.default_rng(0).integers(0, len(text) - SEQUENCE - 1, (steps, BATCH))
    batches = np.frombuffer(text, np.uint8)[begins[..., None] + np.arange(SEQUENCE + 1)].astype(np.int32)
    losses, compiled = train(initialize(), batches)
    for number in range(0, steps, max(1, steps // 10)):
        print(f"step {number:4}  loss {losses[number]:.3f}")
    # The program can be read before it runs, and for devices that this machine does not have: `plan` does no more.
    memory, program = compiled.memory_analysis(), compiled.as_text() or ""
    print(f"each device holds {memory.argument_size_in_bytes / 1e6:.2f} MB of parameters, moments and tokens")
    # On CPUs a gradient is summed by all-reduce and then sliced. XLA for GPUs joins the two to a reduce-scatter.
    for kind in ("all-gather", "all-reduce", "reduce-scatter"):
        print(f"{kind}: {program.count(f' {kind}(')} in the program")
    return losses


if __name__ == "__main__":
    main()
