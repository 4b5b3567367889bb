"""Which rows does a query of sparse MLA prefill read?"""

import torch

from cases.sparse_mla.prefill_call import PrefillInputs


def listed(inputs: PrefillInputs, query: int) -> torch.Tensor:
    """The entries of one query in order, int64; the ragged form keeps invalid ones, the dense form has none."""
    if inputs.indices is not None and inputs.indptr is not None:
        return inputs.indices[int(inputs.indptr[query]) : int(inputs.indptr[query + 1])].long()
    assert inputs.dense is not None
    row = inputs.dense[query].long()
    limit = int((row >= 0).sum()) if inputs.lengths is None else int(inputs.lengths[query])
    row = row[: max(limit, 0)]
    return row[(row >= 0) & (row < inputs.rows)]


def valid(inputs: PrefillInputs, query: int) -> torch.Tensor:
    """The entries of one query that are rows."""
    entries = listed(inputs, query)
    return entries[(entries >= 0) & (entries < inputs.rows)]
