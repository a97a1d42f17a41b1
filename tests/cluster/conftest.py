"""A release of the chart in its own namespaces, controlled with kubectl and helm."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm" / "nouscoder"
NAME = "nouscoder"
SMALL_RUN = (  # the demo with few problems
    "config.evaluation.samples=1",
    "config.demo.held_out_problems=30",
    "config.demo.train_problems=400",
    "config.demo.warm_start_share=0.4",
)
TAG = os.environ.get("NOUSCODER_IMAGE_TAG", "")
LOCAL = ("--set", "global.imageRegistry=localhost")  # the cluster has the images of deploy/images/build
_IN_RUN = ("exec", f"{NAME}-learner-0", "-c", "run", "--")
_GENERATION = re.compile(r"^nouscoder_generation_(tokens_total|policy_version) (\S+)$", re.MULTILINE)
_FORWARDING = re.compile(r"Forwarding from 127\.0\.0\.1:(\d+)")


def _run(*command: str, limit_s: float = 60, given: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=limit_s, input=given, check=False)


def output_of(*command: str, limit_s: float = 60, given: str | None = None) -> str:
    """The stdout of a command. Fails with all its output when the command fails."""
    done = _run(*command, limit_s=limit_s, given=given)
    if done.returncode:
        pytest.fail(f"{' '.join(command)} exited with {done.returncode}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    return done.stdout


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Print a failure at once: the summary is lost when CI's time is over."""
    if report.failed:
        print(f"\nFAILED {report.when} {report.nodeid}\n{report.longreprtext[-12000:]}", flush=True)


def state_of_nodes() -> str:
    """The conditions of the nodes, and this machine's free disk and memory."""
    conditions = '{range .items[*].status.conditions[*]}{.type}={.status} {.message}{"\\n"}{end}'
    nodes = output_of("kubectl", "get", "nodes", "-o", f"jsonpath={conditions}")
    return "\n".join([nodes, output_of("df", "-h", "/"), output_of("free", "-m")])


@dataclass(frozen=True, slots=True)
class PodState:
    """The state of a pod that the tests need."""

    name: str
    namespace: str
    component: str
    uid: str
    ready: bool
    ended: bool
    num_restarts: int


@dataclass
class Release:
    """An installed release of the chart."""

    namespace: str

    @property
    def runners(self) -> str:
        """The namespace of the runner pods."""
        return f"{self.namespace}-sandbox"

    def helm(self, *words: str, limit_s: float = 300) -> str:
        """`helm WORDS` in the namespace."""
        return output_of("helm", *words, "-n", self.namespace, limit_s=limit_s)

    def kubectl(self, *words: str, limit_s: float = 60, given: str | None = None) -> str:
        """`kubectl WORDS` in the namespace."""
        return output_of("kubectl", "-n", self.namespace, *words, limit_s=limit_s, given=given)

    def install(self, *words: str) -> None:
        """`helm install` with the images that the environment names."""
        tag = ("--set", f"image.tag={TAG}") if TAG else ()
        self.helm("install", NAME, str(CHART), *LOCAL, *tag, *words)

    def pods(self) -> list[PodState]:
        """The pods of both namespaces that are not being deleted."""
        items = [
            item
            for namespace in (self.namespace, self.runners)
            for item in json.loads(self.kubectl("get", "pods", "-n", namespace, "-o", "json"))["items"]
        ]
        return [_pod_state(item) for item in items if "deletionTimestamp" not in item["metadata"]]

    def pods_of(self, component: str) -> list[PodState]:
        """The pods of a component that have not ended."""
        return [pod for pod in self.pods() if pod.component == component and not pod.ended]

    def pod(self, component: str) -> PodState:
        """The first pod of a component."""
        found = self.pods_of(component)
        assert found, f"no pod of {component}"
        return found[0]

    def until(self, condition: Callable[[], Any], what: str, limit_s: float, every_s: float = 2.0) -> Any:
        """Wait for a true result and return it. Fails with the state of the pods after `limit_s`."""
        end = time.monotonic() + limit_s
        while not (answer := condition()):
            if time.monotonic() > end:
                pytest.fail(f"{what}: not within {limit_s:.0f} s\n{self.picture()}")
            time.sleep(every_s)
        return answer

    def all_ready(self, wanted: set[str]) -> bool:
        """Whether every pod of the release is ready and every component in `wanted` has one."""
        pods = [pod for pod in self.pods() if pod.component != "test"]
        return {pod.component for pod in pods} >= wanted and all(pod.ready for pod in pods)

    def status(self) -> dict[str, Any]:
        """The output of `nouscoder status` in the broker, {} while it fails."""
        command = ("exec", f"deploy/{NAME}-broker", "-c", "broker", "--")
        said = subprocess.run(
            ["kubectl", "-n", self.namespace, *command, "nouscoder", "status", "--broker", "127.0.0.1:50052", "--json"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        return dict(json.loads(said.stdout)) if said.returncode == 0 and said.stdout else {}

    def step(self) -> int:
        """The number of committed batches; -1 while it is unknown."""
        return int(self.status().get("batches_committed", -1))

    def run_file(self, name: str) -> str:
        """A file of the run folder; "" while it is missing."""
        said = subprocess.run(
            [
                "kubectl",
                "-n",
                self.namespace,
                "exec",
                f"{NAME}-learner-0",
                "-c",
                "run",
                "--",
                "cat",
                f"/runs/demo/{name}",
            ],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        return said.stdout if said.returncode == 0 else ""

    def evict(self, pod: PodState) -> float:
        """What `kubectl drain` does with a pod; a refusal by a budget is repeated. Returns the time of the eviction.

        A pod that is gone meanwhile counts as evicted.
        """
        about = {"name": pod.name, "namespace": pod.namespace}
        body = json.dumps({"apiVersion": "policy/v1", "kind": "Eviction", "metadata": about})
        path = f"/api/v1/namespaces/{pod.namespace}/pods/{pod.name}/eviction"
        command = ["kubectl", "create", "--raw", path, "-f", "-"]

        def asked() -> float:
            at_s = time.time()
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, input=body, check=False)
            refused = "disruption budget" in done.stderr
            assert done.returncode == 0 or refused or "NotFound" in done.stderr, done.stderr
            return 0.0 if refused else at_s

        return float(self.until(asked, f"{pod.name} is evicted", 120))

    @contextlib.contextmanager
    def forward(self, what: str, port: int) -> Iterator[int]:
        """Forward a port of this machine to `what`, such as svc/NAME. Yields the port."""
        command = ["kubectl", "-n", self.namespace, "port-forward", what, f":{port}"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            try:
                assert process.stdout is not None
                line = process.stdout.readline()
                match = _FORWARDING.match(line)
                assert match, line
                # It prints a line a connection, and stands still when nobody reads them.
                reading = threading.Thread(target=process.stdout.read)
                reading.start()
                try:
                    yield int(match[1])
                finally:
                    process.terminate()
                    reading.join()
            finally:
                process.terminate()

    def generation_metrics(self, pod: str) -> dict[str, float]:
        """`tokens_total` that a generation pod has sampled, and its `policy_version`."""
        with self.forward(f"pod/{pod}", 9090) as port:
            text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30).read().decode()
        return {name: float(value) for name, value in _GENERATION.findall(text)}

    def secret(self, name: str, key: str) -> str:
        """A value of a Secret."""
        template = f"{{{{index .data {json.dumps(key)} | base64decode}}}}"
        return self.kubectl("get", "secret", name, "-o", f"go-template={template}")

    def picture(self) -> str:
        """The state of the pods, for failure messages."""
        said = [
            self.kubectl("get", "pods,pvc", "-o", "wide"),
            self.kubectl("get", "pods,leases", "-n", self.runners, "-o", "wide"),
            state_of_nodes(),
            self.kubectl("get", "events", "--sort-by=.lastTimestamp")[-3000:],
            self.kubectl("get", "events", "-n", self.runners, "--sort-by=.lastTimestamp")[-3000:],
        ]
        for component in ("redis", "broker", "verifier", "generation", "learner"):
            words = ("logs", "-l", f"app.kubernetes.io/component={component}", "--all-containers", "--tail=12")
            logs = _run("kubectl", "-n", self.namespace, *words)  # fails where a container has not started
            said.append(f"--- {component}\n{logs.stdout}{logs.stderr}")
        return "\n".join(said)


def _pod_state(item: dict[str, Any]) -> PodState:
    conditions = {c["type"]: c["status"] for c in item["status"].get("conditions", ())}
    return PodState(
        name=item["metadata"]["name"],
        namespace=item["metadata"]["namespace"],
        component=item["metadata"]["labels"].get("app.kubernetes.io/component", ""),
        uid=item["metadata"]["uid"],
        ready=conditions.get("Ready") == "True",
        ended=item["status"]["phase"] in ("Succeeded", "Failed"),
        num_restarts=sum(
            container["restartCount"]
            for kind in ("initContainerStatuses", "containerStatuses")
            for container in item["status"].get(kind, ())
        ),
    )


@contextlib.contextmanager
def installed_release() -> Iterator[Release]:
    """A namespace for one release, which admits only restricted pods. Everything is deleted afterwards."""
    made = Release(f"nouscoder-test-{secrets.token_hex(3)}")
    output_of("kubectl", "create", "namespace", made.namespace)
    output_of("kubectl", "label", "namespace", made.namespace, "pod-security.kubernetes.io/enforce=restricted")
    try:
        yield made
    finally:
        made.helm("uninstall", NAME, "--ignore-not-found")
        names = (made.namespace, made.runners)
        output_of("kubectl", "delete", "namespace", *names, "--ignore-not-found", "--timeout=180s", limit_s=400)


@pytest.fixture(scope="module")
def release() -> Iterator[Release]:
    """See `installed_release`."""
    with installed_release() as made:
        yield made


@pytest.fixture(scope="session")
def verifier_release() -> Iterator[Release]:
    """The chart with values-verifier.yaml in a namespace that enforces `restricted`. Several modules share it."""
    with installed_release() as made:
        made.install("-f", str(CHART / "values-verifier.yaml"))
        yield made


@pytest.fixture(scope="module")
def grader(verifier_release: Release) -> Release:
    """The same, ready after what the tests of another module did to it."""
    verifier_release.until(lambda: verifier_release.all_ready({"verifier", "sandbox"}), "the verifier is ready", 300)
    return verifier_release


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of the shared release come last, so that it takes nothing from the others."""
    items.sort(key=lambda item: "verifier_release" in getattr(item, "fixturenames", ()))
