"""Converts records of the domain to messages of the protocol and back, field by field.

A record and its message have the same names of fields, so a new field is written in the .proto and in the record, and
nowhere else (tests/domain/test_wire_pairs.py compares all pairs). What a field needs follows from its type in the
record: nested records, enums, tuples, maps and `| None`, which is presence in the message. A record in a field of bytes
is encoded. A property of the record that the message names is sent and never read. Records check themselves: a
ValueError of a constructor is InvalidMessage here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from functools import cached_property, reduce
from operator import attrgetter, or_
from types import NoneType
from typing import Any, Generic, TypeVar, get_args, get_origin, get_type_hints

from google.protobuf.descriptor import EnumDescriptor
from google.protobuf.message import DecodeError, Message


class InvalidMessage(ValueError):
    """A message breaks the protocol; the text names the field."""


Record = TypeVar("Record")
Wire = TypeVar("Wire", bound=Message)
Member = TypeVar("Member", bound=Enum)
Function = Callable[[Any], Any]
Reader = Callable[[Any], Sequence[Any]]


@dataclass(frozen=True, slots=True)
class Exceptional:
    """A field that needs more than its type says: another name in the message, or functions that change the value.

    `name` is empty for a field that is not sent; it has its default on the other side.
    """

    name: str
    to: Function | None = None
    of: Function | None = None


NOT_SENT = Exceptional("")
PAIRS: dict[type, WirePair[Any, Any]] = {}
# Types of fields that have conversions of their own.
CODECS: dict[object, tuple[Function, Function]] = {}
# What an enum's number 0 means; without an entry it is a fault.
UNSET: dict[type[Enum], Enum] = {}


class Numbers(dict[int, Member]):
    """The members of an enum by the numbers of the protocol, where STOP is FINISH_REASON_STOP. Errors name `field`."""

    def __init__(self, kind: type[Member], wire: EnumDescriptor, field: str) -> None:
        prefix = wire.values_by_number[0].name.removesuffix("UNSPECIFIED")
        self.of_member: dict[Member, Any] = {
            member: wire.values_by_name[prefix + member.name].number for member in kind
        }
        unset: dict[int, Any] = {0: UNSET[kind]} if kind in UNSET else {}
        super().__init__(unset | {number: member for member, number in self.of_member.items()})
        self._field = field

    def __missing__(self, number: int) -> Member:
        raise InvalidMessage(f"{self._field} {f'{number} is unknown' if number else 'is not set'}")


class WirePair(Generic[Record, Wire]):
    """A record and its message. `exceptions` has the fields for which the rules above are not enough."""

    def __init__(self, record: type[Record], wire: type[Wire], **exceptions: Exceptional) -> None:
        self.record = record
        self.wire = wire
        self._exceptions = exceptions
        PAIRS[record] = self

    def to(self, record: Record) -> Wire:
        """Domain -> protocol."""
        read, sent, changes = self._outward
        values = list(read(record))
        for place, change in changes:
            if values[place] is not None:
                values[place] = change(values[place])
        return self.wire(**dict(zip(sent, values, strict=True)))

    def of(self, message: Wire, **given: object) -> Record:
        """Protocol -> domain. `given` fields are taken instead of those of the message. Raises InvalidMessage."""
        read, names, changes, are_first = self._inward
        values = list(read(message))
        try:
            for place, presence, change in changes:
                if presence and not message.HasField(presence):
                    values[place] = None
                elif change is not None and names[place] not in given:
                    values[place] = change(values[place])
            if are_first and not given:
                return self.record(*values)
            return self.record(**dict(zip(names, values, strict=True)) | given)
        except ValueError as error:
            raise InvalidMessage(str(error)) from error

    def encode(self, record: Record) -> bytes:
        """The bytes of the message."""
        return self.to(record).SerializeToString()

    def decode(self, data: bytes) -> Record:
        """The record in the bytes of a message. Raises InvalidMessage."""
        try:
            return self.of(self.wire.FromString(data))
        except DecodeError as error:
            raise InvalidMessage(f"{self.wire.DESCRIPTOR.name}: {error}") from error

    def names(self) -> dict[str, str]:
        """The field of the message by that of the record, for all fields of the record that are sent."""
        chosen = {name: self._exceptions.get(name, Exceptional(name)).name for name in _field_names(self.record)}
        return {name: sent for name, sent in chosen.items() if sent}

    def derived(self) -> list[str]:
        """The properties of the record that the message names."""
        sent = set(self.names().values())
        return [name for name in self.wire.DESCRIPTOR.fields_by_name if name not in sent and hasattr(self.record, name)]

    # Made at the first use, when the pairs of nested records are there too. Changes are by the places of the values.

    @cached_property
    def _outward(self) -> tuple[Reader, list[str], list[tuple[int, Function]]]:
        names, derived = self.names(), self.derived()
        changes = [self._conversion(name, sent)[0] for name, sent in names.items()]
        sent = [*names.values(), *derived]
        return _reader([*names, *derived]), sent, [(place, change) for place, change in enumerate(changes) if change]

    @cached_property
    def _inward(self) -> tuple[Reader, list[str], list[tuple[int, str, Function | None]], bool]:
        """The last says whether the names are the first of the constructor."""
        names, hints = self.names(), get_type_hints(self.record)
        presences = [sent if NoneType in get_args(hints[name]) else "" for name, sent in names.items()]
        changes = [self._conversion(name, sent)[1] for name, sent in names.items()]
        steps = [step for step in zip(range(len(names)), presences, changes, strict=True) if any(step[1:])]
        are_first = list(names) == _field_names(self.record)[: len(names)]
        return _reader(list(names.values())), list(names), steps, are_first

    def _conversion(self, name: str, sent: str) -> tuple[Function | None, Function | None]:
        """How a field of the record changes on its way to the message, and back. None: it does not."""
        to, of = _conversion(get_type_hints(self.record)[name], self.wire.DESCRIPTOR.fields_by_name[sent])
        exception = self._exceptions.get(name, Exceptional(name))
        return exception.to or to, exception.of or of


def _reader(names: list[str]) -> Reader:
    """Reads all these attributes in one call."""
    read = attrgetter(*names)
    return read if len(names) > 1 else lambda source: [read(source)]


def _field_names(record: type) -> list[str]:
    return [field.name for field in fields(record)] if is_dataclass(record) else list(get_type_hints(record))


def _conversion(hint: Any, field: Any) -> tuple[Function | None, Function | None]:
    """How a value of this type changes on its way to this field, and back. None: it does not."""
    if hint in CODECS:
        return CODECS[hint]
    inner = get_args(hint)
    if NoneType in inner:
        return _conversion(reduce(or_, (each for each in inner if each is not NoneType)), field)
    if get_origin(hint) is tuple:
        to, of = _conversion(inner[0], field)
        return _each(to, list), _each(of, tuple)
    if get_origin(hint) is dict:
        return None, dict
    if hint in PAIRS:
        pair = PAIRS[hint]
        return (pair.encode, pair.decode) if field.type == field.TYPE_BYTES else (pair.to, pair.of)
    if isinstance(hint, type) and issubclass(hint, Enum):
        if field.enum_type is None:
            return None, hint  # the text is the member's value
        numbers = Numbers(hint, field.enum_type, _path_of(field))
        return numbers.of_member.__getitem__, numbers.__getitem__
    return None, None


def _path_of(field: Any) -> str:
    """The field as errors name it: `comparator.kind`, and a field of a submission by its own name."""
    container = re.sub(r"(?<!^)(?=[A-Z])", "_", field.containing_type.name).lower()
    return str(field.name) if container == "submission" else f"{container}.{field.name}"


def _each(change: Function | None, whole: Callable[[Any], Any]) -> Function:
    return whole if change is None else lambda values: whole(map(change, values))
