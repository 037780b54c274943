r"""Triton kernels of query-centred attention: forward, and backward for queries, for keys, and for the bias.

A program owns a tile of QROWS×QCOLUMNS queries of one head. The keys that the tile sees pass by in steps of CHUNK rows of
KCOLUMNS keys; each step is a pair of matrix products, and what lies outside a query's own square is −∞. The softmax is
taken on the way (largest logit and sum so far), so that nothing but q, k, v, the output and one log-sum-exp a query touches
memory.

The backward pass computes the logits again, once by queries (dq) and once by keys (dk, dv): every sum belongs to one
program, so there are no atomic operations, and results are the same bits each time. The gradient of a bias that learns is
summed down a strip of tiles, whose offsets are all alike, and then over the strips by PyTorch.

Logarithms are to base 2. BORDER is 0 for mask, 1 for zero, 2 for shift.
"""

import triton
import triton.language as tl

MASK, ZERO, SHIFT = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def first_key(place, length, WINDOW: tl.constexpr, BORDER: tl.constexpr):
    """The key at which the slots of the query in a place begin."""
    start = place - WINDOW // 2
    if BORDER == SHIFT:
        start = tl.minimum(tl.maximum(start, 0), tl.maximum(length - WINDOW, 0))
    return start


@triton.jit
def with_bias(logits, bias, down, across, WINDOW: tl.constexpr, BIAS: tl.constexpr):
    """Logits with the bias (to base 2) of their slots, and −∞ outside the square."""
    taken = (down >= 0) & (down < WINDOW) & (across >= 0) & (across < WINDOW)
    if BIAS:
        logits += tl.load(bias + down * WINDOW + across, mask=taken, other=0.0).to(tl.float32) * 1.4426950408889634
    return tl.where(taken, logits, float("-inf"))


@triton.jit
def forward(
    query, key, value, bias, out, lse,
    query_image, query_row, query_column, query_head,
    key_image, key_row, key_column, key_head,
    value_image, value_row, value_column, value_head,
    height, width, heads, size, across, strips, scale,
    WINDOW: tl.constexpr, BORDER: tl.constexpr, BIAS: tl.constexpr,
    QROWS: tl.constexpr, QCOLUMNS: tl.constexpr, KROWS: tl.constexpr, KCOLUMNS: tl.constexpr, CHUNK: tl.constexpr,
    SIZE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    head, rest = program % heads, program // heads
    tile, rest = rest % across, rest // across
    strip, image = rest % strips, (rest // strips).to(tl.int64)
    m, n, d = tl.arange(0, QROWS * QCOLUMNS), tl.arange(0, CHUNK * KCOLUMNS), tl.arange(0, SIZE)
    channel = d < size

    query += image * query_image + head * query_head
    key += image * key_image + head * key_head
    value += image * value_image + head * value_head
    bias += head * WINDOW * WINDOW
    out += (image * height * width * heads + head) * size
    lse += (image * heads + head) * height * width

    y, x = strip * QROWS + m // QCOLUMNS, tile * QCOLUMNS + m % QCOLUMNS
    here = (y < height) & (x < width)
    start_y, start_x = first_key(y, height, WINDOW, BORDER), first_key(x, width, WINDOW, BORDER)
    begin_y = first_key(strip * QROWS, height, WINDOW, BORDER)
    key_x = first_key(tile * QCOLUMNS, width, WINDOW, BORDER) + n % KCOLUMNS
    q = tl.load(
        query + (y * query_row + x * query_column)[:, None] + d[None, :],
        mask=here[:, None] & channel[None, :],
        other=0.0,
    )
    largest = tl.full((QROWS * QCOLUMNS,), -1e30, tl.float32)
    total = tl.zeros((QROWS * QCOLUMNS,), tl.float32)
    result = tl.zeros((QROWS * QCOLUMNS, SIZE), tl.float32)
    for chunk in range(KROWS // CHUNK):
        key_y = begin_y + chunk * CHUNK + n // KCOLUMNS
        inside = (key_x >= 0) & (key_x < width) & (key_y >= 0) & (key_y < height)
        seen = inside[:, None] & channel[None, :]
        k = tl.load(key + (key_y * key_row + key_x * key_column)[:, None] + d[None, :], mask=seen, other=0.0)
        v = tl.load(value + (key_y * value_row + key_x * value_column)[:, None] + d[None, :], mask=seen, other=0.0)
        logits = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        logits = with_bias(
            logits, bias, key_y[None, :] - start_y[:, None], key_x[None, :] - start_x[:, None], WINDOW, BIAS
        )
        if BORDER != ZERO:
            logits = tl.where(inside[None, :], logits, float("-inf"))
        larger = tl.maximum(largest, tl.max(logits, 1))
        weights = tl.exp2(logits - larger[:, None])
        shrink = tl.exp2(largest - larger)
        total = total * shrink + tl.sum(weights, 1)
        result = tl.dot(weights.to(v.dtype), v, acc=result * shrink[:, None], input_precision=PRECISION)
        largest = larger
    place = y * width + x
    result = result / total[:, None]
    tl.store(
        out + (place * heads * size)[:, None] + d[None, :],
        result.to(out.dtype.element_ty),
        mask=here[:, None] & channel[None, :],
    )
    tl.store(lse + place, largest + tl.log2(total), mask=here)


@triton.jit
def backward_queries(
    query, key, value, bias, out, lse, gradient, query_gradient, delta,
    query_image, query_row, query_column, query_head,
    key_image, key_row, key_column, key_head,
    value_image, value_row, value_column, value_head,
    gradient_image, gradient_row, gradient_column, gradient_head,
    dq_image, dq_row, dq_column, dq_head,
    height, width, heads, size, across, strips, scale, plain_scale,
    WINDOW: tl.constexpr, BORDER: tl.constexpr, BIAS: tl.constexpr,
    QROWS: tl.constexpr, QCOLUMNS: tl.constexpr, KROWS: tl.constexpr, KCOLUMNS: tl.constexpr, CHUNK: tl.constexpr,
    SIZE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq, and on the way delta, the product of output and incoming gradient, which the other kernels need."""
    program = tl.program_id(0)
    head, rest = program % heads, program // heads
    tile, rest = rest % across, rest // across
    strip, image = rest % strips, (rest // strips).to(tl.int64)
    m, n, d = tl.arange(0, QROWS * QCOLUMNS), tl.arange(0, CHUNK * KCOLUMNS), tl.arange(0, SIZE)
    channel = d < size

    query += image * query_image + head * query_head
    key += image * key_image + head * key_head
    value += image * value_image + head * value_head
    gradient += image * gradient_image + head * gradient_head
    query_gradient += image * dq_image + head * dq_head
    bias += head * WINDOW * WINDOW
    out += (image * height * width * heads + head) * size
    lse += (image * heads + head) * height * width
    delta += (image * heads + head) * height * width

    y, x = strip * QROWS + m // QCOLUMNS, tile * QCOLUMNS + m % QCOLUMNS
    here = (y < height) & (x < width)
    whole = here[:, None] & channel[None, :]
    place = y * width + x
    start_y, start_x = first_key(y, height, WINDOW, BORDER), first_key(x, width, WINDOW, BORDER)
    begin_y = first_key(strip * QROWS, height, WINDOW, BORDER)
    key_x = first_key(tile * QCOLUMNS, width, WINDOW, BORDER) + n % KCOLUMNS
    q = tl.load(query + (y * query_row + x * query_column)[:, None] + d[None, :], mask=whole, other=0.0)
    do = tl.load(gradient + (y * gradient_row + x * gradient_column)[:, None] + d[None, :], mask=whole, other=0.0)
    o = tl.load(out + (place * heads * size)[:, None] + d[None, :], mask=whole, other=0.0)
    total = tl.load(lse + place, mask=here, other=float("inf"))
    mean = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    tl.store(delta + place, mean, mask=here)
    dq = tl.zeros((QROWS * QCOLUMNS, SIZE), tl.float32)
    for chunk in range(KROWS // CHUNK):
        key_y = begin_y + chunk * CHUNK + n // KCOLUMNS
        inside = (key_x >= 0) & (key_x < width) & (key_y >= 0) & (key_y < height)
        seen = inside[:, None] & channel[None, :]
        k = tl.load(key + (key_y * key_row + key_x * key_column)[:, None] + d[None, :], mask=seen, other=0.0)
        v = tl.load(value + (key_y * value_row + key_x * value_column)[:, None] + d[None, :], mask=seen, other=0.0)
        logits = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        logits = with_bias(
            logits, bias, key_y[None, :] - start_y[:, None], key_x[None, :] - start_x[:, None], WINDOW, BIAS
        )
        if BORDER != ZERO:
            logits = tl.where(inside[None, :], logits, float("-inf"))
        weights = tl.exp2(logits - total[:, None])
        slope = weights * (tl.dot(do, tl.trans(v), input_precision=PRECISION) - mean[:, None])
        dq = tl.dot(slope.to(k.dtype), k, acc=dq, input_precision=PRECISION)
    dq = dq * plain_scale
    tl.store(
        query_gradient + (y * dq_row + x * dq_column)[:, None] + d[None, :],
        dq.to(query_gradient.dtype.element_ty),
        mask=whole,
    )


@triton.jit
def backward_keys(
    query, key, value, bias, lse, gradient, delta, key_gradient, value_gradient,
    query_image, query_row, query_column, query_head,
    key_image, key_row, key_column, key_head,
    value_image, value_row, value_column, value_head,
    gradient_image, gradient_row, gradient_column, gradient_head,
    dk_image, dk_row, dk_column, dk_head,
    dv_image, dv_row, dv_column, dv_head,
    height, width, heads, size, across, strips, scale, plain_scale,
    WINDOW: tl.constexpr, BORDER: tl.constexpr, BIAS: tl.constexpr,
    QROWS: tl.constexpr, QCOLUMNS: tl.constexpr, KROWS: tl.constexpr, KCOLUMNS: tl.constexpr, CHUNK: tl.constexpr,
    SIZE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv, roles swapped: QROWS×QCOLUMNS are the keys of a tile, and the queries that see them pass by."""
    program = tl.program_id(0)
    head, rest = program % heads, program // heads
    tile, rest = rest % across, rest // across
    strip, image = rest % strips, (rest // strips).to(tl.int64)
    m, n, d = tl.arange(0, QROWS * QCOLUMNS), tl.arange(0, CHUNK * KCOLUMNS), tl.arange(0, SIZE)
    channel = d < size

    query += image * query_image + head * query_head
    key += image * key_image + head * key_head
    value += image * value_image + head * value_head
    gradient += image * gradient_image + head * gradient_head
    key_gradient += image * dk_image + head * dk_head
    value_gradient += image * dv_image + head * dv_head
    bias += head * WINDOW * WINDOW
    lse += (image * heads + head) * height * width
    delta += (image * heads + head) * height * width

    top, left = strip * QROWS, tile * QCOLUMNS
    y, x = top + m // QCOLUMNS, left + m % QCOLUMNS
    here = (y < height) & (x < width)
    whole = here[:, None] & channel[None, :]
    k = tl.load(key + (y * key_row + x * key_column)[:, None] + d[None, :], mask=whole, other=0.0)
    v = tl.load(value + (y * value_row + x * value_column)[:, None] + d[None, :], mask=whole, other=0.0)
    first_y, first_x = top - WINDOW // 2, left - WINDOW // 2
    turns_y, turns_x = KROWS // CHUNK, 1
    if BORDER == SHIFT:  # a key near the border is seen from farther away, since squares slide inward
        bottom, right = tl.minimum(top + QROWS, height) - 1, tl.minimum(left + QCOLUMNS, width) - 1
        first_y, first_x = tl.where(top < WINDOW, 0, first_y), tl.where(left < WINDOW, 0, first_x)
        last_y = tl.where(bottom >= height - WINDOW, height - 1, bottom + WINDOW // 2)
        last_x = tl.where(right >= width - WINDOW, width - 1, right + WINDOW // 2)
        turns_y, turns_x = (last_y - first_y) // CHUNK + 1, (last_x - first_x) // KCOLUMNS + 1
    dk = tl.zeros((QROWS * QCOLUMNS, SIZE), tl.float32)
    dv = tl.zeros((QROWS * QCOLUMNS, SIZE), tl.float32)
    for turn in range(turns_y * turns_x):
        query_y = first_y + (turn // turns_x) * CHUNK + n // KCOLUMNS
        query_x = first_x + (turn % turns_x) * KCOLUMNS + n % KCOLUMNS
        inside = (query_y >= 0) & (query_y < height) & (query_x >= 0) & (query_x < width)
        seen = inside[:, None] & channel[None, :]
        place = query_y * width + query_x
        q = tl.load(query + (query_y * query_row + query_x * query_column)[:, None] + d[None, :], mask=seen, other=0.0)
        do = tl.load(
            gradient + (query_y * gradient_row + query_x * gradient_column)[:, None] + d[None, :], mask=seen, other=0.0
        )
        total = tl.load(lse + place, mask=inside, other=float("inf"))
        mean = tl.load(delta + place, mask=inside, other=0.0)
        slot_y = y[:, None] - first_key(query_y, height, WINDOW, BORDER)[None, :]
        slot_x = x[:, None] - first_key(query_x, width, WINDOW, BORDER)[None, :]
        logits = tl.dot(k, tl.trans(q), input_precision=PRECISION) * scale
        logits = with_bias(logits, bias, slot_y, slot_x, WINDOW, BIAS)
        weights = tl.exp2(logits - total[None, :])
        dv = tl.dot(weights.to(do.dtype), do, acc=dv, input_precision=PRECISION)
        slope = weights * (tl.dot(v, tl.trans(do), input_precision=PRECISION) - mean[None, :])
        dk = tl.dot(slope.to(q.dtype), q, acc=dk, input_precision=PRECISION)
    dk = dk * plain_scale
    tl.store(
        key_gradient + (y * dk_row + x * dk_column)[:, None] + d[None, :],
        dk.to(key_gradient.dtype.element_ty),
        mask=whole,
    )
    tl.store(
        value_gradient + (y * dv_row + x * dv_column)[:, None] + d[None, :],
        dv.to(value_gradient.dtype.element_ty),
        mask=whole,
    )


@triton.jit
def backward_bias(
    query, key, value, bias, lse, gradient, delta, partial,
    query_image, query_row, query_column, query_head,
    key_image, key_row, key_column, key_head,
    value_image, value_row, value_column, value_head,
    gradient_image, gradient_row, gradient_column, gradient_head,
    height, width, heads, size, across, strips, scale,
    WINDOW: tl.constexpr, BORDER: tl.constexpr,
    QROWS: tl.constexpr, QCOLUMNS: tl.constexpr, KROWS: tl.constexpr, KCOLUMNS: tl.constexpr, CHUNK: tl.constexpr,
    SIZE: tl.constexpr, STEPS: tl.constexpr, SLOTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradients of the logits, summed over STEPS tiles below each other: by pair of a tile, with ``shift`` by slot.

    A program takes one chunk of the keys, the same in all its tiles.
    """
    program = tl.program_id(0)
    chunk, rest = program % (KROWS // CHUNK), program // (KROWS // CHUNK)
    head, rest = rest % heads, rest // heads
    tile, rest = rest % across, rest // across
    strip, image = rest % strips, (rest // strips).to(tl.int64)
    m, n, d = tl.arange(0, QROWS * QCOLUMNS), tl.arange(0, CHUNK * KCOLUMNS), tl.arange(0, SIZE)
    channel = d < size

    query += image * query_image + head * query_head
    key += image * key_image + head * key_head
    value += image * value_image + head * value_head
    gradient += image * gradient_image + head * gradient_head
    bias += head * WINDOW * WINDOW
    lse += (image * heads + head) * height * width
    delta += (image * heads + head) * height * width

    x = tile * QCOLUMNS + m % QCOLUMNS
    key_x = first_key(tile * QCOLUMNS, width, WINDOW, BORDER) + n % KCOLUMNS
    slot_x = key_x[None, :] - first_key(x, width, WINDOW, BORDER)[:, None]
    if BORDER == SHIFT:
        slots = tl.arange(0, SLOTS)
        summed = tl.zeros((SLOTS,), tl.float32)
    else:
        summed = tl.zeros((QROWS * QCOLUMNS, CHUNK * KCOLUMNS), tl.float32)
    for step in range(STEPS):
        top = (strip * STEPS + step) * QROWS
        if top < height:
            y = top + m // QCOLUMNS
            here = (y < height) & (x < width)
            whole = here[:, None] & channel[None, :]
            place = y * width + x
            key_y = first_key(top, height, WINDOW, BORDER) + chunk * CHUNK + n // KCOLUMNS
            slot_y = key_y[None, :] - first_key(y, height, WINDOW, BORDER)[:, None]
            inside = (key_x >= 0) & (key_x < width) & (key_y >= 0) & (key_y < height)
            seen = inside[:, None] & channel[None, :]
            q = tl.load(query + (y * query_row + x * query_column)[:, None] + d[None, :], mask=whole, other=0.0)
            do = tl.load(
                gradient + (y * gradient_row + x * gradient_column)[:, None] + d[None, :], mask=whole, other=0.0
            )
            k = tl.load(key + (key_y * key_row + key_x * key_column)[:, None] + d[None, :], mask=seen, other=0.0)
            v = tl.load(value + (key_y * value_row + key_x * value_column)[:, None] + d[None, :], mask=seen, other=0.0)
            total = tl.load(lse + place, mask=here, other=float("inf"))
            mean = tl.load(delta + place, mask=here, other=0.0)
            logits = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
            logits = with_bias(logits, bias, slot_y, slot_x, WINDOW, True)
            if BORDER != ZERO:
                logits = tl.where(inside[None, :], logits, float("-inf"))
            weights = tl.exp2(logits - total[:, None])
            slope = weights * (tl.dot(do, tl.trans(v), input_precision=PRECISION) - mean[:, None])
            if BORDER == SHIFT:
                number = tl.where(
                    (slot_y >= 0) & (slot_y < WINDOW) & (slot_x >= 0) & (slot_x < WINDOW), slot_y * WINDOW + slot_x, -1
                )
                for slot in range(WINDOW * WINDOW):
                    summed += tl.where(slots == slot, tl.sum(tl.where(number == slot, slope, 0.0)), 0.0)
            else:
                summed += slope
    if BORDER == SHIFT:
        tl.store(partial + program.to(tl.int64) * SLOTS + slots, summed)
    else:
        pair = m[:, None] * (CHUNK * KCOLUMNS) + n[None, :]
        tl.store(partial + program.to(tl.int64) * (QROWS * QCOLUMNS * CHUNK * KCOLUMNS) + pair, summed)
