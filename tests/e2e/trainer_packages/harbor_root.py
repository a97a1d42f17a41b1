"""An environment of Harbor without Docker: a root of its own in a mount namespace. It needs root and `unshare`.

harbor run -e harbor_root:RootEnvironment. Of a Dockerfile it follows `WORKDIR` and `COPY . FOLDER`; the image is this
machine's /usr.
"""

from __future__ import annotations

import asyncio
import shlex
import shutil
import tempfile
from pathlib import Path
from typing import Any

from harbor.environments.base import BaseEnvironment, ExecResult

_MOUNTED = """set -e
for name in usr dev; do mount --rbind /$name {root}/$name; done
mount -t proc proc {root}/proc
exec chroot {root} /usr/bin/env -i {env} /bin/bash -c {command}
"""


class RootEnvironment(BaseEnvironment):  # type: ignore[misc]
    """See the module."""

    @staticmethod
    def type() -> str:
        """A name of our own."""
        return "root"

    def _validate_definition(self) -> None:
        self._dockerfile = (self.environment_dir / "Dockerfile").read_text()

    async def start(self, force_build: bool) -> None:
        """Make the root."""
        self._root = Path(tempfile.mkdtemp(prefix="harbor-root-"))
        self._root.chmod(0o755)
        for name in ("usr", "dev", "proc", "etc", "logs/verifier", "logs/agent", "logs/artifacts", "app"):
            (self._root / name).mkdir(parents=True)
        (self._root / "tmp").mkdir(mode=0o1777)
        (self._root / "tmp").chmod(0o1777)
        for name in ("bin", "lib", "lib64", "sbin"):
            (self._root / name).symlink_to(f"usr/{name}")
        (self._root / "etc/passwd").write_text("root:x:0:0::/:/bin/sh\nnobody:x:65534:65534::/:/bin/sh\n")
        for line in self._dockerfile.splitlines():
            if line.startswith("COPY . "):
                shutil.copytree(self.environment_dir, self._at(line.split()[2]), dirs_exist_ok=True)

    async def stop(self, delete: bool) -> None:
        """Remove the root."""
        shutil.rmtree(self._root)

    def _at(self, path: str) -> Path:
        return self._root / path.strip("/")

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        """Copy a file in."""
        self._at(target_path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source_path, self._at(target_path))

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        """Copy a folder in."""
        shutil.copytree(source_dir, self._at(target_dir), dirs_exist_ok=True)

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        """Copy a file out."""
        Path(target_path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(self._at(source_path), target_path)

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        """Copy a folder out."""
        shutil.copytree(self._at(source_dir), target_dir, dirs_exist_ok=True)

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        """Run a command inside."""
        variables = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/tmp", **(env or {})}
        script = _MOUNTED.format(
            root=shlex.quote(str(self._root)),
            env=" ".join(shlex.quote(f"{key}={value}") for key, value in variables.items()),
            command=shlex.quote(f"cd {shlex.quote(cwd or '/app')} && {command}"),
        )
        process: Any = await asyncio.create_subprocess_exec(
            "unshare",
            "--mount",
            "--pid",
            "--fork",
            "sh",
            "-c",
            script,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await asyncio.wait_for(process.communicate(), timeout_sec)
        return ExecResult(stdout=out.decode(), stderr=err.decode(), return_code=process.returncode)
