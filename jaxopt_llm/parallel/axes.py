"""The logical axes that layers name, and the mesh axes that divide each: of parameters, and of activations."""

from jaxopt_llm.parallel.mesh import BATCH_AXES

PARAMETER_AXES: dict[str, tuple[str, ...]] = {
    "virtual": (),
    "stages": ("pipeline",),
    "layers": (),
    "positions": (),
    "embed": (),
    "latent": (),
    "head_dim": (),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "experts": ("expert",),
    "expert_mlp": ("tensor",),
    "vocabulary": ("pipeline", "tensor"),
}
ACTIVATION_AXES: dict[str, tuple[str, ...]] = {
    "batch": BATCH_AXES,
    "sequence": ("context",),
    "residual_sequence": ("context",),  # of the residual stream and its norms
    "sent_sequence": ("context", "tensor"),  # of the same on its way from one stage of a pipeline to another
    "embed": (),
    "query_latent": (),
    "latent": (),
    "head_dim": (),
    "turned_dim": (),
    "key_dim": (),
    "value_dim": (),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "vocabulary": ("tensor",),
}
# Laid over that table by sharding.sequence_parallel.
SEQUENCE_PARALLEL_AXES = {"residual_sequence": ("context", "tensor")}
# Axes that rest replicated where they are smaller than what would split them, by intent: with fewer key-value heads
# than `tensor`, each device computes the heads that its queries read.
REPLICATED_WHEN_SMALLER = ("kv_heads",)
# What the stages of a pipeline divide beside `tensor` where it divides so, by intent: where not, `tensor` alone does.
STAGED_WHERE_IT_DIVIDES = ("vocabulary",)
STORAGE_AXES = ("fsdp", "context", "expert")  # ZeRO divides storage by their product
