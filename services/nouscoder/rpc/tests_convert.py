"""The tests of a submission, protocol <-> domain.

The clients of this project send the JSON form of tests (nouscoder.formats.body), or a digest. Clients in other
languages may fill the single fields of the protocol. These are converted to the JSON form, so that the rules for tests
are in one place.

The fields of a large message are counted before it is parsed. Parsing takes 0.6 µs and 60 bytes for each field, so 64
MiB of empty messages take 20 s and 2 GB, and the interpreter runs nothing else meanwhile. Counting stops at a bound.
Source of the format: protobuf.dev, Encoding.
"""

from __future__ import annotations

import json
from typing import Any

from google.protobuf.descriptor import Descriptor
from pydantic import ValidationError

from nouscoder.domain.submission import Tests, TestsReference
from nouscoder.formats.body import TestsReferenceBody, canonical_json, first_fault, tests_from_json, tests_from_record
from nouscoder.formats.json_values import json_weight
from nouscoder.rpc.convert import InvalidMessage
from nouscoder.v1 import verdict_pb2

# Cases must have these, and protobuf does not tell an empty text from one that is not set.
_MAY_BE_EMPTY = ("input", "output", "expected")


def tests_to(tests: Tests | TestsReference) -> verdict_pb2.Tests:
    """Domain -> protocol."""
    if isinstance(tests, TestsReference):
        return verdict_pb2.Tests(digest=tests.digest)
    return verdict_pb2.Tests(json=canonical_json(tests))


def tests_from_text(text: bytes) -> Tests:
    """The JSON form -> domain. Raises InvalidMessage naming the field at fault."""
    try:
        return tests_from_json(text)
    except ValidationError as error:
        field, wrong = first_fault(error, "tests")
        raise InvalidMessage(f"{field}: {wrong}") from None


def tests_from(message: verdict_pb2.Tests) -> Tests | TestsReference:
    """Protocol -> domain. Raises InvalidMessage naming the field at fault."""
    try:
        match message.WhichOneof("kind"):
            case "json":
                return tests_from_text(message.json)
            case "digest":
                return TestsReferenceBody(digest=message.digest).record()
            case None:
                raise InvalidMessage("tests has none of stdin, call, asserts, checker, interactive, math, json, digest")
            case "call":
                return tests_from_json(json.dumps(_record(message)))
            case _:
                return tests_from_record(_record(message))
    except ValidationError as error:
        field, wrong = first_fault(error, "tests")
        raise InvalidMessage(f"{field}: {wrong}") from None


def weight_of_calls(message: verdict_pb2.Tests, enough: int) -> int:
    """The weight (formats/json_values.py) of all JSON texts of calls; above `enough`, some weight above it."""
    weight = 0
    for case in message.call.cases:
        weight += sum(json_weight(text, enough) for text in (case.args_json, case.kwargs_json, case.expected_json))
        if weight > enough:
            break
    return weight


def _record(message: verdict_pb2.Tests) -> dict[str, Any]:
    """The single fields of the protocol as the JSON form."""
    kind = str(message.WhichOneof("kind"))
    if kind == "call":
        calls = [_call(case, f"tests.call.cases[{i}]") for i, case in enumerate(message.call.cases)]
        return {"type": "call", "entry_point": message.call.entry_point, "cases": calls}
    return {"type": "assert" if kind == "asserts" else kind, **_fields(getattr(message, kind))}


def _fields(message: Any) -> dict[str, Any]:
    """The fields that are set, and those that may be empty texts."""
    found: dict[str, Any] = {name: "" for name in _MAY_BE_EMPTY if name in message.DESCRIPTOR.fields_by_name}
    for field, value in message.ListFields():
        if field.type != field.TYPE_MESSAGE:
            found[field.name] = list(value) if field.is_repeated else value
        else:
            found[field.name] = [_fields(each) for each in value] if field.is_repeated else _fields(value)
    return found


def _call(message: verdict_pb2.CallCase, field: str) -> dict[str, Any]:
    texts = {
        "args": message.args_json or "[]",
        "kwargs": message.kwargs_json or "{}",
        "expected": message.expected_json or "null",
    }
    record = {}
    for name, text in texts.items():
        try:
            record[name] = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InvalidMessage(f"{field}.{name}_json is not JSON: {error}") from error
    return record


_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_FIXED_BYTES = {_FIXED64: 8, _FIXED32: 4}


def has_more_fields(data: bytes, message: Descriptor, most: int) -> bool:
    """Whether the bytes of a message have more than `most` fields, with those of the messages inside it.

    Counts up to where the bytes are no message, because parsing stops there too.
    """
    inside = {field.number: field.message_type for field in message.fields}
    pending = [(0, len(data), inside)]
    known = {message.full_name: inside}
    count = 0
    while pending:
        at, end, inside = pending.pop()
        while at < end:
            count += 1
            if count > most:
                return True
            tag, at = _varint(data, at, end)
            kind = tag & 7
            if kind == _BYTES:
                size, at = _varint(data, at, end)
                nested = inside.get(tag >> 3)
                if size and nested is not None and at + size <= end:
                    if nested.full_name not in known:
                        known[nested.full_name] = {field.number: field.message_type for field in nested.fields}
                    pending.append((at + size, end, inside))
                    end, inside = at + size, known[nested.full_name]
                else:
                    at += size
            elif kind == _VARINT:
                _, at = _varint(data, at, end)
            else:
                at += _FIXED_BYTES.get(kind, 0)
    return False


def _varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    """The number at a place, and the place after it; the end for one that is cut off."""
    value = shift = 0
    while at < end and shift < 64:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
    return 0, max(end, at)
