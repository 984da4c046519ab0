"""How much copies of hot experts take off the busiest shard, for loads of a Zipf distribution. Pure: no model runs.

python bench/expert_balance.py --experts 128 --shards 2,4,8 --redundancy 1,2,4,8
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

from runner.models.layers.expert_placement import balanced_placement, busiest_load


def zipf_loads(experts: int, exponent: float, numbers: random.Random) -> list[int]:
    """Return the tokens of each expert: the k-th hottest has 1 / k ** exponent of the hottest one's."""
    loads = [round(1e6 / rank**exponent) for rank in range(1, experts + 1)]
    numbers.shuffle(loads)
    return loads


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, default=128, help="of a layer")
    parser.add_argument("--shards", default="2,4,8", help="comma-separated")
    parser.add_argument("--redundancy", default="1,2,4,8", help="slots for copies of each shard, comma-separated")
    parser.add_argument("--exponents", default="0.3,0.6,0.9", help="of the Zipf distribution; 0: equal loads")
    parser.add_argument("--layers", type=int, default=100, help="random layers to average over")
    options = parser.parse_args()
    slots = [0, *map(int, options.redundancy.split(","))]
    print("busiest shard / mean load, for redundancy " + ", ".join(map(str, slots)) + "; ms to place the last")
    for exponent in map(float, options.exponents.split(",")):
        for shards in map(int, options.shards.split(",")):
            numbers = random.Random(1)
            layers = [zipf_loads(options.experts, exponent, numbers) for _ in range(options.layers)]
            row = []
            for redundancy in slots:
                begun = time.perf_counter()
                found = [balanced_placement(loads, shards, redundancy) for loads in layers]
                seconds = time.perf_counter() - begun
                ratios = [
                    busiest_load(loads, one) * shards / sum(loads) for loads, one in zip(layers, found, strict=True)
                ]
                row.append(f"{statistics.mean(ratios):.2f}")
            print(f"| {exponent} | {shards} | {' | '.join(row)} | {1e3 * seconds / len(layers):.2f} |")


if __name__ == "__main__":
    main()
