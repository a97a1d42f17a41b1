"""The calls to Modal: a thin layer over its client library, which is imported only when this backend is chosen.

A container is a Modal Sandbox that runs the agent (runner/agent.py) behind a TLS tunnel. It may receive connections
and open none. Its request of cores and memory is also its limit, because Modal bills the higher of request and use.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Awaitable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from nouscoder.config import ModalSection
from nouscoder.installation import how_to_install
from nouscoder.verifier.runner import handshake
from nouscoder.verifier.sandbox.base import SandboxUnavailable
from nouscoder.verifier.sandbox.runners.pool import RunnersUnreachable

GATEWAY_TAG, RUNNER_TAG = "nouscoder-gateway", "nouscoder-runner"
AGENT = ("python3", "-I", "-S", "/opt/nouscoder/runner/__main__.py")
KERNELS = {"gvisor": "gvisor", "vm": "linux"}  # by Modal's runtime
_CALL_LIMIT_S = 60.0
_LOGIN_LIMIT_S = 20.0
_IMAGE_LIMIT_S = 1800.0  # the first build of an image takes minutes

Answer = TypeVar("Answer")


class ContainerRefused(RunnersUnreachable):
    """Modal made no container: its limits of rate or capacity, or an invalid request."""


@dataclass(frozen=True, slots=True)
class Container:
    """A container that Modal has made. `address` is that of its TLS tunnel."""

    id: str
    address: tuple[str, int]


class ModalCloud:
    """One app of one Modal workspace. All calls are bounded in time and raise RunnersUnreachable."""

    def __init__(self, config: ModalSection) -> None:
        """Raises SandboxUnavailable when the package modal is missing."""
        try:
            self._modal = importlib.import_module("modal")
            self._errors = importlib.import_module("modal.exception")
        except ImportError as error:
            raise SandboxUnavailable(
                f"the modal sandbox needs the Python package modal: {how_to_install('modal')}"
            ) from error
        self._config = config
        self._client: Any = None
        self._app: Any = None
        self._image: Any = None
        self._sandboxes: dict[str, Any] = {}  # Modal's objects, by id

    async def open(self) -> None:
        """Log in, find or make the app, and build the image if Modal does not have it.

        Raises SandboxUnavailable as `log_in`, without a configured image, and for one that cannot be built, and
        RunnersUnreachable when Modal does not answer.
        """
        if not (self._config.image or self._config.dockerfile):
            raise SandboxUnavailable(
                "the modal sandbox needs verifier.sandbox.modal.image, the reference of the pushed sandbox image"
                " (make images), or verifier.sandbox.modal.dockerfile, which Modal then builds"
            )
        await self.log_in()
        looked_up = self._modal.App.lookup.aio(self._config.app, client=self._client, create_if_missing=True)
        try:
            self._app = await self._bounded(looked_up)
            self._image = await self._bounded(self._new_image().build.aio(self._app), _IMAGE_LIMIT_S)
        except RunnersUnreachable as error:
            if isinstance(error.__cause__, (self._errors.InvalidError, self._errors.RemoteError)):
                raise SandboxUnavailable(f"the modal sandbox cannot start: {error}") from error
            raise

    async def log_in(self) -> str:
        """Connect with the credentials of the environment or of Modal's file. Returns the address of the server.

        Raises SandboxUnavailable for missing or wrong credentials and when the server does not answer.
        """
        settings = self._modal.config.config
        token = (settings.get("token_id"), settings.get("token_secret"))
        if not all(token):
            raise SandboxUnavailable(
                "the modal sandbox has no credentials: set MODAL_TOKEN_ID and MODAL_TOKEN_SECRET, or run"
                " `modal token new`"
            )
        server = str(settings.get("server_url"))
        try:
            self._client = await self._bounded(self._modal.Client.from_credentials.aio(*token), _LOGIN_LIMIT_S)
            await self._bounded(self._client.hello.aio(), _LOGIN_LIMIT_S)
        except RunnersUnreachable as error:
            raise SandboxUnavailable(f"the modal sandbox cannot log in at {server}: {error}") from error
        return server

    def _new_image(self) -> Any:
        """The sandbox image with the agent's user, and without an entry point, because Modal adds its own arguments."""
        config, images = self._config, self._modal.Image
        secret = self._modal.Secret.from_name(config.registry_secret) if config.registry_secret else None
        if config.image:
            made = images.from_registry(config.image, secret=secret)
        else:
            made = images.from_dockerfile(Path(config.dockerfile), context_dir=Path.cwd(), registry_secret=secret)
        return made.dockerfile_commands("USER 0", "ENTRYPOINT []")

    async def create(self, gateway: str, runner: str, key_text: str, lifetime_s: int) -> Container:
        """Make a container that Modal ends after `lifetime_s`. Raises ContainerRefused.

        After any other RunnersUnreachable, and after a cancellation, the container may exist: see `running`.
        """
        config = self._config
        memory, cores = (config.memory_mib, config.memory_mib), (config.cores, config.cores)
        environment = {
            "NOUSCODER_RUNNER_KEY": key_text,
            "NOUSCODER_RUNNER_KERNEL": KERNELS[config.runtime],
            "NOUSCODER_RUNNER_TLS": "tunnel",
        }
        made = await self._bounded(
            self._modal.Sandbox.create.aio(
                *AGENT,
                app=self._app,
                client=self._client,
                image=self._image,
                tags={GATEWAY_TAG: gateway, RUNNER_TAG: runner},
                secrets=[self._modal.Secret.from_dict(environment)],
                timeout=lifetime_s,
                idle_timeout=min(int(config.idle_s), lifetime_s),
                runtime=config.runtime,
                cpu=cores,
                memory=memory,
                region=list(config.regions) or None,
                encrypted_ports=[handshake.DEFAULT_PORT],
                outbound_cidr_allowlist=[],
            ),
            config.start_s,
        )
        self._sandboxes[made.object_id] = made
        tunnels = await self._bounded(made.tunnels.aio(timeout=int(config.start_s)), config.start_s)
        if handshake.DEFAULT_PORT not in tunnels:
            raise RunnersUnreachable(f"Modal gave no tunnel to container {made.object_id}")
        return Container(made.object_id, tunnels[handshake.DEFAULT_PORT].tls_socket)

    async def running(self, gateway: str) -> frozenset[str]:
        """The ids of the running containers that `gateway` has made."""
        return await self._bounded(self._list(gateway))

    async def _list(self, gateway: str) -> frozenset[str]:
        found = {}
        listed = self._modal.Sandbox.list.aio(app_id=self._app.app_id, tags={GATEWAY_TAG: gateway}, client=self._client)
        async for sandbox in listed:
            found[str(sandbox.object_id)] = sandbox
        self._sandboxes = {**found, **{id_: one for id_, one in self._sandboxes.items() if id_ in found}}
        return frozenset(found)

    async def runner_of(self, container_id: str) -> str:
        """The name of the runner for which a container was made."""
        tags = await self._bounded((await self._sandbox(container_id)).get_tags.aio())
        return str(tags.get(RUNNER_TAG, ""))

    async def terminate(self, container_id: str) -> None:
        """End a container. It is no error if it has ended."""
        try:
            await self._bounded((await self._sandbox(container_id)).terminate.aio())
        except RunnersUnreachable as error:
            if not isinstance(error.__cause__, self._errors.NotFoundError):
                raise
        self._sandboxes.pop(container_id, None)

    async def _sandbox(self, container_id: str) -> Any:
        known = self._sandboxes.get(container_id)
        if known is not None:
            return known
        return await self._bounded(self._modal.Sandbox.from_id.aio(container_id, client=self._client))

    async def close(self) -> None:
        """Close the connection to Modal."""
        if self._client is not None:
            client, self._client = self._client, None
            await self._bounded(client.close.aio())

    async def _bounded(self, call: Awaitable[Answer], limit_s: float = _CALL_LIMIT_S) -> Answer:
        try:
            async with asyncio.timeout(limit_s):
                return await call
        except self._errors.ResourceExhaustedError as error:
            raise ContainerRefused(f"Modal refuses for now: {error}"[:300]) from error
        except TimeoutError as error:
            raise RunnersUnreachable(f"Modal did not answer within {limit_s:.0f} s") from error
        except (self._errors.Error, OSError) as error:
            raise RunnersUnreachable(f"Modal does not do it: {type(error).__name__}: {error}"[:300]) from error
