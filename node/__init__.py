"""The frontend process of a node: gRPC, health, drain and metrics."""

import os

# gRPC reads this when it is imported, which is after this. A node's children are always exec'd, never merely forked, so
# gRPC's fork handlers would only log that they skip one.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
