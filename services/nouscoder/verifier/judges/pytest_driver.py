"""Runs one test function of a file with pytest, in the process of the code. The service never imports this file.

A sandbox runs the text below the code (judges/asserting.py), so it may not change what the code sees: there is one
function, and all else is inside. The service knows that a test has ended by a wrapper around the function itself,
because the code could replace any part of pytest while it is called. The code could also have changed pytest before:
so pytest is imported anew here, from folders that the code cannot write, and the file of tests stays in memory.
"""


def __nouscoder_case__(case: str, token: str, text: str) -> object:  # noqa: N807
    """`[token, true]` when each item of the test has ended without an error, else false.

    Raises what a test raised that was no failed assertion.
    """
    import importlib.machinery as machinery
    import os
    import sys

    packages = ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments", "py")
    for name in [*sys.modules]:
        if name.partition(".")[0] in packages:
            del sys.modules[name]
    for name in [*os.environ]:
        if name.startswith(("PYTEST", "PY_COLORS")):
            del os.environ[name]
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    sys.meta_path[:] = [machinery.BuiltinImporter, machinery.FrozenImporter, machinery.PathFinder]
    sys.path[:] = [folder for folder in sys.path if folder.startswith("/") and not folder.startswith("/tmp")]
    sys.path_importer_cache.clear()

    import ast
    import asyncio
    import contextlib
    import functools
    import inspect
    import linecache
    import pathlib
    import types
    from collections.abc import Iterator

    import pytest
    from _pytest.assertion.rewrite import rewrite_asserts

    sys.path.append("/tmp")  # for further source files of the submission; last, so that they replace nothing
    path = "/tmp/test_file.py"
    linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)
    *owners, wanted = case.split("::")
    ended: list[bool] = []  # of each call of the test
    errors: list[BaseException] = []

    def watched(test: object) -> object:
        """The test function, which notes how each of its calls ends."""

        @functools.wraps(test)  # type: ignore[arg-type]
        def call(*args: object, **fields: object) -> None:
            try:
                value = test(*args, **fields)  # type: ignore[operator]
                if inspect.iscoroutine(value):
                    value = asyncio.run(value)
                if value is not None:
                    raise TypeError(f"the test returned a value: {type(value).__name__}")
            except BaseException as error:
                errors.append(error)
                raise
            ended.append(True)

        return call

    class File(pytest.Module):
        """The file of tests, with the wanted test watched."""

        def _getobj(self) -> types.ModuleType:
            made = types.ModuleType("test_file")
            made.__file__ = path
            sys.modules["test_file"] = made
            tree = ast.parse(text)
            rewrite_asserts(tree, text.encode(), path, self.config)
            exec(compile(tree, path, "exec", dont_inherit=True), made.__dict__)  # noqa: S102
            owner = functools.reduce(getattr, owners, made)
            setattr(owner, wanted, watched(getattr(owner, wanted)))
            return made

    class WantedItems:
        """Collects the items of the wanted test only."""

        num_items = 0

        @pytest.hookimpl(tryfirst=True)
        def pytest_collection(self, session: pytest.Session) -> bool:
            for item in session.genitems(File.from_parent(session, path=pathlib.Path(path))):
                above = [node.name for node in item.listchain() if isinstance(node, pytest.Class)]
                if getattr(item, "originalname", item.name) == wanted and above == owners:
                    session.items.append(item)
                    self.num_items += 1
            session.testscollected = self.num_items
            return True

    def arguments() -> Iterator[str]:
        yield from ("-q", "--tb=short", "--no-header", "--color=no", "--capture=sys", "--noconftest")
        yield from ("-c", "/dev/null", "--rootdir=/tmp", "--disable-warnings")
        for plugin in ("cacheprovider", "faulthandler", "doctest", "junitxml", "pastebin", "stepwise"):
            yield from ("-p", f"no:{plugin}")

    names, program = globals()["names"], globals()["program"]

    class Answer(types.ModuleType):
        """The module of the code, without what the prelude brought."""

        def __getattribute__(self, name: str) -> object:
            if names.is_brought(name):
                raise AttributeError(f"the code has no {name}")
            if name == "__all__" and name not in program:  # for a star import
                return [each for each in program if each[:1] != "_" and not names.is_brought(each)]
            return super().__getattribute__(name)

    sys.modules["__main__"].__class__ = Answer
    choice = WantedItems()
    with contextlib.redirect_stdout(sys.stderr):
        status = pytest.main([*arguments()], plugins=[choice])
    if status == 0 and 0 < choice.num_items == len(ended) and not errors:
        return [token, True]
    is_skipped = status == 0 and choice.num_items > 0 and not errors
    if is_skipped or (errors and all(isinstance(error, (AssertionError, pytest.fail.Exception)) for error in errors)):
        return False
    raise SystemExit(1)
