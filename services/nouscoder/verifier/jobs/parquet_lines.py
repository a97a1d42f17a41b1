"""`python -m nouscoder.verifier.jobs.parquet_lines IN OUT MAX_BYTES`: a parquet file of submissions as JSON lines.

It runs in a process of its own with limits of memory and time, because it decodes what a client sent. Each row is one
submission, with a column for each field; a null is a field that is not given. Exits with 1 and one sentence on stderr.
"""

from __future__ import annotations

import json
import resource
import sys
from typing import Any

from nouscoder.installation import how_to_install

MEMORY_BYTES = 4 * 1024**3
CPU_TIME_S = 600
_BATCH_ROWS = 64


class _Unreadable(Exception):
    """The message says why."""


def main(source: str, target: str, max_bytes: int) -> None:
    """Convert `source` to `target`. Raises _Unreadable."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_TIME_S, CPU_TIME_S))
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise _Unreadable(f"this service cannot read parquet: it needs {how_to_install('data')}") from None
    try:
        file = parquet.ParquetFile(source)
        with open(target, "wb") as output:
            for batch in file.iter_batches(_BATCH_ROWS, use_threads=False):
                for row in batch.to_pylist():
                    output.write(_line(row))
                    if output.tell() > max_bytes:
                        raise _Unreadable(f"its submissions have more than {max_bytes} bytes")
    except (pyarrow.ArrowException, OSError, MemoryError, UnicodeDecodeError) as error:
        raise _Unreadable(f"not a parquet file that can be read: {str(error).splitlines()[0]:.200}") from None


def _line(row: dict[str, Any]) -> bytes:
    given = {name: value for name, value in row.items() if value is not None}
    try:
        return json.dumps(given, allow_nan=False).encode() + b"\n"
    except (TypeError, ValueError) as error:
        raise _Unreadable(f"a row is no JSON: {error}") from None


if __name__ == "__main__":
    try:
        main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    except (_Unreadable, MemoryError) as error:
        sys.stderr.write(str(error) or "it needs too much memory")
        sys.exit(1)
