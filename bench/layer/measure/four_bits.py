"""Weights of 4 bits: two to a byte, the even column in the low half, with scales along each row.

Codes are random bytes: to quantise weights would take many times their memory, and time. Every code
comes as often as any other, so that reading a half byte in the place of the other is an error of
more than 100%.
"""

from typing import NamedTuple

import torch

from measure import fp8

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 += tuple(-each for each in E2M1)
E8M0_BIAS = 127
NVFP4_SCALE = 64.0  # the usual e4m3 scale, far from both ends of what e4m3 can say
SPREAD = 0.5  # of scales, in powers of two: none of them could stand for another


class Format(NamedTuple):
    group: int  # columns that share a scale
    numbers: tuple  # what the codes stand for
    scale_dtype: torch.dtype  # as stored


FORMATS = {"mxfp4": Format(32, E2M1, torch.uint8),
           "nvfp4": Format(16, E2M1, fp8.E4M3),
           "int4_g32": Format(32, tuple(range(-8, 8)), torch.bfloat16)}


def _usual(number, columns):
    """The scale with which rows of so many columns give sums of about the size of the input."""
    numbers = FORMATS[number].numbers
    square = sum(each ** 2 for each in numbers) / len(numbers)
    return (square * columns) ** -0.5


def random_weights(case, parts, rows, columns):
    """(codes [experts, parts * rows, columns / 2], scales [experts, parts * rows, groups], and of
    nvfp4 one more for each part, else None)."""
    experts, group = case.sizes.experts, FORMATS[case.number].group
    assert columns % group == 0, columns
    codes = case.empty(experts, parts * rows, columns // 2, dtype=torch.uint8)
    codes.random_(0, 256, generator=case.generator)
    return codes, *_random_scales(case, parts, _usual(case.number, columns),
                                  (experts, parts * rows, columns // group))


def _random_scales(case, parts, usual, shape):
    """Of each group, and of each part."""
    def around(scale, *shape):
        return case.random(SPREAD, *shape, dtype=torch.float32).exp2_().mul_(scale)

    if case.number == "nvfp4":
        scales = around(NVFP4_SCALE, *shape).clamp_(max=fp8.LARGEST).to(fp8.E4M3)
        of_parts = around(usual / NVFP4_SCALE, shape[0], parts)
        return scales, of_parts if parts > 1 else of_parts.squeeze(1)
    scales = around(usual, *shape)
    if case.number == "mxfp4":
        scales = scales.log2_().round_().add_(E8M0_BIAS)
    return scales.to(FORMATS[case.number].scale_dtype), None


def unpacked(number, codes):
    """[..., columns] in f32."""
    halves = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)
    return torch.tensor(FORMATS[number].numbers, device=codes.device)[halves.long()].float()


def dequantised(number, codes, scales, global_scales):
    """One expert's weights in f32: [rows, columns], with the scales of its parts, if it has any."""
    if number == "mxfp4":
        scales = (scales.float() - E8M0_BIAS).exp2()
    weights = unpacked(number, codes) * scales.float().repeat_interleave(FORMATS[number].group, -1)
    if global_scales is None:
        return weights
    parts = weights.unflatten(0, (global_scales.numel(), -1))
    return (parts * global_scales.view(-1, 1, 1)).flatten(0, 1)
