"""`fetch`: the Job that downloads a model and makes problem files, with a hub of this machine; the pods that wait."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import helm_python as helm
import pytest
from tests.chart.conftest import merged, pod_specs
from tests.hub_stand_in import hub

from nouscoder.policy_folder import inspection

if TYPE_CHECKING:
    from tests.chart.conftest import ChartRig

VALUES: dict[str, Any] = {
    "fetch": {"enabled": True, "model": "someone/model", "commands": ["echo '{}' >/problems/train.jsonl"]},
    "config": {"policy": {"path": "/policy"}},
}


def script_of(container: dict[str, Any], folder: Path) -> list[str]:
    """The command of a container, with its mounts in a folder."""
    (text,) = container["args"]
    for mount in ("policy", "problems", "tmp"):
        (folder / mount).mkdir(exist_ok=True)
    text = re.sub(r"/(policy|problems|tmp)\b", lambda found: f"{folder}{found[0]}", text)
    return [*container["command"], text]


def the_job(chart: ChartRig, values: dict[str, Any]) -> dict[str, Any]:
    (job,) = [one for one in chart.documents(values) if one["kind"] == "Job"]
    return job


def test_the_job_fetches_once_and_never_mixes_two_models(chart: ChartRig, tmp_path: Path) -> None:
    """The script of the Job runs as it is, with the real `hf`."""
    (container,) = the_job(chart, VALUES)["spec"]["template"]["spec"]["containers"]
    binaries = str(Path(sys.executable).parent)
    environment = {"PATH": f"{binaries}:{os.environ['PATH']}", "HOME": str(tmp_path), "HF_HUB_DISABLE_XET": "1"}

    def run(container: dict[str, Any], **more: str) -> subprocess.CompletedProcess[str]:
        command = script_of(container, tmp_path)
        given = environment | more
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=given)

    with hub() as url:
        refused = run(container, HF_ENDPOINT=url, HF_TOKEN="wrong")
        assert refused.returncode, "the hub wants a token"
        assert not list((tmp_path / "policy").glob(".fetched-*"))
        done = run(container, HF_ENDPOINT=url, HF_TOKEN="secret")
    assert done.returncode == 0, done.stderr
    policy = {file.name: file.read_bytes() for file in (tmp_path / "policy").iterdir() if file.is_file()}
    assert {name for name in policy if not name.startswith(".")} == {"config.json", "model.safetensors"}
    assert policy["model.safetensors"] == b"weights"
    assert (tmp_path / "problems" / "train.jsonl").read_text() == "{}\n"
    again = run(container, HF_ENDPOINT="http://127.0.0.1:1")  # nothing is asked for
    assert (again.returncode, again.stderr) == (0, "")
    (other,) = the_job(chart, merged(VALUES, {"fetch": {"model": "someone/else"}}))["spec"]["template"]["spec"][
        "containers"
    ]
    mixed = run(other, HF_ENDPOINT="http://127.0.0.1:1")
    assert mixed.returncode == 1
    assert "holds another model than someone/else at main" in mixed.stderr


def test_the_job_fetches_the_files_that_a_policy_needs(chart: ChartRig) -> None:
    text = the_job(chart, VALUES)["spec"]["template"]["spec"]["containers"][0]["args"][0]
    assert all(f"--include '{pattern}'" in text for pattern in inspection._HUB_FILES)


def test_pods_wait_for_the_files_and_say_where_to_look(chart: ChartRig, tmp_path: Path) -> None:
    pods = pod_specs(chart.documents(merged(VALUES, {"fetch": {"waitSeconds": 10}})))
    sleep = tmp_path / "bin" / "sleep"  # the time does not pass
    sleep.parent.mkdir()
    sleep.write_text("#!/bin/sh\n")
    sleep.chmod(0o755)
    for name, folders in {"Deployment/nouscoder-broker": 1, "StatefulSet/nouscoder-learner": 2}.items():
        waiting = pods[name]["spec"]["initContainers"][0]
        command = script_of(waiting, tmp_path)
        environment = {"PATH": f"{sleep.parent}:/usr/bin:/bin"}

        def run(
            command: list[str] = command, environment: dict[str, str] = environment
        ) -> subprocess.CompletedProcess[str]:
            return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)

        missing = run()
        assert missing.returncode == 1
        assert "is not there after 10 s: kubectl logs -l app.kubernetes.io/component=fetch" in missing.stdout
        files = [word.rstrip(";") for word in command[-1].split() if "/.fetched-" in word]
        assert len(files) == folders
        for file in files:
            Path(file).touch()
        assert (run().returncode, run().stdout) == (0, "")
        for file in files:
            Path(file).unlink()


def test_only_the_job_writes_and_only_it_has_the_token_and_the_way_out(chart: ChartRig) -> None:
    values = chart.kept["fetch"]
    documents, job = chart.documents(values), the_job(chart, values)
    assert job["spec"]["template"]["spec"]["containers"][0]["envFrom"] == [{"secretRef": {"name": "hub"}}]
    assert str(documents).count("'name': 'hub'") == 1
    policy = chart.one("NetworkPolicy", "nouscoder-fetch", values)
    assert policy["spec"]["ingress"] == []
    assert policy["spec"]["egress"][-1] == values["fetch"]["egress"][0]
    writers = set()
    for name, pod in pod_specs(documents).items():
        claims = {one["name"] for one in pod["spec"]["volumes"] if "persistentVolumeClaim" in one}
        for container in (*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"]):
            mounts = [one for one in container["volumeMounts"] if one["name"] in claims & {"policy", "problems"}]
            writers |= {name for mount in mounts if not mount.get("readOnly")}
    assert writers == {f"Job/{job['metadata']['name']}"}
    made = {one["metadata"]["name"]: one["spec"] for one in documents if one["kind"] == "PersistentVolumeClaim"}
    assert made["nouscoder-policy"]["resources"] == {"requests": {"storage": "20Gi"}}
    assert made["nouscoder-problems"]["accessModes"] == ["ReadWriteMany"]


@pytest.mark.parametrize(
    ("more", "is_new", "fetches_again"),
    [
        ({}, False, False),
        ({"image": {"tag": "7"}}, True, False),
        ({"fetch": {"revision": "v2"}}, True, True),
        ({"generation": {"replicas": 2}}, False, False),
    ],
)
def test_a_changed_job_has_another_name(
    chart: ChartRig, more: dict[str, Any], is_new: bool, fetches_again: bool
) -> None:
    """Kubernetes refuses a change of a Job. What is whole already is known by what was asked for, not by the Job."""
    was, now = (the_job(chart, values) for values in (VALUES, merged(VALUES, more)))
    assert (was["metadata"]["name"] != now["metadata"]["name"]) == is_new
    scripts = [job["spec"]["template"]["spec"]["containers"][0]["args"] for job in (was, now)]
    assert (scripts[0] != scripts[1]) == fetches_again


def test_the_notes_say_what_is_waited_for(chart: ChartRig) -> None:
    notes = chart.templates(VALUES)["nouscoder/templates/NOTES.txt"]
    assert "Broker and learner wait for policy and problems, which a Job fetches" in notes
    assert "a Job fetches" not in chart.templates({})["nouscoder/templates/NOTES.txt"]


def test_several_pods_of_the_learner_need_a_claim_that_all_can_mount(chart: ChartRig) -> None:
    several = merged(VALUES, {"learner": {"pods": 2, "persistence": {"accessModes": ["ReadWriteMany"]}}})
    with pytest.raises(helm.HelmError, match=r"policy\.persistence\.accessModes must be \[ReadWriteMany\]"):
        chart.documents(several)
    assert chart.documents(merged(several, {"policy": {"persistence": {"accessModes": ["ReadWriteMany"]}}}))


def test_existing_claims_are_filled_too(chart: ChartRig) -> None:
    given = {"policy": {"existingClaim": "models"}, "problems": {"persistence": {"existingClaim": "sets"}}}
    documents = chart.documents(merged(VALUES, given))
    assert not [one for one in documents if one["metadata"]["name"] in ("nouscoder-policy", "nouscoder-problems")]
    for pod in (the_job(chart, merged(VALUES, given))["spec"]["template"], *pod_specs(documents).values()):
        claims = {
            one["name"]: one["persistentVolumeClaim"]["claimName"]
            for one in pod["spec"]["volumes"]
            if "persistentVolumeClaim" in one
        }
        assert claims.get("policy", "models") == "models"
        assert claims.get("problems", "sets") == "sets"
