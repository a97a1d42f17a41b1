"""The languages of a run's problems, and those that its verifier has.

A problem whose answer may be in a language that the verifier lacks is left out: each such answer could not be graded.
A local run knows the languages before it starts. Then `problems.languages` of its configuration names those that it
has, and broker and evaluation leave the other problems out. Pods and external verifiers are asked when they run, and a
run with problems that they cannot grade is refused, with the value of `problems.languages` that leaves them out.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from nouscoder.config import Config
from nouscoder.data.check import library_fault
from nouscoder.data.problem_index import all_held_out, has_index, in_languages, open_index
from nouscoder.errors import Unusable
from nouscoder.rpc.channel import PeerError
from nouscoder.rpc.tls import channel_credentials
from nouscoder.rpc.verifier_client import VerifierClient, verifier_token
from nouscoder.verifier.toolchains.languages import ON_THIS_MACHINE, installed


@dataclass(frozen=True, slots=True)
class _Asked:
    """A set of problems: its name in messages, how many it has, and the languages of those not for Python alone.

    `libraries` counts the problems that need these libraries, joined by commas.
    """

    what: str
    num_problems: int
    languages: Mapping[str, tuple[str, ...]]
    libraries: Mapping[str, int]

    def others(self, languages: Collection[str]) -> list[tuple[str, ...]]:
        """The languages of the problems that allow one which is none of these."""
        return [own for own in self.languages.values() if not set(own) <= set(languages)]


def grades_here(config: Config) -> bool:
    """Whether the run's candidates have the languages of this machine."""
    sandbox = config.verifier.sandbox
    backends = {sandbox.backend, sandbox.spill_over.backend or sandbox.backend}
    return config.run.services == "local" and backends <= {*ON_THIS_MACHINE}


def with_languages(config: Config) -> Config:
    """With `problems.languages` set where this machine lacks one and none was given. Raises what reading raises."""
    if config.problems.languages or not grades_here(config):
        return config
    needed = {language for asked in _asked(config) for own in asked.languages.values() for language in own}
    if needed <= set(installed()):
        return config
    kept = tuple(sorted({"python", *needed & set(installed())}))
    return config.changed(problems={"languages": kept})


def missing_here(config: Config) -> str:
    """The languages of `problems.languages` that problems need and this machine lacks. Empty: none."""
    if not grades_here(config):
        return ""
    needed = {language for asked in _asked(config) for own in asked.languages.values() for language in own}
    return ", ".join(sorted(needed & set(config.problems.languages) - set(installed())))


def left_out_sentences(config: Config) -> list[str]:
    """How many problems are left out because of their languages, one sentence for each file."""
    has = config.problems.languages
    whole = config.changed(problems={"languages": ()})
    found = [(asked, asked.others(has)) for asked in _asked(whole)] if has else []
    return [_sentence(asked, others, has) for asked, others in found if others]


def _sentence(asked: _Asked, others: Sequence[tuple[str, ...]], has: Sequence[str]) -> str:
    lacking = sorted({language for own in others for language in own} - set(has))
    return (
        f"{len(others)} of {asked.num_problems} {asked.what} are left out: they allow {', '.join(lacking)}, and"
        f" problems.languages is {', '.join(has)}"
    )


async def require_languages(config: Config) -> None:
    """Raises Unusable when the running verifier lacks a language or library of the problems not left out."""
    found = await asyncio.to_thread(_asked, config)
    if not any(asked.languages or asked.libraries for asked in found):
        return
    client = VerifierClient(
        config.verifier.grpc, credentials=channel_credentials(config.tls), token=verifier_token(config)
    )
    async with client as verifier:
        has = await verifier.languages()
        for asked in found:
            of = f"{asked.num_problems} {asked.what}"
            if fault := await library_fault(verifier.grade, asked.libraries, of, PeerError):
                raise Unusable(fault)
    for asked in found:
        if others := asked.others(has):
            needed = {language for own in asked.languages.values() for language in own} | {"python"}
            lacking = ", ".join(sorted(needed - set(has)))
            kept = ", ".join(f'"{language}"' for language in sorted(needed & set(has)))
            raise Unusable(
                f"the verifier lacks {lacking}, in which {len(others)} of {asked.num_problems} {asked.what} may be"
                f" answered: install it where candidates run, or leave them out with problems.languages = [{kept}]"
            )


def _asked(config: Config) -> list[_Asked]:
    """The problems of a run that are not left out because of their languages, of the files that this process sees.

    The broker of external services builds the index of the training problems, perhaps where only it sees it.
    """
    train, held_out = (config.in_run_folder(file) for file in (config.problems.train, config.problems.held_out))
    measured_from = train if config.problems.held_out_share else held_out
    if config.evaluation.problems:
        measured_from = Path(config.evaluation.problems)
    found = []
    if train.is_file() and (config.run.services == "local" or has_index(config)):
        with closing(open_index(config)) as index:
            names = {*index.problem_ids, *index.left_out}
            languages = {name: own for name, own in index.languages.items() if name in names}
            libraries = Counter(own for name, own in index.libraries().items() if name in names)
            found.append(_Asked("training problems", len(names), languages, libraries))
    if measured_from.is_file():
        measured = in_languages(config, all_held_out(config))
        languages = {one.problem_id: one.languages for one in measured if one.languages != ("python",)}
        libraries = Counter(",".join(one.libraries) for one in measured if one.libraries)
        found.append(_Asked("held-out problems", len(measured), languages, libraries))
    return found
