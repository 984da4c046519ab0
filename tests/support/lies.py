"""Wrong numbers: every numeric field of a message with 0, -1, the largest and the smallest number, NaN, and others."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

_INTEGERS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}
_LARGEST_FLOAT = {
    FieldDescriptor.CPPTYPE_FLOAT: 3.4028234663852886e38,
    FieldDescriptor.CPPTYPE_DOUBLE: sys.float_info.max,
}


def value_field(field: Any) -> FieldDescriptor:
    """Return the field itself, or for a map the field of its values. There are two classes of descriptors."""
    kind = field.message_type
    is_map = kind is not None and kind.GetOptions().map_entry
    value: FieldDescriptor = kind.fields_by_name["value"] if is_map else field
    return value


def is_number(field: Any) -> bool:
    """Whether the field is a number, a list of numbers, or a map to numbers."""
    return value_field(field).cpp_type in _INTEGERS or value_field(field).cpp_type in _LARGEST_FLOAT


def wrong_numbers(field: FieldDescriptor) -> list[float]:
    kind = value_field(field).cpp_type
    seed = random.Random(field.full_name)
    if kind in _INTEGERS:
        low, high = _INTEGERS[kind]
        return [*dict.fromkeys([0, max(-1, low), low, high, 1, seed.randint(low, high)])]
    largest = _LARGEST_FLOAT[kind]
    return [0.0, -1.0, largest, -largest, 1e-30, math.nan, math.inf, -math.inf, seed.uniform(-1e6, 1e6)]


class Lie(NamedTuple):
    """A value of a field, named by its path from the message."""

    path: tuple[str, ...]
    value: float

    def __str__(self) -> str:
        return f"{'.'.join(self.path)}={self.value:g}"

    def told(self, message: Message) -> bool:
        """Set the value, in each entry of a list. Return False if the message has no such field: an absent message."""
        holders = self._inside(message)
        for holder in holders:
            self._set(holder)
        return bool(holders)

    def add_to(self, message: Message) -> None:
        """Set the value, in messages that are added where they are absent."""
        self._set(self.around(message)[-1])

    def around(self, message: Message) -> list[Message]:
        """Return the messages around the field, from the message itself to the innermost; add absent ones."""
        messages: list[Any] = [message]
        for name in self.path[:-1]:
            inner = getattr(messages[-1], name)
            if not isinstance(inner, Message):
                inner = inner[0] if len(inner) else inner.add()
            inner.SetInParent()
            messages.append(inner)
        return messages

    def _inside(self, message: Any) -> list[Any]:
        messages = [message]
        for name in self.path[:-1]:
            inner = []
            for outer in messages:
                if outer.DESCRIPTOR.fields_by_name[name].is_repeated:
                    inner += getattr(outer, name)
                elif outer.HasField(name):
                    inner.append(getattr(outer, name))
            messages = inner
        return messages

    def _set(self, message: Any) -> None:
        name = self.path[-1]
        field = message.DESCRIPTOR.fields_by_name[name]
        if not field.is_repeated:
            setattr(message, name, self.value)
        elif field is value_field(field):
            entries = getattr(message, name)
            entries[:] = [self.value] * max(1, len(entries))
        else:
            entries = getattr(message, name)
            key = field.message_type.fields_by_name["key"]
            for entry in list(entries) or [1 if key.cpp_type in _INTEGERS else "x"]:
                entries[entry] = self.value


def lies(descriptor: Descriptor) -> list[Lie]:
    """Return every wrong number of every numeric field of a message, and of the messages inside it."""
    return [Lie(path, value) for path, field in numeric_fields(descriptor) for value in wrong_numbers(field)]


def numeric_fields(descriptor: Descriptor) -> Iterator[tuple[tuple[str, ...], FieldDescriptor]]:
    """Yield the path of each numeric field inside a message."""
    for field in descriptor.fields:
        if is_number(field):
            yield (field.name,), field
        elif field.message_type is not None and field is value_field(field):
            yield from (((field.name, *path), inner) for path, inner in numeric_fields(field.message_type))
