"""A service that starts processes while its gRPC API is in use: gRPC does not take part in the forks."""

from __future__ import annotations

import subprocess
import sys

import pytest

NUM_PROCESSES = 40
# As in the gateway: grpc may be imported before nouscoder.rpc, and uvloop starts the processes, by fork().
SERVICE = f"""
import asyncio, sys
import grpc, uvloop
import nouscoder.rpc
CALLER = '''
import sys, grpc
call = grpc.insecure_channel(sys.argv[1]).unary_unary("/Echo/Echo")
while True:
    call(b"x", timeout=60)
'''
async def main():
    server = grpc.aio.server()
    called = asyncio.Event()
    async def echo(request, context):
        called.set()
        return request
    methods = {{"Echo": grpc.unary_unary_rpc_method_handler(echo)}}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("Echo", methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    caller = await asyncio.create_subprocess_exec(sys.executable, "-c", CALLER, f"127.0.0.1:{{port}}")
    await called.wait()
    for _ in range({NUM_PROCESSES}):
        child = await asyncio.create_subprocess_exec("/bin/true")
        print("child", await child.wait())
    print("caller", caller.returncode)
    caller.kill()
    await caller.wait()
    await server.stop(0)
uvloop.run(main())
"""


@pytest.mark.timeout(240)
def test_processes_that_are_started_during_calls_end_well_and_grpc_says_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", SERVICE], capture_output=True, text=True, timeout=200)
    assert "fork" not in done.stderr, done.stderr[:1000]
    assert done.stdout.splitlines() == ["child 0"] * NUM_PROCESSES + ["caller None"], done.stderr[-2000:]
