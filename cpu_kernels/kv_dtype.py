"""How a KV cache holds the row of one (position, head, key or value): rows [..., head_dim] of the
model <-> rows of the cache.

A type of one byte is scaled: the row's largest magnitude becomes the type's largest number, and the
float32 scale is the row's last 4 bytes. So a row depends on nothing but its own numbers: not on
what it was computed beside, nor on when. Copies and transfers move rows whole and need not know.
Symmetric absmax, as LLM.int8() has it for activations (arXiv:2208.07339).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from core.kv import SCALE_BYTES

TINY = torch.finfo(torch.float32).tiny
"""The least scale: a row of zeros has one too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVDtype:
    storage: torch.dtype
    """Of the cache's tensor; no two types share one."""
    element: torch.dtype
    """What a number is: `storage`, unless torch cannot index tensors of it."""

    @property
    def is_scaled(self) -> bool:
        return self.element.itemsize == 1

    def encode(self, rows: Tensor) -> Tensor:
        """A row that is not finite becomes one whose scale is not, and so decodes to numbers that
        are not finite."""
        if not self.is_scaled:
            return rows.to(self.storage)
        rows = rows.float()
        scale = (rows.abs().amax(dim=-1, keepdim=True) / self._largest).clamp_min(TINY)
        numbers = rows / scale
        if not self.element.is_floating_point:
            numbers = numbers.round()
        numbers = numbers.to(self.element).view(self.storage)
        return torch.cat((numbers, scale.view(self.storage)), dim=-1)

    def decode(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        if not self.is_scaled:
            return rows.to(dtype)
        scale = rows[..., -SCALE_BYTES:].view(torch.float32)
        return rows[..., :-SCALE_BYTES].view(self.element).float().mul_(scale).to(dtype)

    @property
    def _largest(self) -> float:
        info = torch.finfo if self.element.is_floating_point else torch.iinfo
        return float(info(self.element).max)


KV_DTYPES: Mapping[str, KVDtype] = {
    "float32": KVDtype(storage=torch.float32, element=torch.float32),
    "bfloat16": KVDtype(storage=torch.bfloat16, element=torch.bfloat16),
    "int8": KVDtype(storage=torch.int8, element=torch.int8),
    "fp8": KVDtype(storage=torch.uint8, element=torch.float8_e4m3fn),
}
"""By core.kv's names."""
_BY_STORAGE = {kv_dtype.storage: kv_dtype for kv_dtype in KV_DTYPES.values()}


def kv_dtype_of(kv_layer: Tensor) -> KVDtype:
    return _BY_STORAGE[kv_layer.dtype]
