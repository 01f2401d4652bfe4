"""The only folder in which a weight meets computation.

A block passes each weight on as it received it, and never learns how the weight is stored. It calls one of these:

    einsum          matmul with activations: projections, MLPs, logits                    weights.py
    einsum_all      matmuls of one input: q, k and v; gate and up; adapters share products        projections.py
    grouped_matmul  matmul of each token with the matrix of its expert                    weights.py
    materialise     the array itself, for elementwise use: norm scales, biases, routers   weights.py
    look_up         rows of an embedding table                                            vocabulary.py
    apply_linear    any function that is linear in the weight, in models of users         weights.py
    gather_for_use  the array itself, for any other use, in models of users               weights.py
    cross_entropy   head and loss in one step; vocabulary parallel                        vocabulary.py

Example: `einsum("BSD,DF->BSF", x, w)` with ZeRO-3 over n devices, bfloat16 compute and float32 reductions. Shapes are
per device (B: the device's share of the batch; S sequence, D width, F hidden size):

    forward    w        [D/n, F]  float32    master weights at rest
               cast     [D/n, F]  bfloat16   before the gather: half of the bytes
               gather   [D, F]    bfloat16   all-gather over fsdp; `tensor` keeps its split
               y        [B, S, F] = x [B, S, D] · w
    backward   gather   [D, F]    bfloat16   again, or kept from the forward (`WeightShardings.keep_gathered`)
               dx       [B, S, D] = dy [B, S, F] · wᵀ
               dw       [D, F]    = xᵀ · dy, in the reductions' dtype, float32
               reduce   [D/n, F]  float32    reduce-scatter; the cotangent of the perturbation

Gather where used. `PlacedWeight` (parallel/gathering.py) is an array at rest with its shardings. The operation gathers
it, so a scan over layers holds one gathered layer at a time. The backward gathers again unless `keep_gathered` is set:
within a rematerialised block the forward has just run again, and the backward can reuse its gathered weight.

Custom VJP. Every operation defines its own backward. So the gradient is formed and summed over devices in the
reductions' dtype, and no gradient is formed of a frozen weight. The residuals are also fixed here, independently of the
remat policy: the input, the weight at rest, and the gathered weight only with `keep_gathered`.

Gradient perturbation. JAX requires that a cotangent has the shape and dtype of its primal. A weight may rest in
bfloat16 or as int8 codes, and its gradient needs another dtype and another sharding. So the executor differentiates not
with respect to the weight but with respect to `PlacedWeight.perturbation`: zeros of the weight's shape, in the
reductions' dtype, with the gradient's sharding. No computation reads the zeros. The backward returns None for the
weight, and the gradient as the cotangent of the perturbation. It is summed over the mesh axes that divide the tokens,
except those of the gradient groups (`data`; in ZeRO stages 0 and 1 also `fsdp`). `gradients.sum_over_groups` sums over
these once, after the last microbatch. A weight whose perturbation is None is frozen. (Flax's `perturb` is the same idea
for activations.)

Leaf classes (leaves.py). A weight of shape [D, F], contracted over D, is one of:

    jax.Array     array [D, F], of a forward that knows no placement and that JAX differentiates (LanguageModel);
                  grouped products of them are an equation of their own, which engines find (plain_groups.py)
    PlacedWeight  array [D, F]
    Int8Weight    codes int8 [D, F], scales float32 [1, F]
    Nf4Weight     codes uint8 [D/2, F], scales [D/64, F] (float32; uint8 with double quantisation), tops float32 [1, F]
    LoraWeight    base (one of the above) [D, F], lora_a [D, r], lora_b [F, r], magnitude [F] (DoRA) or None
    ScaledWeight  array [D, F], its largest magnitude, for fp8; only up to where shardings are attached

A LoRA product is x · base + scale · (dropout(x) · A) · Bᵀ: two thin matmuls next to the base's, so A · B is never
formed. Where a device holds the weights whole, the thin matmuls are merged with the matmuls of the base and of other
weights (projections.py). The codes of a quantised base are gathered as codes, which moves 1 or 0.5 bytes per value, and
dequantised afterwards. Quantised bases are always frozen.

Quantised matmuls (quantised.py, `precision.matmul`) are independent of the leaf classes. The weight rests unquantised.
The operands of a product are rounded to fp8, int8 or int4 when it is computed, and the weight is gathered as codes
(int4_qat: in the compute dtype). Adapters are multiplied in the compute dtype. With int8, the codes of an Int8Weight
are multiplied as they are. outliers.py computes the outlier columns of an int8 product in the compute dtype.
"""
