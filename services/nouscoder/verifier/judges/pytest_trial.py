"""Collects a file of tests for pytest without a program: the faults that it has then are its own.

A sandbox runs the text below (grading/setups.py). The service never imports this file.
"""


def __nouscoder_trial__(module: str, cases: list[str], text: str) -> "tuple[int, str] | None":  # noqa: N807
    """The first fault: 0 and the file's, or the number of a case, from 1, and its own. None where nothing is certain.

    The program's module has every name. What else fails may be no fault beside a real program, and is not told.
    """
    import functools
    import os
    import pathlib
    import sys
    import types

    import pytest

    class Anything:
        """What the program could have."""

        def __init__(self, *args: object, **fields: object) -> None:
            pass

        def __getattr__(self, name: str) -> object:
            if name[:2] == "__":
                raise AttributeError(name)
            return Anything()

        def __call__(self, *args: object, **fields: object) -> object:
            return Anything()

    program = types.ModuleType(module)
    program.__getattr__ = Anything().__getattr__  # type: ignore[method-assign]
    sys.modules[module] = program
    sys.path.append("/tmp")  # further source files of the submission
    path = "/tmp/test_file.py"
    faults: list[tuple[int, str]] = []

    class File(pytest.Module):
        """The file of tests."""

        def _getobj(self) -> types.ModuleType:
            made = types.ModuleType("test_file")
            made.__file__ = path
            sys.modules["test_file"] = made
            exec(compile(text, path, "exec", dont_inherit=True), made.__dict__)  # noqa: S102
            return made

    def missing_fixture(item: pytest.Function) -> str:
        given = {"request", *(item.callspec.params if hasattr(item, "callspec") else ())}
        found = item._fixtureinfo.name2fixturedefs
        return next((name for name in item.fixturenames if name not in found and name not in given), "")

    class Collector:
        @pytest.hookimpl(tryfirst=True)
        def pytest_collection(self, session: pytest.Session) -> bool:
            file = File.from_parent(session, path=pathlib.Path(path))
            try:
                made = file.obj
            except ImportError as error:
                if error.name is not None and error.name.partition(".")[0] != module:
                    faults.append((0, str(error)))
                return True
            except pytest.skip.Exception as skipped:
                if str(skipped).startswith("could not import"):
                    faults.append((0, str(skipped)))
                return True
            for number, case in enumerate(cases, 1):
                try:
                    functools.reduce(getattr, case.split("::"), made)
                except AttributeError:
                    faults.append((number, f"the file has no {case}"))
            for item in session.genitems(file):
                if isinstance(item, pytest.Function) and (name := missing_fixture(item)):
                    owners = [node.name for node in item.listchain() if isinstance(node, pytest.Class)]
                    case = "::".join([*owners, item.originalname])
                    faults.extend((number, f"there is no fixture {name}") for number in _places(cases, case))
            return True

    def _places(cases: list[str], case: str) -> list[int]:
        return [number for number, each in enumerate(cases, 1) if each == case]

    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    arguments = ["-q", "--noconftest", "-c", "/dev/null", "--rootdir=/tmp", "--disable-warnings"]
    for plugin in ("cacheprovider", "faulthandler", "doctest", "junitxml", "pastebin", "stepwise"):
        arguments += ["-p", f"no:{plugin}"]
    pytest.main(arguments, plugins=[Collector()])
    return min(faults, default=None)
