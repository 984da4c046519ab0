"""The flags that spread a node over several hosts: which of its ranks this one has, and where the leader is."""

from __future__ import annotations

import argparse
from typing import NamedTuple

from pdserve.config.flags import positive_int
from pdserve.errors import ConfigError
from pdserve.rpc.address import split_address


class HostRanks(NamedTuple):
    """The ranks of a node that are on this host, and host:port where they meet those of others; "" without others."""

    ranks: range
    leader: str = ""

    @property
    def leads(self) -> bool:
        """Whether rank 0 is here, and with it the front: this host is the node, the others only add ranks."""
        return self.ranks.start == 0


def add_host_flags(parser: argparse.ArgumentParser) -> None:
    """Add every flag that ``hosted_from`` reads."""
    group = parser.add_argument_group(
        "ranks on several hosts", "Start the same command on each host; the one with rank 0 is the node."
    )
    group.add_argument("--leader", metavar="HOST:PORT", help="where rank 0 listens for the ranks of other hosts")
    group.add_argument("--rank", type=_number, metavar="R", help="this host has this one rank")
    group.add_argument("--node-rank", type=_number, metavar="K", help="this host has group K of the ranks, from 0 on")
    group.add_argument("--local-ranks", type=positive_int, metavar="G", help="ranks of each such group")


def hosted_from(args: argparse.Namespace, num_ranks: int) -> HostRanks:
    """Raises ConfigError for flags that do not go together, or name ranks that the node does not have."""
    leader, rank, group, size = args.leader, args.rank, args.node_rank, args.local_ranks
    if leader is None:
        for flag, value in (("--rank", rank), ("--node-rank", group), ("--local-ranks", size)):
            if value is not None:
                raise ConfigError(f"{flag} {value} is for nodes on several hosts; give --leader HOST:PORT as well")
        return HostRanks(range(num_ranks))
    if (rank is None) == (group is None) or (group is None) != (size is None):
        raise ConfigError("--leader needs --rank R, or --node-rank K with --local-ranks G, to say which ranks are here")
    try:
        split_address(leader)
    except ConfigError as exc:
        raise ConfigError(f"--leader {exc}") from exc
    ranks = range(rank, rank + 1) if group is None else range(group * size, (group + 1) * size)
    if ranks.stop > num_ranks:
        raise ConfigError(
            f"rank {ranks.stop - 1} is none of this node, which has pp × tp = {num_ranks}, numbered from 0 on"
        )
    return HostRanks(ranks, leader if len(ranks) < num_ranks else "")


def _number(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 0")
    return int(text)
