"""Every number of the wire protocol has a range, and a message with a number outside is refused where it enters."""

from __future__ import annotations

import math
import re

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from lies import Lie, is_number, lies, value_field

from pdserve.errors import PeerError, RequestError
from pdserve.pb import pdserve_pb2 as pb
from pdserve.request_cost import LinearCost, StepCosts
from pdserve.rpc.field_ranges import ANY, RANGES, check_answer, check_message, checks_of, violation
from pdserve.rpc.protobuf import step_costs_from_pb, step_costs_to_pb

MESSAGES: dict[str, Descriptor] = dict(pb.DESCRIPTOR.message_types_by_name)
NUMBERS = [(name, field) for name, message in MESSAGES.items() for field in message.fields if is_number(field)]
#: The messages of calls: what a node, a router or a reader receives.
RECEIVED = {
    message.name: message
    for service in pb.DESCRIPTOR.services_by_name.values()
    for method in service.methods
    for message in (method.input_type, method.output_type)
}


@pytest.mark.parametrize(("name", "field"), NUMBERS, ids=lambda value: getattr(value, "name", value))
def test_every_number_has_a_range(name: str, field: FieldDescriptor) -> None:
    allowed = RANGES[name][field.name]
    if value_field(field).cpp_type in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        assert allowed != ANY, "NaN and infinity must not enter"
        assert math.nan not in allowed
        assert math.inf not in allowed


def test_every_range_is_of_a_field() -> None:
    for name, ranges in RANGES.items():
        fields = MESSAGES[name].fields_by_name
        for field in ranges:
            assert is_number(fields[field]) or fields[field].is_repeated


def test_every_message_is_received_somewhere() -> None:
    """Lies in received messages then try every range."""
    inside = set(RECEIVED)
    pending = list(RECEIVED.values())
    while pending:
        inner = [field.message_type for field in pending.pop().fields if field.message_type is not None]
        pending += [message for message in inner if message.name not in inside]
        inside |= {message.name for message in inner}
    assert inside >= {name for name, _ in NUMBERS}


@pytest.mark.parametrize("name", RECEIVED)
def test_a_number_is_refused_exactly_if_it_is_outside_its_range(name: str) -> None:
    for lie in lies(RECEIVED[name]):
        message = GetMessageClass(RECEIVED[name])()
        around = lie.around(message)
        for outer in around:
            fill(outer)
        assert not violation(message)
        lie.add_to(message)
        if lie.value in RANGES[around[-1].DESCRIPTOR.name][lie.path[-1]]:
            check_answer(message)
            check_message(message)
            continue
        text = re.escape(f"{name}.{'.'.join(lie.path)} is ")
        with pytest.raises(PeerError, match=f"it sent a number outside its range: {text}.* must be .* upgrade"):
            check_answer(message)
        with pytest.raises(RequestError, match=f"{text}.* must be .* use the same release"):
            check_message(message)


def fill(message: Message) -> None:
    """Set each number of a message to one inside its range."""
    for field in message.DESCRIPTOR.fields:
        if is_number(field):
            allowed = RANGES[message.DESCRIPTOR.name][field.name]
            value = max(allowed.low, 0) if not allowed.above else allowed.high
            Lie((field.name,), int(value) if float(value).is_integer() else value).add_to(message)


def test_lists_that_are_too_long_are_refused() -> None:
    layout = pb.KVLayout(block_size=1, kernel_block_size=1, num_layers=1, num_kv_heads=1, head_dim=1)
    layout.layer_groups.extend([0] * 4096)
    check_answer(layout)
    layout.layer_groups.append(0)
    with pytest.raises(PeerError, match="layer_groups has 4097 entries; the limit is 4096"):
        check_answer(layout)
    with pytest.raises(PeerError, match="ranks has 1025 entries; the limit is 1024"):
        check_answer(pb.HandshakeReply(ranks=[pb.RankKV()] * 1025))


def test_a_line_that_is_below_zero_by_rounding_is_zero_there() -> None:
    """As nodes of earlier releases report it."""
    costs = StepCosts(prompt=LinearCost(-1e-19, 0.5), decode=LinearCost(0.25, 0.0), read=LinearCost(1.0, -1e-12))
    message = step_costs_to_pb(costs)
    check_answer(message)
    assert step_costs_from_pb(message) == StepCosts(
        prompt=LinearCost(0.0, 0.5), decode=LinearCost(0.25, 0.0), read=LinearCost(1.0, 0.0)
    )


def test_a_message_without_checked_numbers_costs_nothing() -> None:
    """An output per token of each request: only what a few of them have is looked at."""
    assert [check.name for check in checks_of(pb.Output.DESCRIPTOR)] == ["logprobs", "failure", "prompt_logprobs"]
