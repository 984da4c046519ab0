"""Random 4-bit weights of all forms, and the same weights in float64, computed without the project's code."""

from __future__ import annotations

import torch
from torch import Tensor

from runner.kernels.four_bits.stack import FourBitForm, Stored

E4M3 = torch.float8_e4m3fn
NVFP4 = FourBitForm("e2m1", 16, False, E4M3)
MXFP4 = FourBitForm("e2m1", 32, False, torch.uint8)
AWQ = FourBitForm("int4", 128, True, torch.float16)
#: Forms with groups; ``channel`` has a scale per output.
GROUPED = [
    NVFP4,
    MXFP4,
    FourBitForm("int4", 32, True, torch.float16),
    FourBitForm("int4", 32, False, torch.bfloat16),
    FourBitForm("int4", 64, True, torch.float32),
    FourBitForm("int4", 64, False, torch.float16),
    AWQ,
    FourBitForm("int4", 128, False, torch.bfloat16),
]


def channel(inputs: int, has_zeros: bool = False) -> FourBitForm:
    return FourBitForm("int4", inputs, has_zeros, torch.bfloat16)


def random_stored(
    form: FourBitForm, outputs: int, inputs: int, seed: int = 0, device: torch.device | str = "cpu"
) -> Stored:
    """Return a weight of every code, and of many scales."""
    generator = torch.Generator(device).manual_seed(seed)

    def bits(least: int, most: int, *size: int) -> Tensor:
        return torch.randint(least, most + 1, size, generator=generator, device=device, dtype=torch.uint8)

    groups = inputs // form.group
    codes = bits(0, 255, outputs, inputs // 2)
    zeros = bits(0, 16, outputs, groups) if form.has_zeros else None
    factors = torch.rand(outputs, generator=generator, device=device) + 0.5 if form.is_e2m1 else None
    if form.scale_dtype == E4M3:
        scales = bits(0, 0x7E, outputs, groups).view(E4M3)
    elif form.scale_dtype == torch.uint8:
        scales = bits(112, 131, outputs, groups)
    else:
        scales = (torch.rand(outputs, groups, generator=generator, device=device) + 0.1).to(form.scale_dtype)
    return Stored(codes, scales, zeros, factors)


def plain_weight(form: FourBitForm, stored: Stored) -> Tensor:
    """Return the weight [outputs, inputs] float64."""
    codes = torch.stack((stored.codes & 15, stored.codes >> 4), -1).flatten(1)
    if form.is_e2m1:
        magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device=codes.device, dtype=torch.float64)
        values = torch.cat((magnitudes, -magnitudes))[codes.int()]
    else:
        zeros = torch.full_like(stored.scales, 8) if stored.zeros is None else stored.zeros
        values = codes.double() - zeros.double().repeat_interleave(form.group, 1)
    is_e8m0 = stored.scales.dtype == torch.uint8
    scales = torch.exp2(stored.scales.double() - 127) if is_e8m0 else stored.scales.float().double()
    weight = values * scales.repeat_interleave(form.group, 1)
    return weight if stored.output_scales is None else weight * stored.output_scales.double()[:, None]


def relative_error(result: Tensor, expected: Tensor) -> float:
    """Return the norm of a result's error over that of the expected one; infinite for numbers that are not finite."""
    error = float((result.double() - expected).norm() / expected.norm())
    return error if error == error else float("inf")
