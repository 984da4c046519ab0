"""The wire protocol as text, a line per message, and the changes that a later protocol must not have.

python tests/support/wire_schema.py > tests/nodes/protocol_5.txt     # in a checkout of a release, with PYTHONPATH=.
"""

from __future__ import annotations

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
)

from pdserve.pb import pdserve_pb2 as pb

Schema = dict[str, dict[str, str]]  # message, enum or service → field, value or call → its number and type


def current_schema() -> Schema:
    file = FileDescriptorProto()
    pb.DESCRIPTOR.CopyToProto(file)
    return schema_of(file)


def schema_of(file: FileDescriptorProto) -> Schema:
    schema: Schema = {}
    for message in file.message_type:
        _add_message(schema, message, "")
    for service in file.service:
        schema[f"service {service.name}"] = {
            call.name: f"{call.client_streaming:d}{call.server_streaming:d}{_short(call.input_type)}>"
            f"{_short(call.output_type)}"
            for call in service.method
        }
    return schema


def _add_message(schema: Schema, message: DescriptorProto, prefix: str) -> None:
    schema[prefix + message.name] = {field.name: _describe(message, field) for field in message.field}
    for enum in message.enum_type:
        schema[f"enum {prefix}{message.name}.{enum.name}"] = _describe_enum(enum)
    for nested in message.nested_type:
        _add_message(schema, nested, f"{prefix}{message.name}.")


def _describe(message: DescriptorProto, field: FieldDescriptorProto) -> str:
    kind = _short(field.type_name) or FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
    repeated = "*" if field.label == FieldDescriptorProto.LABEL_REPEATED else ""
    optional = "?" if field.proto3_optional else ""
    union = f"@{message.oneof_decl[field.oneof_index].name}" if field.HasField("oneof_index") and not optional else ""
    return f"{field.number}:{kind}{repeated}{optional}{union}"


def _describe_enum(enum: EnumDescriptorProto) -> dict[str, str]:
    return {value.name: str(value.number) for value in enum.value}


def _short(type_name: str) -> str:
    return type_name.rpartition(".")[2]


def dump(schema: Schema) -> str:
    lines = ((name, "".join(f" {field}={value}" for field, value in fields.items())) for name, fields in schema.items())
    return "".join(f"{name}:{fields}\n" for name, fields in lines)


def load(text: str) -> Schema:
    lines = (line.partition(":") for line in text.splitlines())
    return {name: dict(word.split("=", 1) for word in fields.split()) for name, _, fields in lines}


def breaking_changes(before: Schema, now: Schema) -> list[str]:
    """Describe missing and different fields. Further messages, fields, values and calls are no breaking changes."""
    return [
        f"{name}.{field}: {value} before, {now.get(name, {}).get(field, 'nothing')} now"
        for name, fields in before.items()
        for field, value in fields.items()
        if now.get(name, {}).get(field) != value
    ] + [f"{name}: gone" for name in before if name not in now]


if __name__ == "__main__":
    print(dump(current_schema()), end="")
