"""The base of all packages: configuration, errors, records and RPC. It never imports torch."""

#: The one place of the version: pyproject.toml reads it, nodes and routers compare it.
__version__ = "0.2.0"
