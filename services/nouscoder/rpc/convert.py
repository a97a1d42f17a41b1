"""Converts records of the domain to messages of the protocol and back, field by field.

A record and its message have the same names of fields, so a new field is written in the .proto and in the record, and
nowhere else (tests/domain/test_wire_pairs.py compares all pairs). What a field needs follows from its type in the
record: nested records, enums, tuples, maps and `| None`, which is presence in the message. A record in a field of bytes
is encoded. A property of the record that the message names is sent and never read. Records check themselves: a
ValueError of a constructor is InvalidMessage here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from functools import cached_property, reduce
from operator import attrgetter, or_
from types import NoneType
from typing import Any, Generic, TypeVar, get_args, get_origin, get_type_hints

from google.protobuf.descriptor import EnumDescriptor
from google.protobuf.message import DecodeError, Message

from nouscoder.rpc.faults import InvalidMessage

Record = TypeVar("Record")
Wire = TypeVar("Wire", bound=Message)
Member = TypeVar("Member", bound=Enum)
Function = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Exceptional:
    """A field that needs more than its type says: another name in the message, or functions that change the value.

    `name` is empty for a field that is not sent; it has its default on the other side.
    """

    name: str
    to: Function | None = None
    of: Function | None = None


NOT_SENT = Exceptional("")
PAIRS: dict[type, Pair[Any, Any]] = {}
# Types of fields that have conversions of their own.
CODECS: dict[object, tuple[Function, Function]] = {}
# What an enum's number 0 means; without an entry it is a fault.
UNSET: dict[type[Enum], Enum] = {}


class Numbers(Generic[Member]):
    """The members of an enum as the numbers of the protocol, where STOP is FINISH_REASON_STOP."""

    def __init__(self, kind: type[Member], wire: EnumDescriptor) -> None:
        prefix = wire.values_by_number[0].name.removesuffix("UNSPECIFIED")
        self._name = kind.__name__
        self.of_member = {member: wire.values_by_name[prefix + member.name].number for member in kind}
        self._members: dict[int, Any] = {number: member for member, number in self.of_member.items()}
        if kind in UNSET:
            self._members[0] = UNSET[kind]

    def to(self, member: Member) -> Any:
        """Domain -> protocol."""
        return self.of_member[member]

    def of(self, number: int) -> Member:
        """Protocol -> domain. Raises InvalidMessage."""
        try:
            member: Member = self._members[number]
        except KeyError:
            raise InvalidMessage(
                f"{self._name} {number} is unknown" if number else f"{self._name} is not set"
            ) from None
        return member


class Pair(Generic[Record, Wire]):
    """A record and its message. `exceptions` has the fields for which the rules above are not enough."""

    def __init__(self, record: type[Record], wire: type[Wire], **exceptions: Exceptional) -> None:
        self.record = record
        self.wire = wire
        self.exceptions = exceptions
        PAIRS[record] = self

    def to(self, record: Record) -> Wire:
        """Domain -> protocol."""
        return self.wire(**{name: value_of(record) for name, value_of in self._writers})

    def of(self, message: Wire, **given: object) -> Record:
        """Protocol -> domain. `given` fields are taken instead of those of the message. Raises InvalidMessage."""
        try:
            values = {name: value_of(message) for name, value_of in self._readers if name not in given}
            return self.record(**values, **given)
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

    def names(self) -> Mapping[str, str]:
        """The field of the message by that of the record, for all fields of the record that are sent."""
        chosen = {name: self.exceptions.get(name, Exceptional(name)).name for name in _field_names(self.record)}
        return {name: sent for name, sent in chosen.items() if sent}

    def derived(self) -> list[str]:
        """The properties of the record that the message names."""
        sent = set(self.names().values())
        return [name for name in self.wire.DESCRIPTOR.fields_by_name if name not in sent and hasattr(self.record, name)]

    @cached_property
    def _writers(self) -> list[tuple[str, Function]]:
        plain = [(name, attrgetter(name)) for name in self.derived()]
        return [(sent, self._codec(name, sent)[0]) for name, sent in self.names().items()] + plain

    @cached_property
    def _readers(self) -> list[tuple[str, Function]]:
        return [(name, self._codec(name, sent)[1]) for name, sent in self.names().items()]

    def _codec(self, name: str, sent: str) -> tuple[Function, Function]:
        """Reads a field from the record, as the message has it, and from the message, as the record has it."""
        hint, field = get_type_hints(self.record)[name], self.wire.DESCRIPTOR.fields_by_name[sent]
        to, of = _conversion(hint, field)
        exception = self.exceptions.get(name, Exceptional(name))
        to, of = exception.to or to, exception.of or of
        if NoneType in get_args(hint) and hint not in CODECS:
            return _unless_none(name, to), _if_present(sent, of)
        return _after(name, to), _after(sent, of)


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
        return _enum_conversion(hint, field)
    return None, None


def _enum_conversion(kind: type[Enum], field: Any) -> tuple[Function | None, Function]:
    """An enum is a number in the message, or the text that is its value."""
    if field.enum_type is not None:
        numbers = Numbers(kind, field.enum_type)
        return numbers.of_member.__getitem__, numbers.of
    return None, kind


def _each(change: Function | None, whole: Callable[[Any], Any]) -> Function:
    return whole if change is None else lambda values: whole(map(change, values))


def _after(name: str, change: Function | None) -> Function:
    read = attrgetter(name)
    return read if change is None else lambda source: change(read(source))


def _unless_none(name: str, change: Function | None) -> Function:
    read = attrgetter(name)
    if change is None:
        return read
    return lambda source: None if (value := read(source)) is None else change(value)


def _if_present(name: str, change: Function | None) -> Function:
    read = _after(name, change)
    return lambda message: read(message) if message.HasField(name) else None
