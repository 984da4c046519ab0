"""Flags that spread a node over several hosts: the ranks of this host, and the address of the leader."""

from __future__ import annotations

import argparse
from typing import NamedTuple

from pdserve.errors import ConfigError
from pdserve.flags.value_types import natural, positive_int, positive_seconds
from pdserve.rpc.address import split_address

RENDEZVOUS_SECONDS = 1800.0  # time to provision machines, pull images and digest weights


class LocalRanks(NamedTuple):
    """The ranks of a node that run on this host."""

    ranks: range
    leader: str = ""  # host:port where ranks of other hosts connect; empty without any
    timeout: float = RENDEZVOUS_SECONDS  # seconds that the hosts wait for each other

    @property
    def has_leader(self) -> bool:
        """Whether rank 0 runs here, and with it the frontend; other hosts only add ranks."""
        return self.ranks.start == 0


def add_host_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "ranks on several hosts", "Start the same command on each host; the host with rank 0 serves requests."
    )
    group.add_argument("--leader", metavar="HOST:PORT", help="where rank 0 listens for the ranks of other hosts")
    group.add_argument("--rank", type=natural, metavar="R", help="run this one rank on this host")
    group.add_argument("--node-rank", type=natural, metavar="K", help="run group K of the ranks on this host, from 0")
    waits = f"how long leader and ranks wait for each other at the start (default {RENDEZVOUS_SECONDS:g})"
    default = RENDEZVOUS_SECONDS
    group.add_argument("--rendezvous-timeout", type=positive_seconds, metavar="S", default=default, help=waits)
    group.add_argument("--local-ranks", type=positive_int, metavar="G", help="ranks in each such group")


def local_ranks_from(args: argparse.Namespace, num_ranks: int) -> LocalRanks:
    """Return this host's ranks. Raises ConfigError for flags that contradict each other or the number of ranks."""
    leader = args.leader
    rank = args.rank
    group = args.node_rank
    size = args.local_ranks
    if leader is None:
        for flag, value in (("--rank", rank), ("--node-rank", group), ("--local-ranks", size)):
            if value is not None:
                raise ConfigError(f"{flag} {value} is for nodes on several hosts; give --leader HOST:PORT as well")
        return LocalRanks(range(num_ranks))
    if (rank is None) == (group is None) or (group is None) != (size is None):
        raise ConfigError("--leader needs --rank R, or --node-rank K with --local-ranks G, to say which ranks are here")
    try:
        split_address(leader)
    except ConfigError as exc:
        raise ConfigError(f"--leader {exc}") from exc
    ranks = range(rank, rank + 1) if group is None else range(group * size, (group + 1) * size)
    if ranks.stop > num_ranks:
        raise ConfigError(
            f"rank {ranks.stop - 1} does not exist: this node has pp × tp = {num_ranks} ranks, numbered from 0"
        )
    return LocalRanks(ranks, leader if len(ranks) < num_ranks else "", args.rendezvous_timeout)
