"""Makes a VolumeSnapshot of a claim, waits until it can be used, and removes the oldest. Only the standard library."""

import json
import os
import pathlib
import ssl
import sys
import time
import urllib.error
import urllib.request

ACCOUNT = pathlib.Path("/var/run/secrets/kubernetes.io/serviceaccount")
API, LABEL = "snapshot.storage.k8s.io/v1", "nouscoder/snapshot-of"


def call(method, name="", query="", body=None):
    """The answer of the Kubernetes API. The kubelet renews the token."""
    host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
    namespace, token = ((ACCOUNT / file).read_text() for file in ("namespace", "token"))
    host = f"[{host}]" if ":" in host else host
    path = f"{API}/namespaces/{namespace}/volumesnapshots{name and '/'}{name}{query}"
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    data = json.dumps(body).encode() if body else None
    asked = urllib.request.Request(f"https://{host}:{port}/apis/{path}", data, headers, method=method)
    trusted = ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt"))
    try:
        with urllib.request.urlopen(asked, timeout=30, context=trusted) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        sys.exit(f"{method} {path}: {error.code} {error.read()[:2000].decode()}")


def main(claim, snapshot_class, keep, limit_s):
    """A snapshot that is not ready within the limit fails, and is removed by the next backup that is."""
    name, until = f"{claim}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}", time.monotonic() + limit_s
    spec = {"volumeSnapshotClassName": snapshot_class, "source": {"persistentVolumeClaimName": claim}}
    of_claim = claim[:63].rstrip("-.")
    about = {"name": name, "labels": {LABEL: of_claim}}
    call("POST", body={"apiVersion": API, "kind": "VolumeSnapshot", "metadata": about, "spec": spec})
    while not (status := call("GET", name).get("status") or {}).get("readyToUse"):
        if time.monotonic() > until:
            why = (status.get("error") or {}).get("message", status)
            sys.exit(f"snapshot {name} is not ready after {limit_s} s: {why}")
        time.sleep(2)
    found = {one["metadata"]["name"]: one for one in call("GET", query=f"?labelSelector={LABEL}={of_claim}")["items"]}
    ready = sorted(each for each, one in found.items() if (one.get("status") or {}).get("readyToUse"))
    for old in found:
        if old < name and old not in ready[-keep:]:
            call("DELETE", old)
    sys.stdout.write(f"snapshot {name} is whole; there are {', '.join(ready[-keep:])}\n")


main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]) - 30)
