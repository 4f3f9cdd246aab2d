"""e4m3 with f32 scales: a scale for 1 x 128 of rows, one for 128 x 128 of weights."""

import torch

E4M3, LARGEST, BLOCK = torch.float8_e4m3fn, 448.0, 128
SMALLEST = 2.0 ** -100  # a block of a row whose largest is less has no scale


def blocks_of(columns):
    return -(-columns // BLOCK)


def _in_blocks(rows):
    """[..., blocks, BLOCK] in f32, zeros after the last column."""
    columns = rows.shape[-1]
    padded = torch.nn.functional.pad(rows.float(), (0, blocks_of(columns) * BLOCK - columns))
    return padded.unflatten(-1, (-1, BLOCK))


def _divide(values, scales):
    """As layers do it: all is zero where the scale is."""
    return torch.where(scales == 0, torch.zeros_like(values), values / scales)


def quantise_rows(rows):
    """([..., columns] e4m3, [..., blocks] f32), as a layer quantises what it multiplies.

    Codes are of x * (448 / amax), as DeepGEMM's are, too: ties fall otherwise than those of
    x / (amax / 448).
    """
    blocks = _in_blocks(rows)
    largest = blocks.abs().amax(-1, keepdim=True)
    none = torch.zeros_like(largest)
    # Not LARGEST / largest, which torch rounds twice.
    inverse = torch.where(largest < SMALLEST, none, torch.full_like(largest, LARGEST) / largest)
    values = (blocks * inverse).flatten(-2)[..., :rows.shape[-1]].to(E4M3)
    return values, torch.where(largest < SMALLEST, none, largest / LARGEST).squeeze(-1)


def spread(scales, columns):
    """Each scale for all columns of its block."""
    return scales.repeat_interleave(BLOCK, -1)[..., :columns]


def rounded(rows):
    """What is left of rows that are quantised, in f32."""
    values, scales = quantise_rows(rows)
    return values.float() * spread(scales, rows.shape[-1])


def quantise_blocks(weights):
    """([..., rows, columns] e4m3, [..., blocks, blocks] f32)."""
    rows, columns = weights.shape[-2:]
    across = _in_blocks(weights).abs().amax(-1)
    scales = _in_blocks(across.transpose(-2, -1)).amax(-1).transpose(-2, -1) / LARGEST
    values = _divide(weights.float(), _over(scales, rows, columns)).to(E4M3)
    return values, scales.contiguous()


def _over(scales, rows, columns):
    return spread(spread(scales, columns).transpose(-2, -1), rows).transpose(-2, -1)


def dequantised(values, scales):
    """Weights in f32."""
    return values.float() * _over(scales, *values.shape[-2:])
