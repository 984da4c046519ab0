"""A JSON object on disk, such as a checkpoint's config.json, with typed access to its fields."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from pdserve.errors import CheckpointError


class ConfigFields:
    """Fields of a JSON file. Its errors name file, field and value."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.defaults: Mapping[str, Any] = {}
        try:
            values = msgspec.json.decode(path.read_bytes())
        except FileNotFoundError as exc:
            raise CheckpointError(
                f"{path} does not exist; a model directory holds config.json, a tokenizer and *.safetensors"
            ) from exc
        except (OSError, msgspec.DecodeError) as exc:
            raise CheckpointError(f"{path} cannot be read as JSON ({exc}); download the checkpoint again") from exc
        if not isinstance(values, dict):
            raise self.error(f"holds a {type(values).__name__}, not an object; download the checkpoint again")
        self.values: dict[str, Any] = values

    def get(self, name: str, default: Any = None) -> Any:
        """Return the field, else the family's default, else ``default``. A null in the file means ``default``."""
        if name in self.values:
            value = self.values[name]
            return default if value is None else value
        return self.defaults.get(name, default)

    def flag(self, name: str) -> bool:
        return bool(self.get(name, False))

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.get(name, default)
        if value is None:
            raise self.error(f"lacks {name!r}; download the checkpoint again")
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.error(f"has {name} = {value!r}; it must be a positive whole number")
        return value

    def optional_integer(self, name: str) -> int | None:
        return None if self.get(name) is None else self.integer(name)

    def number(self, name: str, default: float) -> float:
        value = self.get(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            raise self.error(f"has {name} = {value!r}; it must be a positive number")
        return float(value)

    def error(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self.path} {message}")
