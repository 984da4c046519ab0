"""V1 on a CPU needs plain torch alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from checkpoints import make_checkpoint

SCRIPT = """
import sys
from array import array

sys.modules["triton"] = sys.modules["transformers"] = None  # importing them fails
from pdserve.config.node_options import NodeOptions
from pdserve.config.resolve import resolve
from pdserve.records import NewSequence, ScheduledSequence, StepPlan
from pdserve.sampling_params import SamplingParams
from pdserve.config.device import detect_devices
from pdserve.records import NewSequence, ScheduledSequence, StepPlan
import runner

options = NodeOptions(model=sys.argv[1], device="cpu", kv_cache_memory=1 << 22)
config = resolve(options, detect_devices("cpu", 1)[0], {"PDSERVE_USE_V2_MODEL_RUNNER": "0"})
model = runner.build(config, lambda stage, fraction: None)
new = NewSequence(0, array("I", (1, 2, 3)).tobytes(), 3, 0, (0,), SamplingParams(max_tokens=1))
output = model.launch(StepPlan(0, new=(new,), scheduled=(ScheduledSequence(0, 3, 1),))).result()
print(len(output.token_ids))
"""


def test_v1_runs_a_step_without_triton_and_transformers(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path / "model", "qwen3")
    result = subprocess.run([sys.executable, "-c", SCRIPT, str(directory)], capture_output=True, text=True, check=False)
    assert (result.stdout, result.returncode) == ("1\n", 0), result.stderr
