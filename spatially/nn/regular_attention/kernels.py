r"""Triton kernels of query-centred attention: forward, and backward for queries, for keys, and for the bias.

A program of one warp owns a tile of ROWS×COLUMNS queries of one head. The keys that the tile sees pass by in chunks of CHUNK
rows of KCOLUMNS keys, fetched by the chip's own copy engine through tensor descriptors (what lies outside the image reads as
0); each chunk is a pair of matrix products. Nothing but q, k, v, the output and one log-sum-exp a query touches memory.

These kernels are bound by the instructions they issue, so that each number sees few:

* What lies outside a query's own square gets −∞: by columns as the start of the matrix product, by rows together with the
  subtraction of the softmax's reference, where a whole row of keys shares one number.
* The softmax needs a reference near the largest logit, not the largest itself. It is taken from a chunk in the middle, and the
  other chunks are not searched. Should a sum then leave the range of exact arithmetic, the tile is done again, with the
  largest logit so far.

The backward pass computes the logits again, once by queries (dq) and once by keys (dk, dv): every sum belongs to one
program, so there are no atomic operations, and results are the same bits each time. The gradient of a bias that learns is
summed down a strip of tiles, whose offsets are all alike, and then over the strips by PyTorch.

Descriptors see maps as (B, heads, H, W, D). Logarithms are to base 2. BORDER is 0 for mask, 1 for zero, 2 for shift. A bias
comes as `table` (heads, queries of a tile, keys of a tile), divided by the scale and −∞ outside the square; with shift, whose
squares slide, as (heads, WINDOW, WINDOW).
"""

import triton
import triton.language as tl

if triton.knobs.runtime.interpret:  # which knows no functions of the chip's own

    @triton.jit
    def log2(number):
        """The logarithm to base 2."""
        return tl.log2(number)
else:
    from triton.language.extra.libdevice import fast_log2f as log2  # type: ignore[no-redef]

MASK, ZERO, SHIFT = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
LOWEST = tl.constexpr(-1e30)  # below every logit, yet a number: differences stay defined


@triton.jit
def place(across, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Image, head and the first row and column of this program's tile."""
    strip, column = tl.program_id(0) // across, tl.program_id(0) % across
    return tl.program_id(2), tl.program_id(1), strip * ROWS, column * COLUMNS


@triton.jit
def read(map, y, x, row, column, here, size: tl.constexpr, SIZE: tl.constexpr):
    """The vectors in places (y, x) of a map."""
    d = tl.arange(0, SIZE)
    return tl.load(
        map + (y * row + x * column)[:, None] + d[None, :], mask=here[:, None] & (d < size)[None, :], other=0.0
    )


@triton.jit
def write(map, vectors, y, x, row, column, here, size: tl.constexpr, SIZE: tl.constexpr):
    """Put vectors into places (y, x) of a map."""
    d = tl.arange(0, SIZE)
    places = map + (y * row + x * column)[:, None] + d[None, :]
    tl.store(places, vectors.to(map.dtype.element_ty), mask=here[:, None] & (d < size)[None, :])


@triton.jit
def first_key(place, length, WINDOW: tl.constexpr, BORDER: tl.constexpr):
    """The key at which the slots of the query in a place begin."""
    start = place - WINDOW // 2
    if BORDER == SHIFT:
        start = tl.minimum(tl.maximum(start, 0), tl.maximum(length - WINDOW, 0))
    return start


@triton.jit
def key_range(place, length, WINDOW: tl.constexpr, BORDER: tl.constexpr):
    """The keys from the first to before the last that take part for the query in a place."""
    start = first_key(place, length, WINDOW, BORDER)
    end = start + WINDOW
    if BORDER != ZERO:
        start, end = tl.maximum(start, 0), tl.minimum(end, length)
    return start, end


@triton.jit
def key_rows(
    top, height, WINDOW: tl.constexpr, BORDER: tl.constexpr,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    """For a tile: the first row of keys, how many chunks were skipped above it, how many there are.

    Chunks outside the image are skipped where they would take no part.
    """
    begin, skipped = first_key(top, height, WINDOW, BORDER), 0
    end = first_key(top + ROWS - 1, height, WINDOW, BORDER) + WINDOW
    if BORDER != ZERO:
        end = tl.minimum(end, height)
        if NARROW:
            begin = tl.maximum(begin, 0)
        else:
            skipped = tl.maximum(-begin, 0) // CHUNK
            begin += skipped * CHUNK
    return begin, skipped, (end - begin + CHUNK - 1) // CHUNK


@triton.jit
def between(number, start, end):
    """Whether start ≤ number < end, by one comparison; anything where end < start."""
    return (number - start).to(tl.uint32, bitcast=True) < (end - start).to(tl.uint32, bitcast=True)


@triton.jit
def outside(number, start, end):
    """0 where start ≤ number < end, else −∞."""
    return tl.where((number >= start) & (number < end), 0.0, float("-inf"))


@triton.jit
def key_columns(left, x, n, width, WINDOW: tl.constexpr, BORDER: tl.constexpr, NARROW: tl.constexpr):
    """For a tile: the first column of keys, all of them, where each query's begin, and −∞ outside each query's."""
    begin = 0 if NARROW else first_key(left, width, WINDOW, BORDER)
    start, end = key_range(x, width, WINDOW, BORDER)
    columns = begin + n
    return begin, columns, first_key(x, width, WINDOW, BORDER), outside(columns[None, :], start[:, None], end[:, None])


@triton.jit
def passing(map, image, head, row, column, N: tl.constexpr, SIZE: tl.constexpr):
    """The N vectors of a chunk of a map."""
    return map.load([image, head, row, column, 0]).reshape(N, SIZE)


@triton.jit
def of_head(table, head, WINDOW: tl.constexpr, BORDER: tl.constexpr, BIAS: tl.constexpr, PAIRS: tl.constexpr):
    """The part of the bias that is a head's."""
    if BIAS:
        table += head * (WINDOW * WINDOW if BORDER == SHIFT else PAIRS)
    return table


@triton.jit
def slots(table, scale, down, over, WINDOW: tl.constexpr):
    """The bias of slots (down, over) from a table (WINDOW, WINDOW), in units of the matrix product."""
    taken = (down >= 0) & (down < WINDOW) & (over >= 0) & (over < WINDOW)
    return tl.load(table + down * WINDOW + over, mask=taken, other=0.0) * (1.4426950408889634 / scale)


@triton.jit
def statistics(lse, delta, y, x, height, width):
    """The log-sum-exp and delta of queries in places (y, x); of those outside such that their weights are 0."""
    inside = (y >= 0) & (y < height) & (x >= 0) & (x < width)
    return (
        tl.load(lse + y * width + x, mask=inside, other=float("inf")),
        tl.load(delta + y * width + x, mask=inside, other=0.0),
    )


@triton.jit
def start_of(
    band, table, scale, chunk, key_y, key_x, first_y, first_x,
    WINDOW: tl.constexpr, BORDER: tl.constexpr, BIAS: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    CHUNKS: tl.constexpr,
):  # fmt: skip
    """What the product of queries and keys starts from: −∞ in columns outside the square, and the bias."""
    if BIAS and BORDER == SHIFT:
        band += slots(table, scale, key_y[None, :] - first_y[:, None], key_x[None, :] - first_x[:, None], WINDOW)
    elif BIAS:
        m, n = tl.arange(0, M), tl.arange(0, N)
        band += tl.load(table + m[:, None] * (CHUNKS * N) + chunk * N + n[None, :])
    return band


@triton.jit
def forward(
    query, key, value, table, out, lse, edge_key, edge_value,
    query_image, query_row, query_column, query_head, out_image, out_row, out_column, out_head,
    height, width, size: tl.constexpr, across, scale,
    WINDOW: tl.constexpr, BORDER: tl.constexpr, BIAS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, KCOLUMNS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
    NARROW: tl.constexpr, SIZE: tl.constexpr, PRECISION: tl.constexpr, LIMIT: tl.constexpr,
    EDGE: tl.constexpr, EDGE_KCOLUMNS: tl.constexpr,
):  # fmt: skip
    """The output and the log-sum-exp. With EDGE, the columns that whole tiles leave over at the right go in slim tiles."""
    image, head, top, left = place(across, ROWS, COLUMNS)
    slim = tl.program_id(0) - across * tl.cdiv(height, ROWS)
    if not EDGE or slim < 0:
        attend(
            query, key, value, table, out, lse, image, head, top, left,
            query_image, query_row, query_column, query_head, out_image, out_row, out_column, out_head,
            height, width, size, scale, WINDOW, BORDER, BIAS,
            ROWS, COLUMNS, KCOLUMNS, CHUNK, CHUNKS, NARROW, SIZE, PRECISION, LIMIT,
        )  # fmt: skip
    else:
        attend(
            query, edge_key, edge_value, table, out, lse, image, head, slim * 2 * ROWS, across * COLUMNS,
            query_image, query_row, query_column, query_head, out_image, out_row, out_column, out_head,
            height, width, size, scale, WINDOW, BORDER, BIAS,
            2 * ROWS, COLUMNS // 2, EDGE_KCOLUMNS, CHUNK * KCOLUMNS // EDGE_KCOLUMNS, CHUNKS, NARROW, SIZE, PRECISION,
            LIMIT,
        )  # fmt: skip


@triton.jit
def attend(
    query, key, value, table, out, lse, image, head, top, left,
    query_image, query_row, query_column, query_head, out_image, out_row, out_column, out_head,
    height, width, size: tl.constexpr, scale,
    WINDOW: tl.constexpr, BORDER: tl.constexpr, BIAS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, KCOLUMNS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
    NARROW: tl.constexpr, SIZE: tl.constexpr, PRECISION: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """One tile."""
    M: tl.constexpr = ROWS * COLUMNS
    N: tl.constexpr = CHUNK * KCOLUMNS
    MIDDLE: tl.constexpr = max(WINDOW // 2, ROWS - 1) // CHUNK  # holds keys of every query
    m, n = tl.arange(0, M), tl.arange(0, N)
    y, x = top + m // COLUMNS, left + m % COLUMNS
    here = (y < height) & (x < width)
    begin_y, skipped, chunks = key_rows(top, height, WINDOW, BORDER, ROWS, CHUNK, NARROW)
    first_y = first_key(y, height, WINDOW, BORDER)
    start_y, end_y = key_range(y, height, WINDOW, BORDER)
    begin_x, key_x, first_x, band = key_columns(left, x, n % KCOLUMNS, width, WINDOW, BORDER, NARROW)
    table = of_head(table, head, WINDOW, BORDER, BIAS, M * CHUNKS * N)

    query += image.to(tl.int64) * query_image + head * query_head
    q = read(query, y, x, query_row, query_column, here, size, SIZE)
    reference = tl.full((M,), LOWEST, tl.float32)
    sums = tl.zeros((M, 8), tl.float32)  # by what one thread holds: nothing is exchanged until the end
    result = tl.zeros((M, SIZE), tl.float32)
    middle = tl.minimum(MIDDLE - skipped, chunks - 1)
    for turn in range(chunks):
        chunk = middle + turn
        chunk = tl.where(chunk < chunks, chunk, chunk - chunks)
        row = begin_y + chunk * CHUNK
        key_y = row + n // KCOLUMNS
        k, v = passing(key, image, head, row, begin_x, N, SIZE), passing(value, image, head, row, begin_x, N, SIZE)
        acc = start_of(
            band, table, scale, chunk + skipped, key_y, key_x, first_y, first_x, WINDOW, BORDER, BIAS, M, N, CHUNKS
        )
        logits = tl.dot(q, tl.trans(k), acc=acc, input_precision=PRECISION)
        taken = between(key_y[None, :], start_y[:, None], end_y[:, None])
        if turn == 0:
            seen = taken
            # Where the tile's first row is surely inside, and in every square, that row is enough.
            if BORDER != SHIFT and not NARROW and ROWS - 1 <= WINDOW // 2:
                seen = (n // KCOLUMNS == WINDOW // 2 % CHUNK)[None, :]
            reference = tl.maximum(tl.max(tl.where(seen, logits, float("-inf")), 1), LOWEST) * scale
        weights = tl.exp2(logits * scale + tl.where(taken, -reference[:, None], float("-inf")))
        sums += tl.sum(weights.reshape(M, N // 8, 8), 1)
        result = tl.dot(weights.to(v.dtype), v, acc=result, input_precision=PRECISION)
    total = tl.sum(sums, 1)

    if tl.max(tl.where(here, total, 0.0), 0) > LIMIT:  # too far above the reference: with the largest so far
        reference = tl.full((M,), LOWEST, tl.float32)
        total = tl.zeros((M,), tl.float32)
        result = tl.zeros((M, SIZE), tl.float32)
        for chunk in range(chunks):
            row = begin_y + chunk * CHUNK
            key_y = row + n // KCOLUMNS
            k, v = passing(key, image, head, row, begin_x, N, SIZE), passing(value, image, head, row, begin_x, N, SIZE)
            acc = start_of(
                band, table, scale, chunk + skipped, key_y, key_x, first_y, first_x, WINDOW, BORDER, BIAS, M, N, CHUNKS
            )
            logits = tl.dot(q, tl.trans(k), acc=acc, input_precision=PRECISION) * scale
            taken = between(key_y[None, :], start_y[:, None], end_y[:, None])
            logits = tl.where(taken, logits, float("-inf"))
            larger = tl.maximum(reference, tl.max(logits, 1))
            weights = tl.exp2(logits - larger[:, None])
            shrink = tl.exp2(reference - larger)
            total = total * shrink + tl.sum(weights, 1)
            result = tl.dot(weights.to(v.dtype), v, acc=result * shrink[:, None], input_precision=PRECISION)
            reference = larger

    logarithm = log2(total)
    result = result * tl.exp2(-logarithm)[:, None]
    out += image.to(tl.int64) * out_image + head * out_head
    write(out, result, y, x, out_row, out_column, here, size, SIZE)
    lse += (image * tl.num_programs(1) + head).to(tl.int64) * height * width
    tl.store(lse + y * width + x, reference + logarithm, mask=here)


@triton.jit
def backward_queries(
    query, key, value, table, out, lse, gradient, query_gradient, delta,
    query_image, query_row, query_column, query_head, out_image, out_row, out_column, out_head,
    gradient_image, gradient_row, gradient_column, gradient_head, dq_image, dq_row, dq_column, dq_head,
    height, width, size: tl.constexpr, across, scale, plain_scale,
    WINDOW: tl.constexpr, BORDER: tl.constexpr, BIAS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, KCOLUMNS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
    NARROW: tl.constexpr, SIZE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq, and on the way delta, the product of output and incoming gradient, which the other kernels need."""
    image, head, top, left = place(across, ROWS, COLUMNS)
    M: tl.constexpr = ROWS * COLUMNS
    N: tl.constexpr = CHUNK * KCOLUMNS
    m, n = tl.arange(0, M), tl.arange(0, N)
    y, x = top + m // COLUMNS, left + m % COLUMNS
    here = (y < height) & (x < width)
    begin_y, skipped, chunks = key_rows(top, height, WINDOW, BORDER, ROWS, CHUNK, NARROW)
    first_y = first_key(y, height, WINDOW, BORDER)
    start_y, end_y = key_range(y, height, WINDOW, BORDER)
    begin_x, key_x, first_x, band = key_columns(left, x, n % KCOLUMNS, width, WINDOW, BORDER, NARROW)
    table = of_head(table, head, WINDOW, BORDER, BIAS, M * CHUNKS * N)
    pixels = (image * tl.num_programs(1) + head).to(tl.int64) * height * width + y * width + x

    batch = image.to(tl.int64)
    q = read(query + batch * query_image + head * query_head, y, x, query_row, query_column, here, size, SIZE)
    do = read(
        gradient + batch * gradient_image + head * gradient_head, y, x, gradient_row, gradient_column, here, size, SIZE
    )
    o = read(out + batch * out_image + head * out_head, y, x, out_row, out_column, here, size, SIZE)
    reference = tl.load(lse + pixels, mask=here, other=float("inf"))
    mean = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    tl.store(delta + pixels, mean, mask=here)
    means = tl.zeros((M, N), tl.float32) - mean[:, None]
    dq = tl.zeros((M, SIZE), tl.float32)
    for chunk in range(chunks):
        row = begin_y + chunk * CHUNK
        key_y = row + n // KCOLUMNS
        k, v = passing(key, image, head, row, begin_x, N, SIZE), passing(value, image, head, row, begin_x, N, SIZE)
        acc = start_of(
            band, table, scale, chunk + skipped, key_y, key_x, first_y, first_x, WINDOW, BORDER, BIAS, M, N, CHUNKS
        )
        logits = tl.dot(q, tl.trans(k), acc=acc, input_precision=PRECISION)
        taken = between(key_y[None, :], start_y[:, None], end_y[:, None])
        weights = tl.exp2(logits * scale + tl.where(taken, -reference[:, None], float("-inf")))
        slope = weights * tl.dot(do, tl.trans(v), acc=means, input_precision=PRECISION)
        dq = tl.dot(slope.to(k.dtype), k, acc=dq, input_precision=PRECISION)
    query_gradient += batch * dq_image + head * dq_head
    write(query_gradient, dq * plain_scale, y, x, dq_row, dq_column, here, size, SIZE)


@triton.jit
def backward_keys(
    query, key, value, table, lse, gradient, delta, key_gradient, value_gradient,
    key_image, key_row, key_column, key_head, value_image, value_row, value_column, value_head,
    dk_image, dk_row, dk_column, dk_head, dv_image, dv_row, dv_column, dv_head,
    height, width, size: tl.constexpr, across, scale, plain_scale,
    WINDOW: tl.constexpr, BORDER: tl.constexpr, BIAS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, KCOLUMNS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
    NARROW: tl.constexpr, SIZE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv, roles swapped: ROWS×COLUMNS are the keys of a tile, and the queries that see them pass by."""
    image, head, top, left = place(across, ROWS, COLUMNS)
    M: tl.constexpr = ROWS * COLUMNS
    N: tl.constexpr = CHUNK * KCOLUMNS
    m, n = tl.arange(0, M), tl.arange(0, N)
    y, x = top + m // COLUMNS, left + m % COLUMNS
    table = of_head(table, head, WINDOW, BORDER, BIAS, M * CHUNKS * N)
    pixels = (image * tl.num_programs(1) + head).to(tl.int64) * height * width
    lse += pixels
    delta += pixels

    batch, here = image.to(tl.int64), (y < height) & (x < width)
    k = read(key + batch * key_image + head * key_head, y, x, key_row, key_column, here, size, SIZE)
    v = read(value + batch * value_image + head * value_head, y, x, value_row, value_column, here, size, SIZE)
    # Queries see keys as keys see queries; those outside the image see nothing.
    first_y, skipped, turns_y = key_rows(top, height, WINDOW, MASK, ROWS, CHUNK, NARROW)
    first_x, turns_x = 0 if NARROW else left - WINDOW // 2, 1
    if BORDER == SHIFT:  # a key near the border is seen from farther away, since squares slide inward
        bottom, right = tl.minimum(top + ROWS, height) - 1, tl.minimum(left + COLUMNS, width) - 1
        first_y = tl.where(top < WINDOW, 0, top - WINDOW // 2)
        first_x = tl.where(left < WINDOW, 0, left - WINDOW // 2)
        last_y = tl.where(bottom >= height - WINDOW, height - 1, bottom + WINDOW // 2)
        last_x = tl.where(right >= width - WINDOW, width - 1, right + WINDOW // 2)
        turns_y, turns_x = (last_y - first_y) // CHUNK + 1, (last_x - first_x) // KCOLUMNS + 1
    dk = tl.zeros((M, SIZE), tl.float32)
    dv = tl.zeros((M, SIZE), tl.float32)
    query_x = first_x + n % KCOLUMNS
    start_x = first_key(query_x, width, WINDOW, BORDER)
    band = outside(x[:, None], start_x[None, :], start_x[None, :] + WINDOW)
    next_reference, next_mean = statistics(lse, delta, first_y + n // KCOLUMNS, query_x, height, width)
    for turn in range(turns_y * turns_x):
        row, column = first_y + (turn // turns_x) * CHUNK, first_x
        if BORDER == SHIFT:
            column += (turn % turns_x) * KCOLUMNS
            query_x = column + n % KCOLUMNS
            start_x = first_key(query_x, width, WINDOW, BORDER)
            band = outside(x[:, None], start_x[None, :], start_x[None, :] + WINDOW)
        q = query.load([image, head, row, column, 0]).reshape(N, SIZE)
        do = gradient.load([image, head, row, column, 0]).reshape(N, SIZE)
        query_y = row + n // KCOLUMNS
        if BORDER == SHIFT:
            reference, mean = statistics(lse, delta, query_y, query_x, height, width)
        else:  # one chunk ahead: the copy engine fetches maps, not these
            reference, mean = next_reference, next_mean
            next_reference, next_mean = statistics(lse, delta, query_y + CHUNK, query_x, height, width)
        start_y = first_key(query_y, height, WINDOW, BORDER)
        acc = band - (reference / scale)[None, :]
        if BIAS and BORDER == SHIFT:
            acc += slots(table, scale, y[:, None] - start_y[None, :], x[:, None] - start_x[None, :], WINDOW)
        elif BIAS:
            acc += tl.load(table + m[:, None] * (CHUNKS * N) + (turn + skipped) * N + n[None, :])
        logits = tl.dot(k, tl.trans(q), acc=acc, input_precision=PRECISION)
        taken = between(y[:, None], start_y[None, :], start_y[None, :] + WINDOW)
        weights = tl.exp2(logits * scale + tl.where(taken, 0.0, float("-inf")))
        dv = tl.dot(weights.to(do.dtype), do, acc=dv, input_precision=PRECISION)
        means = tl.zeros((M, N), tl.float32) - mean[None, :]
        slope = weights * tl.dot(v, tl.trans(do), acc=means, input_precision=PRECISION)
        dk = tl.dot(slope.to(q.dtype), q, acc=dk, input_precision=PRECISION)
    key_gradient += batch * dk_image + head * dk_head
    value_gradient += batch * dv_image + head * dv_head
    write(key_gradient, dk * plain_scale, y, x, dk_row, dk_column, here, size, SIZE)
    write(value_gradient, dv, y, x, dv_row, dv_column, here, size, SIZE)


@triton.jit
def backward_bias(
    query, key, value, table, lse, gradient, delta, partial,
    query_image, query_row, query_column, query_head, gradient_image, gradient_row, gradient_column, gradient_head,
    height, width, size: tl.constexpr, across, scale,
    WINDOW: tl.constexpr, BORDER: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, KCOLUMNS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
    SIZE: tl.constexpr, STEPS: tl.constexpr, SLOTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradients of the logits, summed over STEPS tiles below each other: by pair of a tile, with ``shift`` by slot.

    A program takes one chunk of the keys, the same in all its tiles.
    """
    image, head, first, left = place(across, ROWS * STEPS, COLUMNS)
    chunk, head, heads = head % CHUNKS, head // CHUNKS, tl.num_programs(1) // CHUNKS
    M: tl.constexpr = ROWS * COLUMNS
    N: tl.constexpr = CHUNK * KCOLUMNS
    m, n = tl.arange(0, M), tl.arange(0, N)
    x = left + m % COLUMNS
    begin_x, key_x, first_x, band = key_columns(left, x, n % KCOLUMNS, width, WINDOW, BORDER, False)
    table = of_head(table, head, WINDOW, BORDER, True, M * CHUNKS * N)
    pixels = (image * heads + head).to(tl.int64) * height * width
    query += image.to(tl.int64) * query_image + head * query_head
    gradient += image.to(tl.int64) * gradient_image + head * gradient_head
    if BORDER == SHIFT:
        numbers = tl.arange(0, SLOTS)
        summed = tl.zeros((SLOTS,), tl.float32)
    else:
        summed = tl.zeros((M, N), tl.float32)
    for step in range(STEPS):
        top = first + step * ROWS
        y = top + m // COLUMNS
        here = (y < height) & (x < width)
        begin_y, first_y = first_key(top, height, WINDOW, BORDER), first_key(y, height, WINDOW, BORDER)
        start_y, end_y = key_range(y, height, WINDOW, BORDER)
        key_y = begin_y + chunk * CHUNK + n // KCOLUMNS
        q = read(query, y, x, query_row, query_column, here, size, SIZE)
        do = read(gradient, y, x, gradient_row, gradient_column, here, size, SIZE)
        k = key.load([image, head, begin_y + chunk * CHUNK, begin_x, 0]).reshape(N, SIZE)
        v = value.load([image, head, begin_y + chunk * CHUNK, begin_x, 0]).reshape(N, SIZE)
        reference = tl.load(lse + pixels + y * width + x, mask=here, other=float("inf"))
        mean = tl.load(delta + pixels + y * width + x, mask=here, other=0.0)
        acc = start_of(band, table, scale, chunk, key_y, key_x, first_y, first_x, WINDOW, BORDER, True, M, N, CHUNKS)
        logits = tl.dot(q, tl.trans(k), acc=acc, input_precision=PRECISION)
        taken = between(key_y[None, :], start_y[:, None], end_y[:, None])
        weights = tl.exp2(logits * scale + tl.where(taken, -reference[:, None], float("-inf")))
        means = tl.zeros((M, N), tl.float32) - mean[:, None]
        slope = weights * tl.dot(do, tl.trans(v), acc=means, input_precision=PRECISION)
        if BORDER == SHIFT:
            down, over = key_y[None, :] - first_y[:, None], key_x[None, :] - first_x[:, None]
            number = tl.where((down >= 0) & (down < WINDOW) & (over >= 0) & (over < WINDOW), down * WINDOW + over, -1)
            for slot in range(WINDOW * WINDOW):
                summed += tl.where(numbers == slot, tl.sum(tl.where(number == slot, slope, 0.0)), 0.0)
        else:
            summed += slope
    program = (image * tl.num_programs(0) + tl.program_id(0)).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    if BORDER == SHIFT:
        tl.store(partial + program * SLOTS + numbers, summed)
    else:
        tl.store(partial + program * (M * N) + m[:, None] * N + n[None, :], summed)
