"""Sets whose tests are the end of a program: MultiPL-E and DS-1000.

MultiPL-E (nuprl/MultiPL-E): a row has name, language, prompt, tests and stop_tokens. The authors run prompt,
completion, a new line and tests as one program, which is right with exit code 0. Here the answer is a whole program
that begins with the prompt, so a `}` with which `tests` close the prompt's function is dropped. The tests print a token
at their end, so an answer that ends the program before them is wrong.

DS-1000 (xlang-ai/DS-1000): a row has prompt, reference_code, metadata and code_context. The answer takes the place of
[insert] in a program within `code_context`, whose functions `test_execution` and `test_string` judge it. They run the
answer beside the expected values, in one process. So an answer can find these, and a verdict is no safe reward.
"""

from __future__ import annotations

import ast

from nouscoder.data.importers.fields import Reason, Rejected, Row, decoded, imported_libraries, parsed_python, text
from nouscoder.data.importers.rows import Format
from nouscoder.data.problems import Reference, ReferencedProblem
from nouscoder.domain.problem import Problem
from nouscoder.domain.submission import TOKEN, AssertTests, CheckerTests, JudgeProgram, StdinCase, language_name

_LANGUAGES = {
    **{"cpp": "C++", "js": "JavaScript", "ts": "TypeScript", "rs": "Rust", "sh": "Bash"},
    **{"php": "PHP", "r": "R"},
}
_INSIDE = "the tests stand inside the class of the prompt, not after a whole program"
_REFUSED = {
    **{"java": f"{_INSIDE}, and the prompt imports org.javatuples", "cs": _INSIDE},
    **{"go": "`go test` runs the tests, not a program", "pl": "the tests need the module Test::Deep"},
    **{"rb": "the tests need the gem test-unit", "lua": "the tests need the module luaunit"},
}
_CLOSED = ("cpp", "rs", "sh")  # the tests of these begin with the `}` of the prompt's function
# An answer in PHP may end with ?>, after which the tests would be text; one in C++ or Rust may define the macros anew.
_BEGIN = {"php": "// ?><?php\n", "cpp": "#undef NDEBUG\n#include <assert.h>\n"}
_PRINTED = {  # what prints the token, behind the tests; in C++ and Rust at the end of their function main
    **{"cpp": f'std::cout << "\\n{TOKEN}" << std::endl;\n}}', "rs": f'::std::println!("\\n{TOKEN}");\n}}'},
    **dict.fromkeys(("js", "ts"), f'console.log("\\n{TOKEN}");'),
    **{"sh": f'echo; echo "{TOKEN}"', "php": f'echo "\\n{TOKEN}";', "r": f'cat("\\n{TOKEN}\\n")'},
}
_SETUP = {"cpp": "#include <assert.h>\n#include <bits/stdc++.h>"}


def read_multipl_e(row: Row, number: int) -> ReferencedProblem:
    """The problem of a row, without a reference. Raises Rejected for a language that is not supported."""
    name, tests = text(row, "language"), text(row, "tests")
    if name not in _LANGUAGES:
        raise Rejected(
            Reason.NOT_VERIFIABLE,
            f"rows in {name} cannot be graded: {_REFUSED.get(name, 'the verifier has no such language')}",
        )
    if tests.lstrip().startswith("}") is not (name in _CLOSED):
        raise Rejected(Reason.UNREADABLE_TESTS, f"tests in {name} of another form: {tests[:40]!r}")
    end = tests.strip().removeprefix("}")
    if name in ("cpp", "rs"):
        end = end.removesuffix("}").replace("assert_eq!(", "::std::assert_eq!(")
    end = f"{_BEGIN.get(name, '')}{end}\n{_PRINTED[name]}\n"
    problem = Problem(
        problem_id=f"{text(row, 'name')}-{name}",
        prompt=f"Complete this function in {_LANGUAGES[name]}. Answer with the whole program, without tests.",
        starter_code=text(row, "prompt"),
        tests=AssertTests((end,), _SETUP.get(name, "")),
        source="multipl-e",
        languages=(language_name(name),),
    )
    return ReferencedProblem(problem, names_languages=True)


# Accepts an answer when all of the program has run, by a token as in assert tests: an answer that ends the process is
# refused, and the module __main__ that it can import has neither the token nor the context.
_CHECKER = """
import os, sys, traceback, types
def judged(context, answer):
    read, write = os.pipe()
    token = os.urandom(16)
    child = os.fork()
    if child == 0:
        sys.modules["__main__"] = types.ModuleType("__main__")
        space = {"__name__": "__main__"}
        try:
            exec(compile(context, "<test>", "exec"), space)
            space["test_execution"](answer)
            if "test_string" in space:
                space["test_string"](answer)
            os.write(write, token)
        except BaseException:
            traceback.print_exc()
        sys.stderr.flush()
        os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    return os.read(read, 16) == token
sys.exit(not judged(*(open(name, encoding="utf-8").read() for name in sys.argv[1:3])))
"""


def read_ds1000(row: Row, number: int) -> ReferencedProblem:
    """The problem of a row. The libraries are what `code_context` and the programs in its texts import."""
    context, reference = text(row, "code_context"), text(row, "reference_code")
    body = parsed_python(context).body
    if not any(isinstance(node, ast.FunctionDef) and node.name == "test_execution" for node in body):
        raise Rejected(Reason.UNREADABLE_TESTS, "code_context has no test_execution")
    metadata = decoded(row.get("metadata") or {})
    known = metadata if isinstance(metadata, dict) else {}
    problem = Problem(
        problem_id=f"DS-1000/{known.get('problem_id', number)}",
        prompt=text(row, "prompt"),
        tests=CheckerTests((StdinCase(context, reference),), JudgeProgram(_CHECKER, "python"), of_code=True),
        source="ds-1000",
        family=str(known.get("library") or ""),
        libraries=_imported(context),
    )
    return ReferencedProblem(problem, (Reference(reference),))


def _imported(context: str) -> tuple[str, ...]:
    texts = [
        "\n".join(line for line in node.value.splitlines() if line.startswith(("import ", "from ")))
        for node in ast.walk(parsed_python(context))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "[insert]" in node.value
    ]
    return imported_libraries([context, *texts])


FORMATS = {
    "multipl-e": Format(read_multipl_e, "MultiPL-E in C++, JavaScript, TypeScript, Rust, Bash, PHP and R"),
    "ds1000": Format(read_ds1000, "DS-1000; needs its libraries where candidates run"),
}
