"""What holds for all tests."""

from __future__ import annotations

import torch
from hypothesis import settings

torch.set_num_threads(1)  # the processes under test need the cores
settings.register_profile("busy machine", deadline=None)
settings.load_profile("busy machine")
