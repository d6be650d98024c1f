# SPDX-License-Identifier: Apache-2.0
"""The memory of torch tensors, as the calls of muster.ProcessGroup take it."""

import torch

# Tensors of other dtypes are sent as bytes.
NATIVE = frozenset(
    [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool]
    + [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
)


def flat(tensor):
    """Returns the elements in one dimension: the memory of the tensor if it has no gaps, otherwise a copy."""
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        tensor = tensor.contiguous().resolve_conj().resolve_neg()
    if tensor.dim() != 1:
        tensor = tensor.view(-1)
    return tensor if tensor.dtype in NATIVE else tensor.view(torch.uint8)


class Into:
    """Flat memory that a call writes in place of tensors. back() copies it into the tensors that have gaps."""

    def __init__(self, tensors):
        self.flat = [flat(tensor) for tensor in tensors]
        self._tensors = tensors

    def back(self):
        """Copies the memory into the tensors that have gaps."""
        for tensor, held in zip(self._tensors, self.flat):
            if held.data_ptr() != tensor.data_ptr():
                tensor.copy_(held.view(tensor.dtype).view(tensor.shape))
