"""An agent with a calculator makes the rollouts of a run whose generation.environment.kind is "agent".

agent.py URL [AGENTS]: URL is that of generation.openai.http, AGENTS is how many work at the same time.
"""

import json
import operator
import re
import sys
import threading
import time
import urllib.error
import urllib.request
from typing import Any

CALL = re.compile(r"<calc>(\d{1,9})([-+*])(\d{1,9})</calc>$")
OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def post(url: str, body: dict[str, Any], key: str = "") -> Any:
    """The answer to a request. Raises OSError."""
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=700) as answer:
        return json.load(answer)


def calculated(text: str) -> str:
    """What the calculator answers; empty for a text that does not end with a call, such as <calc>12*34</calc>."""
    call = CALL.search(text)
    return f"= {OPERATIONS[call[2]](int(call[1]), int(call[3]))}" if call else ""


def make_rollout(url: str) -> None:
    """Ask the policy, and calculate for it, until it answers without a call."""
    session = post(f"{url}/v1/sessions", {"wait_s": 60})
    key, messages, reply = session["key"], session["messages"], "the problem"
    while reply and len(messages) < 8:
        asked = post(f"{url}/v1/chat/completions", {"model": session["model"], "messages": messages}, key)
        messages.append(asked["choices"][0]["message"])
        reply = calculated(messages[-1]["content"])
        messages += [{"role": "user", "content": reply}] if reply else []
    post(f"{url}/v1/sessions/{session['id']}/reward", {}, key)  # the verifier grades the last completion


def work(url: str, first_s: float = 1800.0, next_s: float = 120.0) -> None:
    """Make rollouts until the run is over. The first may come late: a run begins with what it prepares."""
    patience_s, last_s = first_s, time.monotonic()
    while time.monotonic() - last_s < patience_s:
        try:
            make_rollout(url)
            patience_s, last_s = next_s, time.monotonic()
        except urllib.error.HTTPError as error:  # no rollout waits, or this one has ended: take the next
            error.close()
            time.sleep(0.1)
        except OSError:
            time.sleep(1)


if __name__ == "__main__":
    address, number = sys.argv[1].rstrip("/"), int(sys.argv[2]) if len(sys.argv) > 2 else 16
    print(f"{number} agents wait for rollouts at {address}", flush=True)
    agents = [threading.Thread(target=work, args=(address,), daemon=True) for _ in range(number)]
    for agent in agents:
        agent.start()
    for agent in agents:
        agent.join()
    print("no rollout waits any more: the agents end")
