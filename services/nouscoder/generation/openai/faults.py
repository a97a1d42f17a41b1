"""Refusals in the form of OpenAI's API: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

from typing import Any

from nouscoder.errors import NousCoderError

INVALID = "invalid_request_error"
SERVER = "server_error"


class ApiFault(NousCoderError):
    """A request that gets no completion. `status` is the HTTP status; `param` names the field at fault."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None, kind: str = INVALID
    ) -> None:
        # A lone surrogate, which JSON can hold, has no UTF-8 form.
        super().__init__(message.encode("utf8", "backslashreplace").decode())
        self.status = status
        self.param = param
        self.code = code
        self.kind = kind

    def record(self) -> dict[str, Any]:
        """The body of the answer."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiFault:
    """A request that is wrong in itself."""
    return ApiFault(400, message, param, code)


def unavailable(message: str, code: str) -> ApiFault:
    """A request that may succeed later."""
    return ApiFault(503, message, code=code, kind=SERVER)
