"""A session of the installed mcp package with /mcp of a grading service: mcp_client.py URL TOKEN [GENERATION].

Prints one line of JSON. GENERATION is for mcp 2: "auto" (default: the newest) or "legacy" (with initialize).
"""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import AsyncExitStack
from importlib.metadata import version
from typing import Any


async def opened(stack: AsyncExitStack, url: str, token: str, generation: str) -> tuple[Any, str]:
    """A client, and the version of the protocol that it has agreed on."""
    headers = {"Authorization": f"Bearer {token}"}
    if version("mcp").startswith("1."):
        from mcp import ClientSession
        from mcp.client.streamable_http import streamablehttp_client

        read, write, _ = await stack.enter_async_context(streamablehttp_client(url, headers=headers))
        session = await stack.enter_async_context(ClientSession(read, write))
        return session, str((await session.initialize()).protocolVersion)
    import httpx2
    from mcp import Client
    from mcp.client.streamable_http import streamable_http_client

    http = await stack.enter_async_context(httpx2.AsyncClient(headers=headers, timeout=60))
    client = await stack.enter_async_context(Client(streamable_http_client(url, http_client=http), mode=generation))
    return client, client.protocol_version


async def main(url: str, token: str, generation: str = "auto") -> None:
    """Call each tool, and one wrongly."""

    def told(result: Any) -> Any:
        record = result.model_dump(by_alias=True)
        return record["content"][0]["text"] if record["isError"] else record["structuredContent"]

    async with AsyncExitStack() as stack:
        client, protocol = await opened(stack, url, token, generation)
        found: dict[str, Any] = {"mcp": version("mcp"), "protocol": protocol}
        found["tools"] = [tool.name for tool in (await client.list_tools()).tools]
        found["run"] = told(await client.call_tool("run_code", {"code": "print(6 * int(input()))", "stdin": "7"}))
        listed = told(await client.call_tool("list_problems", {}))
        found["problems"] = [problem["problem_id"] for problem in listed["problems"]]
        found["verdicts"] = []
        for program in ("print(sum(map(int, input().split())))", "print(0)"):
            asked = {"problem_id": found["problems"][0], "answer": f"So:\n```python\n{program}\n```"}
            found["verdicts"].append(told(await client.call_tool("grade_on_public_tests", asked))["verdict"])
        found["fault"] = told(await client.call_tool("run_code", {"code": "", "language": "cobol"}))
    print(json.dumps(found))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
