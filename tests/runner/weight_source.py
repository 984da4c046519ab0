"""A process that offers the weights of a checkpoint until its standard input ends. It prints the offer."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
from checkpoints import node_config

import connector
import runner


def main() -> None:
    built = runner.build(node_config(Path(sys.argv[1])), lambda stage, fraction: None)
    source = connector.offer_weights(built.offered_weights())
    print(msgspec.json.encode(source.offer).decode(), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
