"""The root of errors that a person reads: the message is one sentence that names the fault and the way out."""


class NousCoderError(Exception):
    """Shown as one line, without a traceback."""


class Unusable(NousCoderError):
    """What a process was given can never work (a port in use, no Redis, no namespaces): starting it again is no use."""
