r"""Triton kernels of query-centred attention: forward, and backward for queries and for keys.

A program owns a strip of tiles, each of QROWS×QCOLUMNS queries of one head, and walks down it. The keys that a tile sees
fit into one block of KROWS×KCOLUMNS, so that its logits are one matrix product, the softmax is taken at once, and nothing but
q, k, v, the output and one log-sum-exp a query touches memory. What lies outside a query's own square is −∞ in a band that
is made once a strip, with the bias in it: tiles differ in where they lie, not in their offsets.

The backward pass computes the logits again, once by queries (dq, and the sum of the logits' gradients for the bias) and
once by keys (dk, dv): every sum belongs to one program, so there are no atomic operations, and results are the same bits
each time. Logarithms are to base 2. BORDER is 0 for mask, 1 for zero, 2 for shift.
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
def lookup(bias, down, across, WINDOW: tl.constexpr, BIAS: tl.constexpr):
    """What is added to a logit by its slot: the bias (to base 2), and −∞ outside the square."""
    taken = (down >= 0) & (down < WINDOW) & (across >= 0) & (across < WINDOW)
    if BIAS:
        added = tl.load(bias + down * WINDOW + across, mask=taken, other=float("-inf"))
        return added.to(tl.float32) * 1.4426950408889634
    return tl.where(taken, 0.0, float("-inf"))


@triton.jit
def forward(
    query, key, value, bias, out, lse,
    query_image, query_row, query_column, query_head,
    key_image, key_row, key_column, key_head,
    value_image, value_row, value_column, value_head,
    height, width, heads, size, across, strips, scale,
    WINDOW: tl.constexpr, BORDER: tl.constexpr, BIAS: tl.constexpr,
    QROWS: tl.constexpr, QCOLUMNS: tl.constexpr, KROWS: tl.constexpr, KCOLUMNS: tl.constexpr,
    SIZE: tl.constexpr, STEPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    head, rest = program % heads, program // heads
    tile, rest = rest % across, rest // across
    strip, image = rest % strips, (rest // strips).to(tl.int64)
    m, n, d = tl.arange(0, QROWS * QCOLUMNS), tl.arange(0, KROWS * KCOLUMNS), tl.arange(0, SIZE)
    channel = d < size

    x = tile * QCOLUMNS + m % QCOLUMNS
    begin_x = first_key(tile * QCOLUMNS, width, WINDOW, BORDER)
    key_x = begin_x + n % KCOLUMNS
    inside_x = (key_x >= 0) & (key_x < width)
    slot_x = key_x[None, :] - first_key(x, width, WINDOW, BORDER)[:, None]
    if BORDER != SHIFT:
        band = lookup(
            bias + head * WINDOW * WINDOW, (n // KCOLUMNS)[None, :] - (m // QCOLUMNS)[:, None], slot_x, WINDOW, BIAS
        )

    query += image * query_image + head * query_head
    key += image * key_image + head * key_head
    value += image * value_image + head * value_head
    out += (image * height * width * heads + head) * size
    lse += (image * heads + head) * height * width

    for step in range(STEPS):
        top = (strip * STEPS + step) * QROWS
        if top < height:
            y = top + m // QCOLUMNS
            here = (y < height) & (x < width)
            key_y = first_key(top, height, WINDOW, BORDER) + n // KCOLUMNS
            inside = inside_x & (key_y >= 0) & (key_y < height)
            q = tl.load(
                query + (y * query_row + x * query_column)[:, None] + d[None, :],
                mask=here[:, None] & channel[None, :],
                other=0.0,
            )
            k = tl.load(
                key + (key_y * key_row + key_x * key_column)[:, None] + d[None, :],
                mask=inside[:, None] & channel[None, :],
                other=0.0,
            )
            v = tl.load(
                value + (key_y * value_row + key_x * value_column)[:, None] + d[None, :],
                mask=inside[:, None] & channel[None, :],
                other=0.0,
            )
            if BORDER == SHIFT:
                slot_y = key_y[None, :] - first_key(y, height, WINDOW, BORDER)[:, None]
                band = lookup(bias + head * WINDOW * WINDOW, slot_y, slot_x, WINDOW, BIAS)
            logits = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale + band
            if BORDER != ZERO:
                logits = tl.where(inside[None, :], logits, float("-inf"))
            largest = tl.max(logits, 1)
            weights = tl.exp2(logits - largest[:, None])
            total = tl.sum(weights, 1)
            result = tl.dot(weights.to(v.dtype), v, input_precision=PRECISION) / total[:, None]
            place = y * width + x
            tl.store(
                out + (place * heads * size)[:, None] + d[None, :],
                result.to(out.dtype.element_ty),
                mask=here[:, None] & channel[None, :],
            )
            tl.store(lse + place, largest + tl.log2(total), mask=here)


@triton.jit
def backward_queries(
    query, key, value, bias, out, lse, gradient, query_gradient, delta, bias_gradient,
    query_image, query_row, query_column, query_head,
    key_image, key_row, key_column, key_head,
    value_image, value_row, value_column, value_head,
    gradient_image, gradient_row, gradient_column, gradient_head,
    grad_image, grad_row, grad_column, grad_head,
    height, width, heads, size, across, strips, scale, plain_scale,
    WINDOW: tl.constexpr, BORDER: tl.constexpr, BIAS: tl.constexpr, LEARNS: tl.constexpr,
    QROWS: tl.constexpr, QCOLUMNS: tl.constexpr, KROWS: tl.constexpr, KCOLUMNS: tl.constexpr,
    SIZE: tl.constexpr, STEPS: tl.constexpr, SLOTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    head, rest = program % heads, program // heads
    tile, rest = rest % across, rest // across
    strip, image = rest % strips, (rest // strips).to(tl.int64)
    m, n, d = tl.arange(0, QROWS * QCOLUMNS), tl.arange(0, KROWS * KCOLUMNS), tl.arange(0, SIZE)
    channel = d < size

    x = tile * QCOLUMNS + m % QCOLUMNS
    begin_x = first_key(tile * QCOLUMNS, width, WINDOW, BORDER)
    key_x = begin_x + n % KCOLUMNS
    inside_x = (key_x >= 0) & (key_x < width)
    slot_x = key_x[None, :] - first_key(x, width, WINDOW, BORDER)[:, None]
    if BORDER != SHIFT:
        band = lookup(
            bias + head * WINDOW * WINDOW, (n // KCOLUMNS)[None, :] - (m // QCOLUMNS)[:, None], slot_x, WINDOW, BIAS
        )
    if LEARNS:
        if BORDER == SHIFT:
            slots = tl.arange(0, SLOTS)
            summed = tl.zeros((SLOTS,), tl.float32)
        else:
            summed = tl.zeros((QROWS * QCOLUMNS, KROWS * KCOLUMNS), tl.float32)

    query += image * query_image + head * query_head
    key += image * key_image + head * key_head
    value += image * value_image + head * value_head
    gradient += image * gradient_image + head * gradient_head
    query_gradient += image * grad_image + head * grad_head
    out += (image * height * width * heads + head) * size
    lse += (image * heads + head) * height * width
    delta += (image * heads + head) * height * width

    for step in range(STEPS):
        top = (strip * STEPS + step) * QROWS
        if top < height:
            y = top + m // QCOLUMNS
            here = (y < height) & (x < width)
            whole = here[:, None] & channel[None, :]
            key_y = first_key(top, height, WINDOW, BORDER) + n // KCOLUMNS
            inside = inside_x & (key_y >= 0) & (key_y < height)
            place = y * width + x
            q = tl.load(query + (y * query_row + x * query_column)[:, None] + d[None, :], mask=whole, other=0.0)
            k = tl.load(
                key + (key_y * key_row + key_x * key_column)[:, None] + d[None, :],
                mask=inside[:, None] & channel[None, :],
                other=0.0,
            )
            v = tl.load(
                value + (key_y * value_row + key_x * value_column)[:, None] + d[None, :],
                mask=inside[:, None] & channel[None, :],
                other=0.0,
            )
            do = tl.load(
                gradient + (y * gradient_row + x * gradient_column)[:, None] + d[None, :], mask=whole, other=0.0
            )
            o = tl.load(out + (place * heads * size)[:, None] + d[None, :], mask=whole, other=0.0)
            total = tl.load(lse + place, mask=here, other=float("inf"))
            mean = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
            tl.store(delta + place, mean, mask=here)
            if BORDER == SHIFT:
                slot_y = key_y[None, :] - first_key(y, height, WINDOW, BORDER)[:, None]
                band = lookup(bias + head * WINDOW * WINDOW, slot_y, slot_x, WINDOW, BIAS)
            logits = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale + band
            if BORDER != ZERO:
                logits = tl.where(inside[None, :], logits, float("-inf"))
            weights = tl.exp2(logits - total[:, None])
            slope = weights * (tl.dot(do, tl.trans(v), input_precision=PRECISION) - mean[:, None])
            if LEARNS:
                if BORDER == SHIFT:
                    number = slot_y * WINDOW + slot_x
                    taken = (slot_y >= 0) & (slot_y < WINDOW) & (slot_x >= 0) & (slot_x < WINDOW)
                    for slot in range(WINDOW * WINDOW):
                        share = tl.sum(tl.where(taken & (number == slot), slope, 0.0))
                        summed += tl.where(slots == slot, share, 0.0)
                else:
                    summed += slope
            dq = tl.dot(slope.to(k.dtype), k, input_precision=PRECISION) * plain_scale
            tl.store(
                query_gradient + (y * grad_row + x * grad_column)[:, None] + d[None, :],
                dq.to(query_gradient.dtype.element_ty),
                mask=whole,
            )
    if LEARNS:
        if BORDER == SHIFT:
            tl.store(bias_gradient + program.to(tl.int64) * SLOTS + slots, summed)
        else:
            cells: tl.constexpr = QROWS * QCOLUMNS * KROWS * KCOLUMNS
            tl.store(
                bias_gradient + program.to(tl.int64) * cells + m[:, None] * (KROWS * KCOLUMNS) + n[None, :], summed
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
    QROWS: tl.constexpr, QCOLUMNS: tl.constexpr, KROWS: tl.constexpr, KCOLUMNS: tl.constexpr,
    SIZE: tl.constexpr, STEPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Roles swapped: QROWS×QCOLUMNS are the keys of a tile, KROWS×KCOLUMNS the queries that see them."""
    program = tl.program_id(0)
    head, rest = program % heads, program // heads
    tile, rest = rest % across, rest // across
    strip, image = rest % strips, (rest // strips).to(tl.int64)
    m, n, d = tl.arange(0, QROWS * QCOLUMNS), tl.arange(0, KROWS * KCOLUMNS), tl.arange(0, SIZE)
    channel = d < size
    half: tl.constexpr = WINDOW // 2

    x = tile * QCOLUMNS + m % QCOLUMNS
    first_x = tile * QCOLUMNS - half
    passes_x = 1
    if BORDER == SHIFT:
        # A key near the border is seen from farther away, since squares slide inward.
        last_x = tl.minimum(tile * QCOLUMNS + QCOLUMNS, width) - 1
        if tile * QCOLUMNS < WINDOW:
            first_x = 0
        end_x = last_x + half
        if last_x >= width - WINDOW:
            end_x = width - 1
        passes_x = (end_x - first_x) // KCOLUMNS + 1
    if BORDER != SHIFT:
        slot_down = (m // QCOLUMNS)[:, None] - (n // KCOLUMNS)[None, :] + 2 * half
        slot_across = (m % QCOLUMNS)[:, None] - (n % KCOLUMNS)[None, :] + 2 * half
        band = lookup(bias + head * WINDOW * WINDOW, slot_down, slot_across, WINDOW, BIAS)

    query += image * query_image + head * query_head
    key += image * key_image + head * key_head
    value += image * value_image + head * value_head
    gradient += image * gradient_image + head * gradient_head
    key_gradient += image * dk_image + head * dk_head
    value_gradient += image * dv_image + head * dv_head
    lse += (image * heads + head) * height * width
    delta += (image * heads + head) * height * width

    for step in range(STEPS):
        top = (strip * STEPS + step) * QROWS
        if top < height:
            y = top + m // QCOLUMNS
            here = (y < height) & (x < width)
            whole = here[:, None] & channel[None, :]
            k = tl.load(key + (y * key_row + x * key_column)[:, None] + d[None, :], mask=whole, other=0.0)
            v = tl.load(value + (y * value_row + x * value_column)[:, None] + d[None, :], mask=whole, other=0.0)
            first_y = top - half
            passes_y = 1
            if BORDER == SHIFT:
                last_y = tl.minimum(top + QROWS, height) - 1
                if top < WINDOW:
                    first_y = 0
                end_y = last_y + half
                if last_y >= height - WINDOW:
                    end_y = height - 1
                passes_y = (end_y - first_y) // KROWS + 1
            dk = tl.zeros((QROWS * QCOLUMNS, SIZE), tl.float32)
            dv = tl.zeros((QROWS * QCOLUMNS, SIZE), tl.float32)
            for turn in range(passes_y * passes_x):
                query_y = first_y + (turn // passes_x) * KROWS + n // KCOLUMNS
                query_x = first_x + (turn % passes_x) * KCOLUMNS + n % KCOLUMNS
                inside = (query_y >= 0) & (query_y < height) & (query_x >= 0) & (query_x < width)
                seen = inside[:, None] & channel[None, :]
                place = query_y * width + query_x
                q = tl.load(
                    query + (query_y * query_row + query_x * query_column)[:, None] + d[None, :], mask=seen, other=0.0
                )
                do = tl.load(
                    gradient + (query_y * gradient_row + query_x * gradient_column)[:, None] + d[None, :],
                    mask=seen,
                    other=0.0,
                )
                total = tl.load(lse + place, mask=inside, other=float("inf"))
                mean = tl.load(delta + place, mask=inside, other=0.0)
                if BORDER == SHIFT:
                    slot_y = y[:, None] - first_key(query_y, height, WINDOW, BORDER)[None, :]
                    slot_x = x[:, None] - first_key(query_x, width, WINDOW, BORDER)[None, :]
                    band = lookup(bias + head * WINDOW * WINDOW, slot_y, slot_x, WINDOW, BIAS)
                logits = tl.dot(k, tl.trans(q), input_precision=PRECISION) * scale + band
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
