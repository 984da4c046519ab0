"""An agent's turns over one prefix: tokens are those of transformers. test_recurrent_models.py has a quick test.

python -m pytest -m slow tests/e2e/test_agent_turns.py     30 turns, for each kind of KV cache and family
"""

from __future__ import annotations

from pathlib import Path

import pytest
from exact_fleet import Model, Served, check_moved_answer, check_turns_of_an_agent
from test_latent_models import MODELS as LATENT
from test_recurrent_models import MODELS as RECURRENT
from test_window_groups import MODELS as WINDOWS

pytestmark = pytest.mark.timeout(900)

LONG = ("--max-model-len", "500")


@pytest.mark.slow
def test_turns_equal_those_of_a_cold_node_and_an_answer_moves(tmp_path: Path) -> None:
    with Served(RECURRENT["qwen3-next"], tmp_path / "m", ["1", "1"], ["1", "1"], flags=LONG) as served:
        check_turns_of_an_agent(served, turns=3)
        check_moved_answer(served)


ALL = {**WINDOWS, **RECURRENT, **LATENT}


@pytest.mark.slow
@pytest.mark.parametrize("model", ALL.values(), ids=ALL)
def test_thirty_turns_equal_those_of_a_cold_node(model: Model, tmp_path: Path) -> None:
    with Served(model, tmp_path / "m", ["1", "1"], ["1", "1"], flags=LONG) as served:
        check_turns_of_an_agent(served, turns=30)
