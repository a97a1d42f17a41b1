"""A real API server with the CRDs of LeaderWorkerSet and JobSet accepts every object of the presets, field by field.

With those of Kueue, Volcano, Argo CD and Flux it accepts all of examples/kubernetes. No operator runs: the objects are
stored, and no pod comes of them. The CRDs come from the modules of the operators on the Go module proxy.
"""

from __future__ import annotations

import json
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

pytestmark = [pytest.mark.cluster, pytest.mark.soak, pytest.mark.timeout(900)]

CHART = Path(__file__).parents[2] / "helm" / "nouscoder"
_KUEUE, _FLUX = "config/components/crd/bases/kueue.x-k8s.io_", "config/crd/bases"
# Module -> the files of its CRDs.
MODULES = {
    "sigs.k8s.io/lws@v0.8.0": ("config/crd/bases/leaderworkerset.x-k8s.io_leaderworkersets.yaml",),
    "sigs.k8s.io/jobset@v0.10.1": ("config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml",),
    "sigs.k8s.io/kueue@v0.17.0": tuple(
        f"{_KUEUE}{kind}.yaml"
        for kind in ("resourceflavors", "workloadpriorityclasses", "clusterqueues", "localqueues")
    ),
    "volcano.sh/volcano@v1.10.0": (
        "config/crd/volcano/bases/scheduling.volcano.sh_podgroups.yaml",
        "config/crd/volcano/bases/scheduling.volcano.sh_queues.yaml",
    ),
    "github.com/argoproj/argo-cd/v3@v3.1.5": ("manifests/crds/application-crd.yaml",),
    "github.com/fluxcd/helm-controller@v1.4.0": (f"{_FLUX}/helm.toolkit.fluxcd.io_helmreleases.yaml",),
    "github.com/fluxcd/source-controller@v1.7.2": (f"{_FLUX}/source.toolkit.fluxcd.io_ocirepositories.yaml",),
}
EXAMPLES = CHART.parents[1] / "examples" / "kubernetes"
# What each file beside the values has, and a field of it.
FILES = {
    "kueue.yaml": (4, "clusterQueue"),
    "volcano.yaml": (1, "weight"),
    "argocd.yaml": (2, "targetRevision"),
    "flux.yaml": (2, "chartRef"),
}
SEVERAL = ("--set", "learner.pods=2", "--set", "learner.persistence.accessModes={ReadWriteMany}")
H200 = ("-f", f"{CHART}/values-h200.yaml")
B200 = (*H200, "-f", f"{CHART}/values-b200.yaml")
GROUP, JOBS = ("--set", "learner.workload=leaderWorkerSet"), ("--set", "learner.workload=jobSet")
PRESETS = {
    "h200": H200,
    "b200": B200,
    "lws": (*SEVERAL, *GROUP),
    "jobset": (*SEVERAL, *JOBS),
    "lws-of-one": GROUP,
    "jobset-of-one": JOBS,
    "h200-lws": (*H200, *GROUP),
    "b200-jobset": (*B200, *JOBS),
    **{
        name: ("-f", f"{CHART}/values-gpu.yaml", "-f", f"{EXAMPLES}/values-{name}.yaml")
        for name in ("fetch", "wandb", "kueue", "volcano")
    },
    "kueue-lws": (*H200, "-f", f"{EXAMPLES}/values-kueue.yaml"),
}


def run(*command: str, given: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=180, input=given, check=False)


@pytest.fixture(scope="module")
def crds() -> Iterator[None]:
    """The CRDs are installed, and removed unless the cluster had them."""
    if (go := shutil.which("go")) is None:
        pytest.skip("the CRDs come from the Go module proxy, and this machine has no go")
    made = []
    for module, paths in MODULES.items():
        found = run(go, "mod", "download", "-json", module)
        if found.returncode:
            pytest.skip(f"the Go module proxy does not give {module}: {found.stdout[-300:]}{found.stderr[-300:]}")
        made += [str(Path(json.loads(found.stdout)["Dir"]) / path) for path in paths]
    had = run("kubectl", "get", "crd", "-o", "name").stdout
    try:
        for file in made:
            done = run("kubectl", "apply", "--server-side", "--force-conflicts", "-f", file)
            assert done.returncode == 0, done.stderr
            wait = ("kubectl", "wait", "--for=condition=Established", "--timeout=60s", "-f", file)
            # `kubectl wait` fails at once on an object that has no conditions yet.
            assert any(run(*wait).returncode == 0 for _ in range(50)), file
        yield
    finally:
        for file in made:
            if yaml.safe_load(Path(file).read_text("utf8"))["metadata"]["name"] not in had:
                run("kubectl", "delete", "--ignore-not-found", "-f", file)


@pytest.fixture(scope="module")
def namespace(crds: None) -> Iterator[str]:
    """The namespace of a release, and that of its runners."""
    name = f"nouscoder-kinds-{secrets.token_hex(3)}"
    names = (name, f"{name}-nouscoder-sandbox", f"{name}-sandbox")
    try:
        for each in names:
            assert run("kubectl", "create", "namespace", each).returncode == 0
        yield name
    finally:
        run("kubectl", "delete", "namespace", *names, "--ignore-not-found", "--timeout=120s")


def rendered(namespace: str, *words: str) -> str:
    done = run("helm", "template", "nouscoder", str(CHART), "-n", namespace, "--kube-version", "1.34.0", *words)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("preset", PRESETS)
def test_the_api_server_accepts_every_field_of_a_preset(preset: str, namespace: str) -> None:
    made = [one for one in yaml.safe_load_all(rendered(namespace, *PRESETS[preset])) if one]
    accepted = 0
    for where in ((), ("-n", namespace)):  # kubectl refuses other namespaces than that of -n
        chosen = [one for one in made if ("namespace" in one["metadata"]) is not bool(where)]
        given = json.dumps({"apiVersion": "v1", "kind": "List", "items": chosen})
        done = run("kubectl", "apply", "--dry-run=server", "--validate=strict", *where, "-f", "-", given=given)
        assert done.returncode == 0, done.stderr
        accepted += len(done.stdout.splitlines())
    assert accepted == len(made) > 10
    print(preset, accepted, "objects accepted")


@pytest.mark.parametrize(("preset", "kind"), [("lws", "leaderworkerset"), ("jobset", "jobset")])
def test_the_object_is_stored_with_both_pods_and_a_misspelt_field_is_refused(
    preset: str, kind: str, namespace: str
) -> None:
    words = ("-s", f"templates/learner/learner-{kind}.yaml")
    text = rendered(namespace, *PRESETS[preset], *words)
    given = ("-n", namespace, "--validate=strict", "-f", "-")
    wrong = run(
        "kubectl", "apply", "--dry-run=server", *given, given=text.replace("\nspec:", "\nspec:\n  replica: 1", 1)
    )
    assert wrong.returncode, "the schema is not enforced"
    assert 'unknown field "spec.replica"' in wrong.stderr
    done = run("kubectl", "apply", *given, given=text)
    assert done.returncode == 0, done.stderr
    stored = run("kubectl", "-n", namespace, "get", kind, "-o", "json").stdout
    (one,) = json.loads(stored)["items"]
    images = [line for line in stored.splitlines() if '"image":' in line]
    assert one["metadata"]["name"].startswith("nouscoder-learner")
    assert len(images) >= 2, "the pods of rank 0 and of the others are kept"


def test_an_upgrade_leaves_a_jobset_that_its_queue_has_suspended_as_it_is(namespace: str) -> None:
    """Kueue sets spec.suspend. Helm 4 applies on the server's side, without force."""
    values = (*PRESETS["jobset"], "--set", "learner.workloadLabels.kueue\\.x-k8s\\.io/queue-name=team")
    words = ("-s", "templates/learner/learner-jobset.yaml")
    apply = ("kubectl", "apply", "--server-side", "--field-manager=helm", "-n", namespace, "-f", "-")
    made = run(*apply, given=rendered(namespace, *values, *words))
    assert made.returncode == 0, made.stderr
    patch = ("--type=merge", "--field-manager=kueue", "-p", '{"spec": {"suspend": true}}')
    queued = run("kubectl", "-n", namespace, "patch", "jobset", "nouscoder-learner", *patch)
    assert queued.returncode == 0, queued.stderr
    again = run(*apply, given=rendered(namespace, *values, *words, "--set", "learner.workloadLabels.team=ours"))
    assert again.returncode == 0, again.stderr
    stored = json.loads(run("kubectl", "-n", namespace, "get", "jobset", "nouscoder-learner", "-o", "json").stdout)
    assert stored["spec"]["suspend"] is True
    assert stored["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"
    assert stored["metadata"]["labels"]["team"] == "ours"


@pytest.mark.parametrize("name", FILES)
def test_the_api_server_accepts_the_objects_beside_the_values(name: str, namespace: str) -> None:
    count, known = FILES[name]
    objects = list(yaml.safe_load_all((EXAMPLES / name).read_text("utf8")))
    for one in objects:
        if "namespace" in one["metadata"]:
            one["metadata"]["namespace"] = namespace

    def applied(change: str = "") -> subprocess.CompletedProcess[str]:
        given = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}).replace(
            f'"{known}"', f'"{known}{change}"'
        )
        return run("kubectl", "apply", "--dry-run=server", "--validate=strict", "-f", "-", given=given)

    done = applied()
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == len(objects) == count
    assert f"{known}Misspelt" in applied("Misspelt").stderr
