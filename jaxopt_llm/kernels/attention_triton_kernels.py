"""Device code of attention_triton.py.

Letters: B batch, S queries, T keys, H heads, G key-value heads, K head size, M queries and N keys of a block.

q and d_out are tensor descriptors over [B, S, H × K], k and v over [B, T, G × K], first and last over [B, S], log_sum
and delta over [B × H, S]. The TMA unit copies a block of one head to shared memory, ahead of its use, and fills rows
past the end with zeros. These contribute 0 to every sum here, because they are multiplied by a row of d_out or q that
is 0, too.

bounds: int32 [B, blocks, 4], for blocks of queries, or in `backward_keys` for blocks of keys. A block visits the rows
of the other side from start to end. The rows from full_start to full_end need no mask: each query of the pair of blocks
sees each key. The rows from start to full_start, and from full_start to full_end, are whole blocks; the last block from
full_end on may be partial.

Scores are FACTOR × x, to base 2, so that a weight is one exp2. x is the dot product of query and key; with a soft-cap,
it is the hyperbolic tangent of half of INNER × log(2) × the dot product.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1e30)  # peak of a query that has not seen a key yet: below any score, and finite


@triton.jit
def forward(
    q, k, v, first, last, bounds, out, log_sum,
    S: tl.constexpr, H: tl.constexpr, G: tl.constexpr, K: tl.constexpr,
    FACTOR: tl.constexpr, INNER: tl.constexpr, M: tl.constexpr, N: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Compute a block of queries of one head: out [B, S, H, K], and log_sum float32 [B, H, S]."""
    BLOCKS: tl.constexpr = tl.cdiv(S, M)
    batch_head, block = _get_head_and_block(BLOCKS, HEADS)
    block = BLOCKS - 1 - block  # under a causal mask the last blocks take the longest, so they start first
    batch, head = batch_head // H, batch_head % H
    start, full_start, full_end, end = _bounds(bounds, batch * BLOCKS + block)
    queries = q.load([batch, block * M, head * K]).reshape(M, K)
    earliest = first.load([batch, block * M]).reshape(M)
    latest = last.load([batch, block * M]).reshape(M)
    column = head // (H // G) * K
    peak = tl.full([M], LOWEST, tl.float32)
    total = tl.zeros([M], tl.float32)
    result = tl.zeros([M, K], tl.float32)
    for row in tl.range(full_start, full_end, N):
        peak, total, result = _forward_step(
            queries, k, v, earliest, latest, batch, row, column, peak, total, result, FACTOR, INNER, K, N, MASKED=False
        )  # fmt: skip
    for step in tl.range(0, _count_masked_rows(start, full_start, full_end, end), N):
        row = _masked_row(step, start, full_start, full_end)
        peak, total, result = _forward_step(
            queries, k, v, earliest, latest, batch, row, column, peak, total, result, FACTOR, INNER, K, N, MASKED=True
        )  # fmt: skip
    sees = total > 0
    total = tl.where(sees, total, 1.0)
    rows = block * M + tl.arange(0, M)
    _store(out, result / total[:, None], batch, rows, head, S, H, K)
    log_sums = tl.where(sees, (peak + tl.log2(total)) / LOG2_E, float("inf"))
    tl.store(log_sum + (batch * H + head).to(tl.int64) * S + rows, log_sums, mask=rows < S)


@triton.jit
def _forward_step(
    queries, k, v, earliest, latest, batch, row, column, peak, total, result,
    FACTOR: tl.constexpr, INNER: tl.constexpr, K: tl.constexpr, N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    keys = k.load([batch, row, column]).reshape(N, K)
    x = _apply_softcap(tl.dot(queries, keys.T), INNER)
    if MASKED:
        x = tl.where(_visible(earliest[:, None], latest[:, None], (row + tl.arange(0, N))[None, :]), x, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(x, 1) * FACTOR)
    weights = tl.exp2(x * FACTOR - new_peak[:, None])
    rescale = tl.exp2(peak - new_peak)
    values = v.load([batch, row, column]).reshape(N, K)
    result = tl.dot(weights.to(values.dtype), values, result * rescale[:, None])
    return new_peak, total * rescale + tl.sum(weights, 1), result


@triton.jit
def backward_queries(
    q, k, v, d_out, first, last, log_sum, delta, bounds, d_q,
    S: tl.constexpr, H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, SCALE: tl.constexpr,
    FACTOR: tl.constexpr, INNER: tl.constexpr, M: tl.constexpr, N: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of a block of queries of one head, d_q [B, S, H, K]."""
    BLOCKS: tl.constexpr = tl.cdiv(S, M)
    batch_head, block = _get_head_and_block(BLOCKS, HEADS)
    block = BLOCKS - 1 - block  # under a causal mask the last blocks take the longest, so they start first
    batch, head = batch_head // H, batch_head % H
    start, full_start, full_end, end = _bounds(bounds, batch * BLOCKS + block)
    queries = q.load([batch, block * M, head * K]).reshape(M, K)
    d_outs = d_out.load([batch, block * M, head * K]).reshape(M, K)
    earliest = first.load([batch, block * M]).reshape(M)
    latest = last.load([batch, block * M]).reshape(M)
    log2_sums = log_sum.load([batch * H + head, block * M]).reshape(M) * LOG2_E
    deltas = delta.load([batch * H + head, block * M]).reshape(M)
    column = head // (H // G) * K
    d_queries = tl.zeros([M, K], tl.float32)
    for row in tl.range(full_start, full_end, N):
        d_queries = _queries_step(
            queries, k, v, d_outs, earliest, latest, log2_sums, deltas, batch, row, column, d_queries,
            FACTOR, INNER, K, N, MASKED=False,
        )  # fmt: skip
    for step in tl.range(0, _count_masked_rows(start, full_start, full_end, end), N):
        row = _masked_row(step, start, full_start, full_end)
        d_queries = _queries_step(
            queries, k, v, d_outs, earliest, latest, log2_sums, deltas, batch, row, column, d_queries,
            FACTOR, INNER, K, N, MASKED=True,
        )  # fmt: skip
    _store(d_q, d_queries * SCALE, batch, block * M + tl.arange(0, M), head, S, H, K)


@triton.jit
def _queries_step(
    queries, k, v, d_outs, earliest, latest, log2_sums, deltas, batch, row, column, d_queries,
    FACTOR: tl.constexpr, INNER: tl.constexpr, K: tl.constexpr, N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    keys = k.load([batch, row, column]).reshape(N, K)
    values = v.load([batch, row, column]).reshape(N, K)
    x = _apply_softcap(tl.dot(queries, keys.T), INNER)
    weights = tl.exp2(x * FACTOR - log2_sums[:, None])
    if MASKED:
        visible = _visible(earliest[:, None], latest[:, None], (row + tl.arange(0, N))[None, :])
        weights = tl.where(visible, weights, 0.0)
    d_products = _d_products(weights, tl.dot(d_outs, values.T), deltas[:, None], x, INNER)
    return tl.dot(d_products.to(keys.dtype), keys, d_queries)


@triton.jit
def backward_keys(
    q, k, v, d_out, first, last, log_sum, delta, bounds, d_k, d_v,
    T: tl.constexpr, H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, SCALE: tl.constexpr,
    FACTOR: tl.constexpr, INNER: tl.constexpr, M: tl.constexpr, N: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a block of keys and values of one head, d_k and d_v [B, T, G, K].

    They are summed here over the query heads that read them, so that no two programs add to the same address.

    Scores are [N, M], keys first, so that both matmuls that are summed have them on the left, directly from registers.
    """
    BLOCKS: tl.constexpr = tl.cdiv(T, N)
    batch_head, block = _get_head_and_block(BLOCKS, HEADS)
    batch, group = batch_head // G, batch_head % G
    start, full_start, full_end, end = _bounds(bounds, batch * BLOCKS + block)
    keys = k.load([batch, block * N, group * K]).reshape(N, K)
    values = v.load([batch, block * N, group * K]).reshape(N, K)
    rows = block * N + tl.arange(0, N)
    d_keys = tl.zeros([N, K], tl.float32)
    d_values = tl.zeros([N, K], tl.float32)
    for head in tl.range(group * (H // G), (group + 1) * (H // G)):
        for row in tl.range(full_start, full_end, M):
            d_keys, d_values = _keys_step(
                q, keys, values, d_out, first, last, log_sum, delta, batch, row, head, rows, d_keys, d_values,
                H, FACTOR, INNER, K, M, MASKED=False,
            )  # fmt: skip
        for step in tl.range(0, _count_masked_rows(start, full_start, full_end, end), M):
            row = _masked_row(step, start, full_start, full_end)
            d_keys, d_values = _keys_step(
                q, keys, values, d_out, first, last, log_sum, delta, batch, row, head, rows, d_keys, d_values,
                H, FACTOR, INNER, K, M, MASKED=True,
            )  # fmt: skip
    _store(d_k, d_keys * SCALE, batch, rows, group, T, G, K)
    _store(d_v, d_values, batch, rows, group, T, G, K)


@triton.jit
def _keys_step(
    q, keys, values, d_out, first, last, log_sum, delta, batch, row, head, rows, d_keys, d_values,
    H: tl.constexpr, FACTOR: tl.constexpr, INNER: tl.constexpr, K: tl.constexpr, M: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    queries = q.load([batch, row, head * K]).reshape(M, K)
    d_outs = d_out.load([batch, row, head * K]).reshape(M, K)
    x = _apply_softcap(tl.dot(keys, queries.T), INNER)
    # A thread holds the per-query values of all its columns. So they are read late, where they are used.
    log2_sums = log_sum.load([batch * H + head, row]).reshape(M) * LOG2_E
    weights = tl.exp2(x * FACTOR - log2_sums[None, :])
    if MASKED:
        earliest = first.load([batch, row]).reshape(M)
        latest = last.load([batch, row]).reshape(M)
        weights = tl.where(_visible(earliest[None, :], latest[None, :], rows[:, None]), weights, 0.0)
    d_values = tl.dot(weights.to(values.dtype), d_outs, d_values)
    d_weights = tl.dot(values, d_outs.T)
    deltas = delta.load([batch * H + head, row]).reshape(M)
    d_products = _d_products(weights, d_weights, deltas[None, :], x, INNER)
    return tl.dot(d_products.to(queries.dtype), queries, d_keys), d_values


@triton.jit
def _get_head_and_block(BLOCKS: tl.constexpr, HEADS: tl.constexpr):
    """Return the head, counted over the batch, and the block of this program.

    Programs start in order. HEADS heads run at the same time, so that the cache can hold all that their programs read.
    """
    program = tl.program_id(0)
    return program // (HEADS * BLOCKS) * HEADS + program % HEADS, program // HEADS % BLOCKS


@triton.jit
def _bounds(bounds, block):
    pointer = bounds + block * 4
    return tl.load(pointer), tl.load(pointer + 1), tl.load(pointer + 2), tl.load(pointer + 3)


@triton.jit
def _count_masked_rows(start, full_start, full_end, end):
    """Count the rows that need a mask."""
    return full_start - start + end - full_end


@triton.jit
def _masked_row(step, start, full_start, full_end):
    """Return the row that comes `step` rows after `start`, without the rows that need no mask."""
    return start + step + tl.where(start + step >= full_start, full_end - full_start, 0)


@triton.jit
def _visible(earliest, latest, keys):
    return (earliest <= keys) & (keys <= latest)


@triton.jit
def _apply_softcap(products, INNER: tl.constexpr):
    return products if INNER is None else 1 - 2 / (1 + tl.exp2(products * INNER))


@triton.jit
def _d_products(weights, d_weights, deltas, x, INNER: tl.constexpr):
    """Return the gradient of the dot products of queries and keys, without SCALE, which the results get at the end."""
    d_scores = weights * (d_weights - deltas)
    return d_scores if INNER is None else d_scores * (1 - x * x)


@triton.jit
def _store(array, block, batch, rows, head, ROWS: tl.constexpr, HEADS: tl.constexpr, K: tl.constexpr):
    """Store a block into [B, ROWS, HEADS, K], except rows past the end."""
    offsets = ((batch.to(tl.int64) * ROWS + rows) * HEADS + head)[:, None] * K + tl.arange(0, K)[None, :]
    tl.store(array + offsets, block.to(array.dtype.element_ty), mask=(rows < ROWS)[:, None])
