"""The base classes of errors for people. The message is one sentence that names the fault and what to do."""


class NousCoderError(Exception):
    """Shown as one line, without a traceback."""


class Unusable(NousCoderError):
    """The process can never work as configured (port in use, no Redis, no namespaces), so a restart is useless."""
