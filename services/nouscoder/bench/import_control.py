"""The control of `nouscoder bench import`: the work that no importer can leave out, with bare libraries, row by row.

    python -m nouscoder.bench.import_control LAYOUT FOLDER < ROWS

It prints the CPU seconds of each stage as JSON. It checks nothing, knows no other layout, and cannot be continued.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from time import process_time
from typing import BinaryIO

import orjson

from nouscoder.bench.import_rows import LAYOUTS
from nouscoder.store.case_files import FRAME_BYTES, frame_packer

STAGES = ("read", "unpack", "parse", "write JSON", "SHA-256", "zstd", "files")


def stage_seconds(layout: str, file: BinaryIO, folder: Path) -> dict[str, float]:
    """Do the work for each line of `file`, with a file for each row in `folder`. Returns the CPU seconds by stage."""
    spent = dict.fromkeys(STAGES, 0.0)
    last = process_time()

    def end(stage: str) -> None:
        nonlocal last
        now = process_time()
        spent[stage] += now - last
        last = now

    form, packer = LAYOUTS[layout], frame_packer()
    for line in file:
        end("read")
        row = orjson.loads(line)
        end("parse")
        text = form.text(row)
        end("unpack")
        pairs = form.pairs(orjson.loads(text))
        end("parse")
        cases = [orjson.dumps({"input": given, "output": wanted}) for given, wanted in pairs]
        tests = b'{"type":"stdin","cases":[%b]}' % b",".join(cases)
        end("write JSON")
        name = hashlib.sha256(tests).hexdigest()
        end("SHA-256")
        packed = [packer.compress(tests[at : at + FRAME_BYTES]) for at in range(0, len(tests), FRAME_BYTES)]
        end("zstd")
        with (folder / f".part-{name}").open("wb") as part:
            part.writelines(packed)
        (folder / f".part-{name}").replace(folder / name)
        end("files")
    return spent


if __name__ == "__main__":
    json.dump(stage_seconds(sys.argv[1], sys.stdin.buffer, Path(sys.argv[2])), sys.stdout)
