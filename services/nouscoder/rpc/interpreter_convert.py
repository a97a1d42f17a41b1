"""Answers of the interpreter, protocol <-> domain."""

from __future__ import annotations

from nouscoder.domain.conversation import CallEnd, InterpreterAnswer
from nouscoder.rpc.faults import InvalidMessage
from nouscoder.v1 import verifier_pb2

_OUT = {end: verifier_pb2.CallEnd.Value(f"CALL_END_{end.name}") for end in CallEnd}
_IN: dict[int, CallEnd] = {number: end for end, number in _OUT.items()}


def answer_to(answer: InterpreterAnswer) -> verifier_pb2.InterpretResponse:
    """Domain -> protocol."""
    return verifier_pb2.InterpretResponse(end=_OUT[answer.end], output=answer.output)


def answer_from(message: verifier_pb2.InterpretResponse) -> InterpreterAnswer:
    """Protocol -> domain. Raises InvalidMessage for an unknown end."""
    end = _IN.get(message.end)
    if end is None:
        raise InvalidMessage(f"end: unknown value {message.end}")
    return InterpreterAnswer(end, message.output)
