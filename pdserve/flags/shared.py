"""Flags that several programs have, for the fields of their options."""

from __future__ import annotations

from pdserve.flags.declaration import Flag

DAY = 86400.0  # seconds; longest time of a flag
DRAIN_SECONDS = 30.0  # default of --drain-timeout

GRPC_TLS = Flag(
    "mutual TLS for gRPC with ca.pem, cert.pem and key.pem of DIR; set it on all nodes and routers or on none",
    metavar="DIR",
)
STATUS_FD = Flag("write process states to this file descriptor as JSON lines", metavar="FD")
LIFELINE_FD = Flag("exit when the other end of this file descriptor closes", metavar="FD")


def drain_flag(afterwards: str) -> Flag:
    """Return the flag of a drain. ``afterwards`` says what happens to requests that still run after it."""
    return Flag(
        f"seconds after SIGTERM for running requests before {afterwards}; 0 after SIGINT or a second signal",
        metavar="S",
        at_least=0,
        at_most=DAY,
    )
