"""Problem files with tests as a taskset of verifiers 0.4: `nouscoder-code`. verifiers reads `__all__`."""

from nouscoder_code.taskset import CodeTaskset

__all__ = ["CodeTaskset"]
