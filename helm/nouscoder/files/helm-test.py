"""The script of `helm test`. It grades three programs through the REST API and reads the metrics of every service.

Standard library only. At the first fault it prints one sentence and exits with 1. It may run at any time of a run, and
after its end.
"""

import json
import os
import ssl
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

END_S = time.monotonic() + float(os.environ["TEST_TIMEOUT_S"])
GRADING_URL = os.environ["TEST_GRADING_URL"]
METRICS = dict(part.split("=", 1) for part in os.environ["TEST_METRICS"].split())
TOKEN_FILE = Path("/etc/nouscoder/tokens/token")
TLS = Path("/etc/nouscoder/tls")

CASES = [{"input": "1 2\n", "output": "3\n"}, {"input": "20 22\n", "output": "42\n"}]
PROGRAMS = {
    "accepted": "print(sum(map(int, input().split())))",
    "wrong_answer": "print(3)",
    "time_limit_exceeded": "while True: pass",
}
EXPECTED = {
    "verifier": ["nouscoder_verifier_submissions_total", "nouscoder_verifier_sandboxes"],
    "broker": ["nouscoder_broker_ledger_rollouts", "nouscoder_broker_policy_version"],
    "generation": ["nouscoder_generation_tokens_total", "nouscoder_generation_policy_version"],
    "learner": ["nouscoder_learner_steps_total", "nouscoder_learner_wait_seconds_total"],
}


class Fault(Exception):
    """A check failed. The message says which and why."""


def tls_context():
    """The TLS context of the API, or None if the API is not encrypted."""
    if not (TLS / "ca.crt").exists():
        return None
    context = ssl.create_default_context(cafile=TLS / "ca.crt")
    if (TLS / "tls.key").exists():
        context.load_cert_chain(TLS / "tls.crt", TLS / "tls.key")
    return context


def ask(url, body=None, token=None):
    """Send a request; returns (status, text). Retries until the test's end while the service does not answer."""
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
    data = None if body is None else json.dumps(body).encode()
    while True:
        try:
            request = urllib.request.Request(url, data, headers)
            with urllib.request.urlopen(request, timeout=60, context=tls_context()) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            if error.code not in (429, 503) or time.monotonic() > END_S:
                return error.code, error.read().decode()
        except OSError as error:
            if time.monotonic() > END_S:
                raise Fault(f"{url} does not answer: {error}") from None
        time.sleep(1)


def grade(program, token):
    """The verdict of a program. Retries after internal_error, which is a failure of the service."""
    tests = {"type": "stdin", "cases": CASES}
    limits = {"wall_time_s": 4, "cpu_time_s": 2, "memory_bytes": 256 << 20, "processes": 8}
    body = {"language": "python", "code": program, "tests": tests, "limits": limits}
    while True:
        status, text = ask(f"{GRADING_URL}/v1/grade", body, token)
        if status != 200:
            raise Fault(f"/v1/grade answers {status}: {text:.300}")
        answer = json.loads(text)
        if answer["verdict"] != "internal_error" or time.monotonic() > END_S:
            return answer
        time.sleep(1)


def check_grading():
    """Check that a request without the token is refused, and that each program gets its verdict."""
    token = TOKEN_FILE.read_text().strip() if TOKEN_FILE.exists() else None
    if token is not None:
        status, _ = ask(f"{GRADING_URL}/v1/grade", {"code": "", "tests": {"type": "stdin", "cases": CASES}})
        if status != 401:
            raise Fault(f"/v1/grade without a token answers {status}, not 401")
        say("without a token: 401")
    for wanted, program in PROGRAMS.items():
        answer = grade(program, token)
        if answer["verdict"] != wanted:
            raise Fault(f"{program!r} got {answer['verdict']}, not {wanted}: {json.dumps(answer):.600}")
        say(f"{program!r}: {wanted} in {answer['duration_s']:.2f} s by {answer['backend']}")


def read_metrics(service):
    """Series name (including its labels) -> value."""
    status, text = ask(METRICS[service])
    if status != 200:
        raise Fault(f"{METRICS[service]} answers {status}")
    lines = (line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#"))
    return {series: float(value) for series, value in lines}


def check_metrics(service):
    """Wait until every expected metric has a series. Some appear only after the service's first work."""
    while True:
        found = {series.split("{")[0] for series in read_metrics(service)}
        missing = [name for name in EXPECTED[service] if name not in found]
        if not missing:
            say(f"metrics of {service}: {len(found)} names")
            return
        if time.monotonic() > END_S:
            raise Fault(f"{METRICS[service]} has no {', '.join(missing)}")
        time.sleep(1)


def check_ledger():
    """Check that admitted equals the sum of all other states. Waits until a rollout is admitted."""
    prefix = 'nouscoder_broker_ledger_rollouts{state="'
    while True:
        series = read_metrics("broker")
        states = {name[len(prefix) : -2]: value for name, value in series.items() if name.startswith(prefix)}
        admitted = series.get("nouscoder_broker_admitted_rollouts_total", 0)
        if admitted != sum(states.values()) or series.get("nouscoder_broker_ledger_balanced") == 0:
            raise Fault(f"the ledger does not balance: {admitted:.0f} admitted, {states}")
        if admitted:
            say(f"ledger: {admitted:.0f} admitted = {' + '.join(f'{n:.0f} {s}' for s, n in states.items() if n)}")
            return
        if time.monotonic() > END_S:
            raise Fault("the broker has admitted no rollout")
        time.sleep(1)


def say(text):
    """Write a line to the pod's log."""
    sys.stdout.write(f"ok: {text}\n")
    sys.stdout.flush()


def main():
    """Run all checks, up to the first fault."""
    try:
        check_grading()
        for service in METRICS:
            check_metrics(service)
        if "broker" in METRICS:
            check_ledger()
    except Fault as fault:
        sys.stdout.write(f"failed: {fault}\n")
        sys.exit(1)


if __name__ == "__main__":
    main()
