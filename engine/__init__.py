"""The engine core of both node kinds: scheduler, block pool, prefix cache, step loop, and the process they run in."""

import os

# gRPC reads this when it is imported, which is after this. A node's children are always exec'd, never merely forked, so
# gRPC's fork handlers would only log that they skip one.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
