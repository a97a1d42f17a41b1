"""One session of an agent with the openai client. argv: the address of the API. Prints what it got, as JSON."""

import json
import sys
from typing import Any

import httpx
import openai

url = sys.argv[1]
session = httpx.post(f"{url}/v1/sessions", json={}, timeout=60).json()
client = openai.OpenAI(base_url=f"{url}/v1", api_key=session["key"])
messages: list[Any] = session["messages"]
for reply in ("output: 1", None):
    answer = client.chat.completions.create(model=session["model"], messages=messages, timeout=60)
    messages.append(answer.choices[0].message)  # as the client has it, with its empty fields
    if reply:
        messages.append({"role": "user", "content": reply})
parts = client.chat.completions.create(model="any", messages=messages[:-1], stream=True)
streamed = "".join(part.choices[0].delta.content or "" for part in parts)
try:
    client.chat.completions.create(model="any", messages=[{"role": "user", "content": "other"}])
except openai.ConflictError as error:
    refused = error.message
closed = client.post(f"/sessions/{session['id']}/reward", body={"reward": 0.5}, cast_to=object)
print(json.dumps({"openai": openai.__version__, "streamed": streamed, "refused": refused, "closed": closed}))
