"""Numbers in groups: `value = scale * code + minimum`, one scale per GROUP_SIZE columns of a row.

Owns the two formats' arithmetic, from values to codes and back; knows no layer and no file. Scales
and minimums are float16, as in GGUF's Q8_0, Q4_0 and Q4_1, whose blocks are therefore held exactly
(Q4_0 is the case minimum = -8 * scale): 8.5 and 5 bits per weight.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

GROUP_SIZE = 32
INT8_MAX = 127
INT4_MAX = 15
_TRIAL_RANGES = (14.2, 14.6, 15.0)
"""Codes that a group's width is spread over before its scale is fitted. That there is a fit lowers
perplexity; which few trials it starts from does not measurably matter (docs/quantization.md)."""


class Groups(NamedTuple):
    """Rows of a quantised matrix, one code per element: how formats and files exchange them."""

    codes: Tensor
    """[rows, columns]: int8 without minimums, else uint8 of 0 to 15."""
    scales: Tensor
    """[rows, columns / GROUP_SIZE] float16."""
    minimums: Tensor | None = None
    """As scales; only with 4-bit codes."""


def dequantize(groups: Groups) -> Tensor:
    """[rows, columns] float32."""
    values = _by_group(groups.codes.float())
    values *= groups.scales.float().unsqueeze(-1)
    if groups.minimums is not None:
        values += groups.minimums.float().unsqueeze(-1)
    return values.flatten(-2)


def quantize_int8(values: Tensor) -> Groups:
    """Symmetric: the largest magnitude of a group becomes 127. values [rows, columns] float32."""
    grouped = _by_group(values)
    scales = (grouped.abs().amax(dim=-1, keepdim=True) / INT8_MAX).half()
    codes = (grouped * _inverse(scales)).round_().clamp_(-INT8_MAX, INT8_MAX)
    return Groups(codes.to(torch.int8).flatten(-2), scales.squeeze(-1))


def quantize_int4(values: Tensor) -> Groups:
    """Scale and minimum of each group with the smallest squared error among a few fits: codes by a
    trial range, then scale and minimum by least squares, as llama.cpp's k-quants do
    (make_qkx2_quants). values [rows, columns] float32."""
    grouped = _by_group(values)
    low = grouped.amin(dim=-1, keepdim=True)
    width = grouped.amax(dim=-1, keepdim=True) - low
    scales, minimums = (width / INT4_MAX).half(), low.half()
    error = _squared_error(grouped, scales, minimums)
    for trial in _TRIAL_RANGES:
        fitted = _least_squares(grouped, _int4_codes(grouped, width / trial, low))
        trial_error = _squared_error(grouped, *fitted)
        better = trial_error < error
        scales = torch.where(better, fitted[0], scales)
        minimums = torch.where(better, fitted[1], minimums)
        error = torch.where(better, trial_error, error)
    codes = _int4_codes(grouped, scales, minimums).to(torch.uint8)
    return Groups(codes.flatten(-2), scales.squeeze(-1), minimums.squeeze(-1))


def pack_int4(codes: Tensor) -> Tensor:
    """[rows, columns] uint8 of 0 to 15 -> [rows, columns / 2]. As in GGUF the first half of a group
    is in the low nibbles, the second in the high ones: both unpack to neighbouring elements."""
    low, high = _by_group(codes).chunk(2, dim=-1)
    return (low | (high << 4)).flatten(-2)


def unpack_int4(packed: Tensor) -> Tensor:
    """The inverse of pack_int4."""
    halves = packed.reshape(*packed.shape[:-1], -1, GROUP_SIZE // 2)
    return torch.cat((halves & 0xF, halves >> 4), dim=-1).flatten(-2)


def _by_group(matrix: Tensor) -> Tensor:
    return matrix.reshape(*matrix.shape[:-1], -1, GROUP_SIZE)


def _inverse(scales: Tensor) -> Tensor:
    """1 / scale in float32; 0 for a group of equal values, whose codes do not matter."""
    scales = scales.float()
    return torch.where(scales == 0, 0.0, 1.0 / scales)


def _int4_codes(grouped: Tensor, scales: Tensor, minimums: Tensor) -> Tensor:
    return ((grouped - minimums) * _inverse(scales)).round_().clamp_(0, INT4_MAX)


def _squared_error(grouped: Tensor, scales: Tensor, minimums: Tensor) -> Tensor:
    codes = _int4_codes(grouped, scales, minimums)
    difference = codes.mul_(scales).add_(minimums).sub_(grouped)
    return difference.square_().sum(dim=-1, keepdim=True)


def _least_squares(grouped: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and minimum that come nearest to the values with these codes, in float16."""
    code_mean = codes.mean(dim=-1, keepdim=True)
    mean = grouped.mean(dim=-1, keepdim=True)
    centred = codes - code_mean
    variance = centred.square().sum(dim=-1, keepdim=True)
    scales = (centred * grouped).sum(dim=-1, keepdim=True) * _inverse(variance)
    scales = scales.half()
    return scales, (mean - scales * code_mean).half()
