"""The directory of ``--allow-weight-changes``: callers of gRPC name directories below it."""

from __future__ import annotations

import os

from pdserve.errors import CheckpointError, ConfigError, cut


class AllowedDirectory:
    def __init__(self, node: str, root: str) -> None:
        """``node`` is named in errors. Without ``root``, all orders are refused."""
        self._node = node
        self._root = root

    def check(self) -> None:
        """Raise ConfigError if the node takes no orders."""
        if not self._root:
            raise ConfigError(f"{self._node} changes no weights; start it with --allow-weight-changes DIR")

    def find(self, directory: str) -> str:
        """Return the directory that is meant, without links. Raises ConfigError outside of the allowed one.

        Raises CheckpointError if there is no such directory.
        """
        self.check()
        root = os.path.realpath(self._root)
        path = "/" if "\0" in directory else os.path.realpath(os.path.join(root, directory))  # no path has a NUL
        if os.path.commonpath([root, path]) != root:
            raise ConfigError(
                f"{cut(directory)} is not below {root}, the directory of --allow-weight-changes of {self._node}"
            )
        try:
            os.stat(os.path.join(path, ""))  # a file is no directory
        except OSError as exc:
            raise CheckpointError(
                f"{cut(directory)} below {root} is no directory ({exc.strerror}); name one that has config.json"
            ) from exc
        return path
