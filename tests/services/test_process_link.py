"""ProcessLink: what is left of a harness that has ended."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from nouscoder.verifier.sandbox.slot import ProcessLink


@pytest.mark.timeout(60)
async def test_a_closed_link_keeps_no_pipe_of_a_process_whose_children_hold_them() -> None:
    link = await ProcessLink.start(["/bin/sh", "-c", "sleep 60 >/dev/null & echo $!"])
    child = int(await link.reader.readline())
    try:
        while link.is_open:  # the process ends; its child keeps stderr
            await asyncio.sleep(0.01)
        await link.close()
        assert link.writer.is_closing()
        assert link._process._transport._closed  # type: ignore[attr-defined]
    finally:
        os.kill(child, signal.SIGKILL)
