"""A source rank in a process of its own: ``kv_peer.py AGENT LAYOUT SHARES RANK``, all but AGENT as JSON.

Prints a Peer with this one rank as JSON. Each line ``fill BYTE`` on stdin overwrites the whole cache and is answered
with ``ok``. Ends with its stdin.
"""

import sys

import msgspec
import numpy as np
from kv_ranks import packed, random_cells

from connector import build
from connector.setup import ConnectorSetup
from pdserve.kv.layout import KVLayout, KVRegion, KVShare
from pdserve.records import Peer


def main() -> None:
    agent = sys.argv[1]
    layout = msgspec.json.decode(sys.argv[2], type=KVLayout)
    shares = msgspec.json.decode(sys.argv[3], type=tuple[KVShare, ...])
    number = int(sys.argv[4])
    if shares:
        cache = packed(random_cells(layout, shares[number], layout.num_blocks), layout, shares[number])
    else:
        cache = np.arange(layout.total_bytes // 4, dtype=np.uint32).view(np.uint8)
    connector = build("nixl", ConnectorSetup(agent, shares=shares, rank=number))
    rank = connector.register(KVRegion(cache.ctypes.data, cache.nbytes, "cpu", 0), layout, lambda: None)
    node_id, _, epoch = agent.rpartition("-")
    print(msgspec.json.encode(Peer(node_id, epoch, (rank,))).decode(), flush=True)
    for line in sys.stdin:
        cache[:] = int(line.split()[1])
        print("ok", flush=True)
    connector.close()


if __name__ == "__main__":
    main()
