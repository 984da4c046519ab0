"""Dtypes of weights by their names in safetensors."""

from __future__ import annotations

import torch

STORED_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
