"""A release in a Kubernetes cluster: `--cluster` of the commands that ask a broker, `nouscoder logs` and `pages`."""

from __future__ import annotations

import json
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from heapq import merge
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nouscoder.cli.options import JsonOption, say
from nouscoder.errors import Unusable, WrongUse

if TYPE_CHECKING:
    from nouscoder.doctor.cluster.release import InstalledRelease

ClusterOption = Annotated[bool, typer.Option("--cluster", help="of a release in the Kubernetes cluster of KUBECONFIG")]
NamespaceOption = Annotated[
    str, typer.Option("--namespace", "-n", help="with --cluster; default: that of the kubeconfig, else nouscoder")
]
ReleaseOption = Annotated[str, typer.Option(help="with --cluster; default: the only one of the namespace")]


def release_of(namespace: str, name: str) -> InstalledRelease:
    """The release that the options name. Raises ClusterError, WrongUse."""
    from nouscoder.doctor.cluster.client import connect, usual_namespace
    from nouscoder.doctor.cluster.release import InstalledRelease

    return InstalledRelease(connect(), namespace or usual_namespace(), name)


@contextmanager
def broker_of_release(release: InstalledRelease, *, as_json: bool) -> Iterator[list[str]]:
    """The configuration that asks the release's broker, by a socket of this user. Raises ClusterError, PeerError.

    It says which pods are not ready: at the end, or in the error of a broker that does not answer.
    """
    from nouscoder.rpc.channel import PeerError

    faults: list[str] = []
    release.connect("broker", "grpc").close()
    with tempfile.TemporaryDirectory(prefix="nouscoder-") as folder, socket.socket(socket.AF_UNIX) as listener:
        address = f"unix:{folder}/broker"
        listener.bind(f"{folder}/broker")
        listener.listen()
        # No folder of this machine is the run's.
        asking = [f'broker.grpc="{address}"', f'run.root="{folder}"']
        if (tls := release.broker_tls()) is not None:
            for name, content in tls.files.items():
                (Path(folder) / name).write_bytes(content)
            pair = f'certificate="{folder}/tls.crt", key="{folder}/tls.key"'
            asking += [
                f'tls={{{pair}, ca="{folder}/ca.crt", server_name="{tls.server_name}"}}',
                f"verifier.tls={{{pair}}}",
            ]
        threading.Thread(target=release.forward, args=(listener, "broker", "grpc", faults.append), daemon=True).start()
        try:
            yield asking
        except PeerError as error:
            said = str(error).replace(f"at {address}", f"of {release}")
            raise type(error)("; ".join([said, *faults[-1:], *release.troubles()])) from error
        finally:
            listener.shutdown(socket.SHUT_RDWR)
    for trouble in release.troubles():
        say(trouble, err=as_json)


def logs(
    in_cluster: ClusterOption = False,
    namespace: NamespaceOption = "",
    release: ReleaseOption = "",
    tail: Annotated[int, typer.Option(min=1, help="the newest lines of each container")] = 100,
    as_json: JsonOption = False,
) -> None:
    """Print the logs of a release's pods in the order of time: time, service, pod, line."""
    if not in_cluster:
        raise WrongUse("give --cluster; the logs of a run on this machine are the files runs/NAME/logs/*.log")
    found = release_of(namespace, release)
    for line in merge(*found.logs(tail), key=lambda line: datetime.fromisoformat(line[0])):
        record = dict(zip(("time", "service", "pod", "line"), line, strict=True))
        say(json.dumps(record, ensure_ascii=False) if as_json else " ".join(line))
    for trouble in found.troubles():
        say(trouble, err=True)


def pages(
    in_cluster: ClusterOption = False,
    namespace: NamespaceOption = "",
    release: ReleaseOption = "",
    port: Annotated[int, typer.Option(min=0, max=65535, help="of 127.0.0.1; 0: any that is free")] = 8090,
) -> None:
    """Show the pages of a release's run at an address of this machine, until Ctrl-C."""
    if not in_cluster:
        raise WrongUse("give --cluster; a run on this machine serves its pages at run.pages, and says where")
    found = release_of(namespace, release)
    found.connect("run", "pages").close()
    try:
        listener = socket.create_server(("127.0.0.1", port))
    except OSError as error:
        raise Unusable(f"cannot listen on 127.0.0.1:{port}: {error.strerror}; name another --port") from error
    with listener:
        say(f"the pages of {found}: http://127.0.0.1:{listener.getsockname()[1]}/ (until Ctrl-C)")
        found.forward(listener, "run", "pages", partial(say, err=True))
