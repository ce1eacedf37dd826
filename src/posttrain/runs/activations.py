"""What a forward pass keeps for its backward pass, in bytes.

Derived from what the modules save, not from a textbook: see the files that are named. R rows (tokens computed), T
tokens (a shared prompt once per segment), K hidden size, I width of the MLP, H D query width, h D key width.
"""

from __future__ import annotations

from posttrain.runs.layout import Layout, MicroBatch
from posttrain.runs.model_shape import ModelShape

LSE_BYTES = 4  # per row and head: what attention keeps of its softmax
COMPILED_ROWS = 1024  # `compiled_attention.FEWEST`
SMALL_HIDDEN = 1024  # `learner.SMALL_HIDDEN_SIZE`: larger models take several threads of torch, and no numba
CPU_LOGITS = 1 << 24  # `fused.LOGITS_PER_CHUNK`, and `kept.KEEP_AT_MOST`
CUDA_LOGITS = 1 << 28  # `fused.LOGITS_PER_CUDA_CHUNK`


def of_layers(shape: ModelShape, layout: Layout, batch: MicroBatch) -> int:
    """Of all layers, from a forward to its backward."""
    if layout.gradient_checkpointing:  # their inputs
        return shape.layers * _rows(layout, batch) * shape.hidden * layout.dtype_bytes
    whole = of_layer(shape, layout, batch)
    last = of_last_layer(shape, layout, batch) if layout.narrows else whole
    return (shape.layers - 1) * whole + last


def computed_again(shape: ModelShape, layout: Layout, batch: MicroBatch) -> int:
    """Of the layer whose backward it is, where only inputs are kept."""
    if not layout.gradient_checkpointing:
        return 0
    last = of_last_layer(shape, layout, batch) if layout.narrows else 0
    return max(of_layer(shape, layout, batch), last)


def of_layer(shape: ModelShape, layout: Layout, batch: MicroBatch) -> int:
    """Norms, attention, MLP."""
    rows = _rows(layout, batch)
    if _written_out(shape, layout, batch):  # x, h, gate and up
        stream = 2 * (shape.hidden + shape.intermediate) * layout.dtype_bytes + 2 * LSE_BYTES
        return rows * stream + _attention(shape, layout, batch)
    mlp = rows * shape.intermediate * layout.dtype_bytes * _mlp_copies(layout)
    gathered = rows * shape.experts_per_token * shape.hidden * layout.dtype_bytes  # tokens by expert
    between = rows * shape.adapter_width * layout.dtype_bytes
    return shape.norms * rows * _norm(shape, layout) + _attention(shape, layout, batch) + mlp + gathered + between


def of_last_layer(shape: ModelShape, layout: Layout, batch: MicroBatch) -> int:
    """`trainer/last_layer.py`: keys and values of all rows; everything else of those that are read, copied."""
    width, rows, read = layout.dtype_bytes, batch.rows, min(batch.rows, batch.read)
    if rows - read < rows / 10:  # not worth it
        return of_layer(shape, layout, batch)
    narrow = MicroBatch(rows=read, tokens=read, read=read)
    keys = rows * _norm(shape, layout) + _keys(shape, layout, batch)
    everywhere = rows * 2 * shape.query_width * width  # queries at their places, and what attention gives
    return keys + everywhere + of_layer(shape, layout, narrow) - _keys(shape, layout, narrow)


def of_last_norm(shape: ModelShape, layout: Layout, batch: MicroBatch) -> int:
    """The last norm, the rows whose log-probs are taken, and the tables of rotary positions."""
    rows = min(batch.rows, batch.read) if layout.narrows else _rows(layout, batch)
    tables = 2 * _rows(layout, batch) * shape.head_size * layout.dtype_bytes
    read = _split(batch.read, layout) * shape.hidden * layout.dtype_bytes
    return rows * _norm(shape, layout) + read + tables


def keeps_probabilities(shape: ModelShape, layout: Layout, batch: MicroBatch) -> bool:
    """`trainer/kept.py`."""
    return layout.device == "cpu" and layout.wide and batch.read * shape.vocabulary <= CPU_LOGITS


def of_head(shape: ModelShape, layout: Layout, batch: MicroBatch) -> tuple[int, int]:
    """(bytes kept from forward to backward, bytes that come and go in the backward pass) of the log-probs.

    The gradient of the head is summed in float32 and then cast, whatever the dtype; logits live for a chunk.
    """
    width, read = layout.dtype_bytes, _split(batch.read, layout)
    gradient = 0 if shape.adapters else shape.embedding * 4
    hidden = read * shape.hidden * width
    if keeps_probabilities(shape, layout, batch):
        return read * shape.vocabulary * 4, gradient + hidden
    most = CPU_LOGITS if layout.device == "cpu" else CUDA_LOGITS
    logits = min(read, max(1, most // shape.vocabulary)) * shape.vocabulary
    if layout.device == "cuda":
        working = logits * width
    else:
        working = logits * 8 + (logits * 2 * width + shape.embedding * width if not layout.wide else 0)
    cast = 0 if layout.wide or shape.adapters else shape.embedding * width
    return 12 * read, gradient + hidden + max(working, cast)


def passing(shape: ModelShape, layout: Layout, batch: MicroBatch) -> int:
    """What comes and goes while the backward pass is in a layer: gradients of the MLP's insides and of the stream."""
    rows = _rows(layout, batch)
    if _written_out(shape, layout, batch):  # insides of the MLP by the block
        return rows * layout.dtype_bytes * (2 * shape.hidden + shape.query_width)
    return rows * layout.dtype_bytes * (2 * shape.intermediate + 2 * shape.hidden)


def _compiled(shape: ModelShape, layout: Layout, batch: MicroBatch) -> bool:
    """`trainer/compiled_attention.py`: prefixes are read in place."""
    here = layout.device == "cpu" and layout.numba and layout.sequence_parallel == 1
    return here and batch.rows >= COMPILED_ROWS and shape.hidden < SMALL_HIDDEN


def _written_out(shape: ModelShape, layout: Layout, batch: MicroBatch) -> bool:
    """`trainer/lean_layers.py`: a layer keeps what goes into its norms and what comes of its products."""
    return _compiled(shape, layout, batch) and shape.plain and layout.tensor_parallel == 1


def _rows(layout: Layout, batch: MicroBatch) -> int:
    return _split(batch.rows, layout)


def _split(count: int, layout: Layout) -> int:
    return -(-count // layout.sequence_parallel)


def _norm(shape: ModelShape, layout: Layout) -> int:
    """Per row: x and y; transformers' own besides x in float32 and, if the weight trains, what it multiplies."""
    if layout.quick_norms:
        return shape.hidden * 2 * layout.dtype_bytes + 4
    return shape.hidden * (4 + layout.dtype_bytes * (1 if shape.adapters else 2)) + 4


def _mlp_copies(layout: Layout) -> int:
    """gate, up and their product; eager also the activation of the gate."""
    return 3 if layout.device == "cuda" and layout.compiled else 4


def _attention(shape: ModelShape, layout: Layout, batch: MicroBatch) -> int:
    """Queries, keys, values, the result, and what the norms of queries and keys keep."""
    rows, width = _rows(layout, batch), layout.dtype_bytes
    kept = rows * (2 * shape.query_width * width + shape.heads * LSE_BYTES) + _keys(shape, layout, batch)
    if (layout.device == "cpu" or layout.sequence_parallel > 1) and not _compiled(shape, layout, batch):
        kept += rows * shape.query_width * width  # the result once more, as rows of the output projection
    if shape.query_norms:
        per_number = width if layout.quick_norms else 4 + (0 if shape.adapters else width)
        kept += rows * (shape.query_width + shape.key_width) * per_number
    return kept


def _keys(shape: ModelShape, layout: Layout, batch: MicroBatch) -> int:
    """Keys and values. Of shared prompts they are laid out for every segment."""
    width = layout.dtype_bytes
    heads = shape.key_heads if layout.grouped_keys else shape.heads
    if layout.device == "cuda":
        return _split(batch.tokens, layout) * 2 * heads * shape.head_size * width
    own = _rows(layout, batch) * 2 * shape.key_width * width
    copies = batch.tokens if batch.shared and not _compiled(shape, layout, batch) else 0
    return own + _split(copies, layout) * 2 * shape.key_width * width
