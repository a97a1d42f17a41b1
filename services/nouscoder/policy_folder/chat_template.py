"""Renders the chat template of a policy folder in processes of its own.

A chat template is a program, and it comes with a model from anywhere. Jinja's sandbox keeps it from files and modules,
but bounds neither its time nor its memory: two nested loops never end.

INVARIANT: one call renders with at most CPU_S seconds of CPU time and MEMORY_BYTES of memory, and gives at most
MAX_CHARACTERS. A process that reaches a limit is gone when the call returns. Calls of other threads do not wait for it
while fewer than PROCESSES are busy.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from nouscoder.domain.conversation import Message

CPU_S = 5
MEMORY_BYTES = 1024**3
MAX_CHARACTERS = 64 * 1024**2
PROCESSES = 4
_PATIENCE_S = 120.0  # on a machine that gives the process no CPU; beginning takes a second of it

_COMMAND = ("-P", "-m", __name__)


# A message as chat templates take it: role, content, and what else the template knows.
ChatMessage = Mapping[str, Any]


class TemplateFailed(ValueError):
    """The template gave no text. The message says why."""


class TemplateLimit(TemplateFailed):
    """The template reached a limit. The message names its folder."""


class ChatTemplate:
    """A template with the special tokens that it may write. It can be used by several threads."""

    def __init__(self, text: str, special_tokens: Mapping[str, str], folder: Path, date: str = "") -> None:
        """`special_tokens` by their names in templates, such as bos_token. `folder` is named in messages.

        `date` is the day that strftime_now writes, at 0:00; empty: the time of the rendering.
        """
        self._fixed = {"template": text, "special_tokens": dict(special_tokens), "date": date}
        self._folder = folder
        self._places = threading.BoundedSemaphore(PROCESSES)
        self._idle: list[_Process] = []

    def render(
        self,
        conversations: Sequence[Sequence[Message | ChatMessage]],
        thinking: bool | None,
        *,
        next_answer: bool = True,
        tools: Sequence[Any] = (),
    ) -> list[str]:
        """The text of each conversation, with `next_answer` up to the beginning of the next answer.

        Raises TemplateFailed. `thinking` is the template's enable_thinking, which DeepSeek's and Granite's call
        thinking; None leaves it to the template. `tools` are descriptions of functions.
        """
        messages = [
            [{"role": one.role.value, "content": one.content} if isinstance(one, Message) else one for one in each]
            for each in conversations
        ]
        switches = {} if thinking is None else {"enable_thinking": thinking, "thinking": thinking}
        what = {"conversations": messages, "switches": switches, "next_answer": next_answer, "tools": [*tools]}
        request = json.dumps({**self._fixed, **what})
        with self._places:
            process = self._idle.pop() if self._idle else _Process()
            try:
                answer = process.ask(request.encode())
            except _Ended as error:
                raise TemplateLimit(f"the chat template of {self._folder} {error}") from None
            self._idle.append(process)
        if "texts" in answer:
            return [str(text) for text in answer["texts"]]
        raise TemplateFailed(f"the chat template refuses the messages: {answer['refusal']}")


class _Ended(Exception):
    """The process is gone. The text continues a sentence about the template."""


class _Process:
    """One process. It ends with this object, and when this process is gone."""

    def __init__(self) -> None:
        own, other = socket.socketpair()
        with other:
            command = [sys.executable, *_COMMAND, str(other.fileno())]
            # The libraries that transformers loads would start a thread for each core.
            threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=os.environ | threads,
                pass_fds=[other.fileno()],
            )
        own.settimeout(_PATIENCE_S)
        self._channel = own
        self._lines = own.makefile("rb")
        self._end = weakref.finalize(self, _end, self._process, own, self._lines)

    def ask(self, request: bytes) -> dict[str, Any]:
        """The answer. Raises _Ended."""
        try:
            self._channel.sendall(request + b"\n")
            line = self._lines.readline()
        except TimeoutError:
            self._end()
            raise _Ended(f"gave no text within {_PATIENCE_S:.0f} s") from None
        except OSError:
            line = b""
        answer: dict[str, Any] = json.loads(line) if line.endswith(b"\n") else {"limit": self._reason()}
        if "limit" in answer:
            self._end()
            raise _Ended(answer["limit"])
        return answer

    def _reason(self) -> str:
        self._channel.close()
        status = self._process.wait(_PATIENCE_S)
        if status == -signal.SIGXCPU:
            return f"took more than {CPU_S} s of CPU time"
        return f"ended its process with status {status}"


def _end(process: subprocess.Popen[bytes], *channels: Any) -> None:
    for channel in channels:
        channel.close()
    process.kill()
    process.wait()


def serve(channel: socket.socket) -> None:
    """Answer requests until the other side closes the channel, or until a limit is reached."""
    from transformers.utils import chat_template_utils

    used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_AS, used + MEMORY_BYTES)
    for line in channel.makefile("rb"):
        _limit(resource.RLIMIT_CPU, int(time.process_time()) + 1 + CPU_S)
        try:
            request = json.loads(line)
            if request["date"]:
                day = datetime.fromisoformat(request["date"])
                vars(chat_template_utils)["datetime"] = SimpleNamespace(now=lambda day=day: day)
            answer = _answer(request, chat_template_utils.render_jinja_template)
        except MemoryError:
            answer = {"limit": f"needs more than {MEMORY_BYTES // 1024**2} MiB of memory"}
        channel.sendall(json.dumps(answer).encode() + b"\n")
        if "limit" in answer:
            return


def _limit(kind: int, value: int) -> None:
    _, most = resource.getrlimit(kind)
    resource.setrlimit(kind, (value if most == resource.RLIM_INFINITY else min(value, most), most))


def _answer(request: dict[str, Any], render: Any) -> dict[str, Any]:
    fixed = {**request["special_tokens"], **request["switches"]}
    try:
        texts, _ = render(
            request["conversations"],
            tools=request["tools"] or None,
            chat_template=request["template"],
            add_generation_prompt=request["next_answer"],
            **fixed,
        )
    except MemoryError:
        raise
    except Exception as error:  # a template is a program, and may raise anything
        return {"refusal": str(error)[:1000] or type(error).__name__}
    if sum(map(len, texts)) > MAX_CHARACTERS:
        return {"limit": f"writes more than {MAX_CHARACTERS:,} characters"}
    return {"texts": texts}


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
