"""What to change when the API server refuses an object. The functions read its messages and send no requests."""

from __future__ import annotations

import re
from collections.abc import Sequence

# The first part of a message that matches says what to do. {namespace} is that of the object.
_FIXES: Sequence[tuple[str, str]] = (
    (
        r"violates PodSecurity",
        "change the securityContext values that the message names, or label the namespace with a standard that admits"
        " the pod: kubectl label --overwrite namespace {namespace} pod-security.kubernetes.io/enforce=LEVEL",
    ),
    (r"exceeded quota", "raise that quota in {namespace}, or lower the *.resources of the pod in the values"),
    (r"failed quota", "set what the quota counts in the *.resources of the pod, or make a LimitRange with defaults"),
    (
        r"(maximum|minimum) .*(usage|limit)|must be less than or equal to .* limit",
        "change the *.resources of the pod in the values, or the LimitRange of {namespace}",
    ),
    (
        r"ValidatingAdmissionPolicy",
        "change the value that the policy's message is about, or ask its owner for an exception for {namespace}",
    ),
    (
        r"admission webhook",
        "change the value that the webhook's message is about, or ask its owner for an exception for {namespace}",
    ),
    (r"no PriorityClass with name", "make that PriorityClass, or change priorityClassName in the values"),
    (r"RuntimeClass .*not found|pod rejected: RuntimeClass", "make that RuntimeClass, or change runtimeClassName"),
    (r"[Ss]ervice ?[Aa]ccount .*not found", "make that account, or set serviceAccount.create=true for the component"),
    (r"attempting to grant RBAC permissions", "let an account with these rights install, or run it as cluster-admin"),
    (r"is immutable|updates to statefulset spec|Forbidden: .*immutable", "keep the old value, or uninstall first"),
    (r"namespaces? .*not found", "kubectl create namespace {namespace}"),
    (r"is being terminated", "wait until the namespace {namespace} is gone, and make it again"),
)
_PLAIN = "change the value that this message is about, or ask the administrator of the cluster"
# What serves a kind, or the value that asks for it, by API group.
_SERVED_BY = {
    "monitoring.coreos.com": "install the Prometheus operator, or set serviceMonitor.enabled=false and"
    " prometheusRule.enabled=false",
    "cert-manager.io": "install cert-manager, or give the certificates in tls.existingSecret",
    "leaderworkerset.x-k8s.io": "install the operator of LeaderWorkerSet, or set learner.workload=statefulset",
    "jobset.x-k8s.io": "install the operator of JobSet, or set learner.workload=statefulset",
    "gateway.networking.k8s.io": "install the Gateway API, or set verifier.httpRoute.enabled=false",
    "keda.sh": "install KEDA, or turn the scaling by KEDA off in the values",
    "admissionregistration.k8s.io": "Kubernetes 1.30 or newer, or verifier.sandbox.admissionPolicy=never",
}


def fix_for(message: str, namespace: str) -> str:
    """What to change, for a refusal of the API server or one of its warnings."""
    fix = next((fix for pattern, fix in _FIXES if re.search(pattern, message)), _PLAIN)
    return fix.format(namespace=namespace)


def fix_for_kind(api_version: str) -> str:
    """What to install, or which value to change, for a kind that the API does not serve."""
    return _SERVED_BY.get(api_version.partition("/")[0], "install what serves it, or change the value that asks for it")


def plainly(message: str) -> str:
    """The message of the API server in one line of at most 600 characters."""
    text = " ".join(message.split())
    return text if len(text) <= 600 else f"{text[:600]} ..."
