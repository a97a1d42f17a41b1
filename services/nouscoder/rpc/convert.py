"""Converts records of the domain to messages of the protocol and back, field by field.

A record and its message have the same names of fields, so a new field is written in the .proto and in the record, and
nowhere else (tests/domain/test_wire_pairs.py compares all pairs). What a field needs follows from its type in the
record: nested records, enums, tuples, maps and `| None`, which is presence in the message. A record in a field of bytes
is encoded. A property of the record that the message names is sent and never read. Records check themselves: a
ValueError of a constructor is InvalidMessage here.
"""

from __future__ import annotations

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


class Numbers(dict[int, Member]):
    """The members of an enum by the numbers of the protocol, where STOP is FINISH_REASON_STOP."""

    def __init__(self, kind: type[Member], wire: EnumDescriptor) -> None:
        prefix = wire.values_by_number[0].name.removesuffix("UNSPECIFIED")
        self.of_member = {member: wire.values_by_name[prefix + member.name].number for member in kind}
        unset: dict[int, Any] = {0: UNSET[kind]} if kind in UNSET else {}
        super().__init__(unset | {number: member for member, number in self.of_member.items()})
        self._name = kind.__name__

    def __missing__(self, number: int) -> Member:
        raise InvalidMessage(f"{self._name} {f'{number} is unknown' if number else 'is not set'}")


class Pair(Generic[Record, Wire]):
    """A record and its message. `exceptions` has the fields for which the rules above are not enough."""

    def __init__(self, record: type[Record], wire: type[Wire], **exceptions: Exceptional) -> None:
        self.record = record
        self.wire = wire
        self._exceptions = exceptions
        PAIRS[record] = self

    def to(self, record: Record) -> Wire:
        """Domain -> protocol."""
        plan = self._plan
        values = list(plan.of_record(record))
        for place, change in plan.outward:
            if values[place] is not None:
                values[place] = change(values[place])
        return self.wire(**dict(zip(plan.sent, values, strict=True)))

    def of(self, message: Wire, **given: object) -> Record:
        """Protocol -> domain. `given` fields are taken instead of those of the message. Raises InvalidMessage."""
        plan = self._plan
        values = list(plan.of_message(message))
        try:
            for place, presence, change in plan.inward:
                if presence and not message.HasField(presence):
                    values[place] = None
                elif change is not None and plan.names[place] not in given:
                    values[place] = change(values[place])
            if plan.is_whole and not given:
                return self.record(*values)
            return self.record(**dict(zip(plan.names, values, strict=True)) | given)
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

    @cached_property
    def _plan(self) -> _Plan:
        """Made at the first use, when the pairs of nested records are there too."""
        hints, fields_of = get_type_hints(self.record), self.wire.DESCRIPTOR.fields_by_name
        names, derived = self.names(), self.derived()
        outward, inward = [], []
        for place, (name, sent) in enumerate(names.items()):
            to, of = _conversion(hints[name], fields_of[sent])
            exception = self._exceptions.get(name, Exceptional(name))
            to, of = exception.to or to, exception.of or of
            presence = sent if NoneType in get_args(hints[name]) else ""
            outward += [(place, to)] if to else []
            inward += [(place, presence, of)] if of or presence else []
        return _Plan(
            names=tuple(names),
            sent=(*names.values(), *derived),
            of_record=_reader([*names, *derived]),
            of_message=_reader(list(names.values())),
            outward=tuple(outward),
            inward=tuple(inward),
            is_whole=list(names) == _field_names(self.record)[: len(names)],
        )


@dataclass(frozen=True, slots=True)
class _Plan:
    """How the fields of a pair are converted, in the order of the record.

    `sent` are the names in the message. `outward` and `inward` have the changes of values by their places; a value with
    a presence is None when the message lacks that field. `is_whole`: the names are the first of the constructor.
    """

    names: tuple[str, ...]
    sent: tuple[str, ...]
    of_record: Callable[[Any], Sequence[Any]]
    of_message: Callable[[Any], Sequence[Any]]
    outward: tuple[tuple[int, Function], ...]
    inward: tuple[tuple[int, str, Function | None], ...]
    is_whole: bool


def _reader(names: list[str]) -> Callable[[Any], Sequence[Any]]:
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
        numbers = Numbers(hint, field.enum_type)
        return numbers.of_member.__getitem__, numbers.__getitem__
    return None, None


def _each(change: Function | None, whole: Callable[[Any], Any]) -> Function:
    return whole if change is None else lambda values: whole(map(change, values))
