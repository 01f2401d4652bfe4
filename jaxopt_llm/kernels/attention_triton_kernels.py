"""The device code of attention_triton.py.

Letters: B batch, S queries, T keys, H heads, G key-value heads, K head size, M queries and N keys of a block.

q and d_out are tensor descriptors over [B, S, H × K], k and v over [B, T, G × K], first and last over [B, S], log_sum
and mean over [B × H, S]: the TMA unit copies a block of one head to shared memory, ahead of its use, and gives zeros
for rows past the end. Those give 0 in every sum here: what they are multiplied by, a row of d_out or of q, is 0 too.

bounds: int32 [B, blocks, 4]. Of queries, or in `backward_keys` of keys: the rows of the others that the block visits,
start to end, and those of them from full_start to full_end that all of it sees, which need no mask. From start to
full_start and from full_start to full_end are whole blocks; the last one from full_end on may not be.

Scores are FACTOR × x to base 2, so that a weight is one exp2; x is the product of query and key, or with a cap the
hyperbolic tangent of half of INNER × log(2) × the product.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1e30)  # the peak of a query that has seen nothing: below any score, and finite


@triton.jit
def forward(
    q, k, v, first, last, bounds, out, log_sum,
    S: tl.constexpr, H: tl.constexpr, G: tl.constexpr, K: tl.constexpr,
    FACTOR: tl.constexpr, INNER: tl.constexpr, M: tl.constexpr, N: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """A block of queries of one head: out [B, S, H, K], and log_sum float32 [B, H, S]."""
    BLOCKS: tl.constexpr = tl.cdiv(S, M)
    place, block = _head_and_block(BLOCKS, HEADS)
    block = BLOCKS - 1 - block  # under a causal mask the last ones are the longest: they start first
    batch, head = place // H, place % H
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
    for step in tl.range(0, _edges(start, full_start, full_end, end), N):
        row = _edge(step, start, full_start, full_end)
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
    x = _capped(tl.dot(queries, keys.T), INNER)
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
    q, k, v, d_out, first, last, log_sum, mean, bounds, d_q,
    S: tl.constexpr, H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, SCALE: tl.constexpr,
    FACTOR: tl.constexpr, INNER: tl.constexpr, M: tl.constexpr, N: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """The gradient of a block of queries of one head, d_q [B, S, H, K]."""
    BLOCKS: tl.constexpr = tl.cdiv(S, M)
    place, block = _head_and_block(BLOCKS, HEADS)
    block = BLOCKS - 1 - block  # under a causal mask the last ones are the longest: they start first
    batch, head = place // H, place % H
    start, full_start, full_end, end = _bounds(bounds, batch * BLOCKS + block)
    queries = q.load([batch, block * M, head * K]).reshape(M, K)
    d_outs = d_out.load([batch, block * M, head * K]).reshape(M, K)
    earliest = first.load([batch, block * M]).reshape(M)
    latest = last.load([batch, block * M]).reshape(M)
    normaliser = log_sum.load([batch * H + head, block * M]).reshape(M) * LOG2_E
    means = mean.load([batch * H + head, block * M]).reshape(M)
    column = head // (H // G) * K
    d_queries = tl.zeros([M, K], tl.float32)
    for row in tl.range(full_start, full_end, N):
        d_queries = _queries_step(
            queries, k, v, d_outs, earliest, latest, normaliser, means, batch, row, column, d_queries,
            FACTOR, INNER, K, N, MASKED=False,
        )  # fmt: skip
    for step in tl.range(0, _edges(start, full_start, full_end, end), N):
        row = _edge(step, start, full_start, full_end)
        d_queries = _queries_step(
            queries, k, v, d_outs, earliest, latest, normaliser, means, batch, row, column, d_queries,
            FACTOR, INNER, K, N, MASKED=True,
        )  # fmt: skip
    _store(d_q, d_queries * SCALE, batch, block * M + tl.arange(0, M), head, S, H, K)


@triton.jit
def _queries_step(
    queries, k, v, d_outs, earliest, latest, normaliser, means, batch, row, column, d_queries,
    FACTOR: tl.constexpr, INNER: tl.constexpr, K: tl.constexpr, N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    keys = k.load([batch, row, column]).reshape(N, K)
    values = v.load([batch, row, column]).reshape(N, K)
    x = _capped(tl.dot(queries, keys.T), INNER)
    weights = tl.exp2(x * FACTOR - normaliser[:, None])
    if MASKED:
        visible = _visible(earliest[:, None], latest[:, None], (row + tl.arange(0, N))[None, :])
        weights = tl.where(visible, weights, 0.0)
    d_products = _d_products(weights, tl.dot(d_outs, values.T), means[:, None], x, INNER)
    return tl.dot(d_products.to(keys.dtype), keys, d_queries)


@triton.jit
def backward_keys(
    q, k, v, d_out, first, last, log_sum, mean, bounds, d_k, d_v,
    T: tl.constexpr, H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, SCALE: tl.constexpr,
    FACTOR: tl.constexpr, INNER: tl.constexpr, M: tl.constexpr, N: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """The gradients of a block of keys and values of one head, d_k and d_v [B, T, G, K]: summed here over the query
    heads that read them, so that no two programs add to one place.

    Scores are [N, M], keys first: so both products that are summed up have them on the left, straight from registers.
    """
    BLOCKS: tl.constexpr = tl.cdiv(T, N)
    place, block = _head_and_block(BLOCKS, HEADS)
    batch, group = place // G, place % G
    start, full_start, full_end, end = _bounds(bounds, batch * BLOCKS + block)
    keys = k.load([batch, block * N, group * K]).reshape(N, K)
    values = v.load([batch, block * N, group * K]).reshape(N, K)
    rows = block * N + tl.arange(0, N)
    d_keys = tl.zeros([N, K], tl.float32)
    d_values = tl.zeros([N, K], tl.float32)
    for head in tl.range(group * (H // G), (group + 1) * (H // G)):
        for row in tl.range(full_start, full_end, M):
            d_keys, d_values = _keys_step(
                q, keys, values, d_out, first, last, log_sum, mean, batch, row, head, rows, d_keys, d_values,
                H, FACTOR, INNER, K, M, MASKED=False,
            )  # fmt: skip
        for step in tl.range(0, _edges(start, full_start, full_end, end), M):
            row = _edge(step, start, full_start, full_end)
            d_keys, d_values = _keys_step(
                q, keys, values, d_out, first, last, log_sum, mean, batch, row, head, rows, d_keys, d_values,
                H, FACTOR, INNER, K, M, MASKED=True,
            )  # fmt: skip
    _store(d_k, d_keys * SCALE, batch, rows, group, T, G, K)
    _store(d_v, d_values, batch, rows, group, T, G, K)


@triton.jit
def _keys_step(
    q, keys, values, d_out, first, last, log_sum, mean, batch, row, head, rows, d_keys, d_values,
    H: tl.constexpr, FACTOR: tl.constexpr, INNER: tl.constexpr, K: tl.constexpr, M: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    queries = q.load([batch, row, head * K]).reshape(M, K)
    d_outs = d_out.load([batch, row, head * K]).reshape(M, K)
    x = _capped(tl.dot(keys, queries.T), INNER)
    # Of a number per query a thread holds those of all its columns: it is read where it is used, late.
    normaliser = log_sum.load([batch * H + head, row]).reshape(M) * LOG2_E
    weights = tl.exp2(x * FACTOR - normaliser[None, :])
    if MASKED:
        earliest = first.load([batch, row]).reshape(M)
        latest = last.load([batch, row]).reshape(M)
        weights = tl.where(_visible(earliest[None, :], latest[None, :], rows[:, None]), weights, 0.0)
    d_values = tl.dot(weights.to(values.dtype), d_outs, d_values)
    d_weights = tl.dot(values, d_outs.T)
    means = mean.load([batch * H + head, row]).reshape(M)
    d_products = _d_products(weights, d_weights, means[None, :], x, INNER)
    return tl.dot(d_products.to(queries.dtype), queries, d_keys), d_values


@triton.jit
def _head_and_block(BLOCKS: tl.constexpr, HEADS: tl.constexpr):
    """Head, counted over the batch, and block of this program. Programs start in their order, and HEADS heads go side
    by side: the cache holds together what their programs read."""
    program = tl.program_id(0)
    return program // (HEADS * BLOCKS) * HEADS + program % HEADS, program // HEADS % BLOCKS


@triton.jit
def _bounds(bounds, block):
    at = bounds + block * 4
    return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)


@triton.jit
def _edges(start, full_start, full_end, end):
    """Rows that need a mask."""
    return full_start - start + end - full_end


@triton.jit
def _edge(step, start, full_start, full_end):
    """The row that comes `step` after `start`, those of the run that needs no mask left out."""
    return start + step + tl.where(start + step >= full_start, full_end - full_start, 0)


@triton.jit
def _visible(earliest, latest, keys):
    return (earliest <= keys) & (keys <= latest)


@triton.jit
def _capped(products, INNER: tl.constexpr):
    return products if INNER is None else 1 - 2 / (1 + tl.exp2(products * INNER))


@triton.jit
def _d_products(weights, d_weights, means, x, INNER: tl.constexpr):
    """The gradient of the products of queries and keys, but for the factor SCALE, which the results get at the end."""
    d_scores = weights * (d_weights - means)
    return d_scores if INNER is None else d_scores * (1 - x * x)


@triton.jit
def _store(array, block, batch, rows, head, ROWS: tl.constexpr, HEADS: tl.constexpr, K: tl.constexpr):
    """Into [B, ROWS, HEADS, K], but for rows past the end."""
    at = ((batch.to(tl.int64) * ROWS + rows) * HEADS + head)[:, None] * K + tl.arange(0, K)[None, :]
    tl.store(array + at, block.to(array.dtype.element_ty), mask=(rows < ROWS)[:, None])
