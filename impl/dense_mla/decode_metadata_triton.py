"""How does our own kernel answer for the metadata of a decode batch?"""

from __future__ import annotations

import torch

from cases.dense_mla.decode_metadata import Inputs, Outputs
from impl.dense_mla import batch_tables_triton
from impl.dense_mla.batch_shape import shape_of
from impl.dense_mla.decode_metadata import answer


def run(inputs: Inputs) -> Outputs:
    """The tables of one launch, in new memory."""
    batch = inputs.batch
    shape = shape_of(batch.query_lens, batch.tokens)
    count = len(batch.query_lens)
    round_robin = inputs.route == "round_robin"
    qo_indptr, kv_indptr, global_indptr = (batch.seq_lens.new_empty(count + 1) for _ in range(3))
    kernel_lens = batch.seq_lens.new_empty(count)
    batch_tables_triton.fill(
        qo_indptr, kv_indptr, kernel_lens, global_indptr if round_robin else None, batch, shape.query, inputs.world,
        padded=shape.padded, uniform=shape.padded or (shape.query == 1 and not inputs.graphs),
    )  # fmt: skip
    nothing = torch.empty(0, dtype=torch.int32, device=batch.seq_lens.device)
    return answer(inputs, shape, qo_indptr, kernel_lens, kv_indptr, global_indptr if round_robin else nothing)
