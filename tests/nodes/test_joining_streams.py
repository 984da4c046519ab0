"""A decode node keeps its own prompts in short chunks until the answer of a handoff continues. Nodes are simulated."""

from __future__ import annotations

from pathlib import Path

from checkpoints import make_checkpoint
from machine import patience
from node_client import RouterClient, greedy
from stages import WAIT_SECONDS, Pair, held_at, start_pair

FLAGS = ("--engine", "simulated", "--max-model-len", "8192", "--kv-cache-memory", "64MiB")
SLOWER = 4  # than the default costs, so that the measured time of a step is that of the simulation on a busy machine
STREAMS = 4


def mean_chunk(pair: Pair, client: RouterClient, salt: str) -> float:
    """Return the prompt tokens per step of a long prompt beside streams."""
    names = ("mixed_prompt_tokens", "mixed_steps")
    before = [pair.decode.counter(name) for name in names]
    client.generate([7] * 6000, greedy(1), cache_salt=salt)
    tokens, steps = (pair.decode.counter(name) - count for name, count in zip(names, before, strict=True))
    return tokens / steps


def test_chunks_are_short_from_the_peers_last_chunk_until_its_answer_continues(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model", "qwen3", num_hidden_layers=2, max_position_embeddings=8192)
    slower = patience(SLOWER)
    timing = ("--sim-speed", f"{1 / slower:g}", "--itl-target", f"{15 * slower:g}")
    with start_pair(model, [*FLAGS, *timing]) as pair, RouterClient(pair.decode.address) as client:
        streams = [client.send([seed] * 20, greedy(8000), cache_salt="stream") for seed in range(STREAMS)]
        assert all(stream.started.wait(patience(WAIT_SECONDS)) for stream in streams)
        mean_chunk(pair, client, "measures the costs")
        usual = mean_chunk(pair, client, "before")
        with held_at("last announced", pair) as held:
            short = mean_chunk(pair, client, "held")
            held.release()
            held.result.wait()
        after = mean_chunk(pair, client, "after")
        assert not any(stream.ended.is_set() for stream in streams)
        assert short < 0.6 * usual
        assert after > 0.8 * usual
