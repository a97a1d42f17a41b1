"""The base classes of errors for people. The message is one sentence that names the fault and what to do."""


class NousCoderError(Exception):
    """Shown as one line, without a traceback."""


class Unusable(NousCoderError):
    """The process can never work as configured (port in use, no Redis, no namespaces), so a restart is useless."""


def first_error(error: BaseException) -> BaseException:
    """The first error in the groups that task groups raise, however deep; `error` itself when it is no group."""
    return first_error(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error
