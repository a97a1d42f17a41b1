"""MultiPL-E and DS-1000: tests that are the end of a program, judged in real sandboxes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tests.services.test_data_import import jsonl, verdicts

from nouscoder.data.importers.run import CannotImport, import_files
from nouscoder.data.problem_parquet import read_parquet
from nouscoder.domain.submission import AssertTests

CPP_TESTS = "}\nint main() {\n    auto candidate = add_one;\n    assert(candidate((3)) == (4));\n}\n"
JS_TESTS = (
    "const assert = require('node:assert');\n\n\nfunction test() {\n  let candidate = add_one;\n"
    "  assert.deepEqual(candidate(3),4);\n}\n\ntest();"
)
TS_TESTS = f"declare var require: any;\n{JS_TESTS}"
RS_TESTS = "}\n\nfn main() {\n    let candidate = add_one;\n    assert_eq!(candidate(3), 4);\n}\n"
SH_TESTS = (
    '}\n\ncandidate() {\n    add_one "$@"\n}\n\nset -e\nrun_test() {\n    [[ $(candidate "3") = "4" ]]\n}\n\nrun_test'
)
PHP_TESTS = (
    "function candidate(...$args) {\n    return add_one(...$args);\n}\n\nfunction test(): void {\n"
    '    if (candidate(3) !== 4) { throw new Exception("Test failed!"); }\n}\n\ntest();'
)
R_TESTS = (
    "test_humaneval <- function() {\n    candidate <- add_one\n    stopifnot(isTRUE(all.equal(candidate(3), 4)))\n}\n"
    "test_humaneval()"
)
EXIT_RS = "    std::process::exit(n as i32 * 0)\n}"
LANGUAGES = [
    ("cpp", "g++", "#include<assert.h>\nlong add_one(long n) {\n", "  return n + 1;\n}", CPP_TESTS, "  exit(0);\n}"),
    ("js", "node", "//Adds one.\nfunction add_one(n){\n", "  return n + 1;\n}", JS_TESTS, "}\nprocess.exit(0);"),
    (
        "ts",
        "tsc",
        "//Adds one.\nfunction add_one(n: number): number {\n",
        "  return n + 1;\n}",
        TS_TESTS,
        "  return 0;\n}\nprocess.exit(0);",
    ),
    ("rs", "rustc", "/// Adds one.\nfn add_one(n: isize) -> isize {\n", "    n + 1\n}", RS_TESTS, EXIT_RS),
    ("sh", "bash", "#!/bin/bash\nadd_one() {\n", "  echo $(($1 + 1))\n}", SH_TESTS, "  :\n}\nexit 0"),
    (
        "php",
        "php",
        "<?php\n// Adds one.\nfunction add_one($n) {\n",
        "  return ctype_digit('1') ? $n + 1 : 0;\n}\n?>",
        PHP_TESTS,
        "}\nexit(0);",
    ),
    ("r", "Rscript", "# Adds one.\nadd_one <- function(n) {", "  n + 1\n}", R_TESTS, "}\nquit('no', 0)"),
]
# Programs that are wrong, and whose tests pass by what these define anew.
DISARMED = {
    "cpp": "  return 0;\n}\n#define NDEBUG\n#include <cassert>",
    "rs": "    0\n}\nmacro_rules! assert_eq { ($($t:tt)*) => {} }",
    "sh": "  :\n}\ncat <<EOF\n",  # the tests are printed
}


@pytest.mark.parametrize(("language", "compiler", "prompt", "rest", "tests", "early"), LANGUAGES)
def test_a_multipl_e_row_is_judged_by_the_end_of_the_whole_program(
    tmp_path: Path, language: str, compiler: str, prompt: str, rest: str, tests: str, early: str
) -> None:
    """An answer that ends the program before the tests is wrong; the authors accept it."""
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed")
    row = {"name": "HumanEval_x", "language": language, "prompt": prompt, "tests": tests, "stop_tokens": ["\n}"]}
    java = row | {"language": "java", "tests": "    }\n    public static void main(String[] args) {\n    }\n\n}\n"}
    data = jsonl(tmp_path / "data.jsonl", row, java)
    summary = import_files("multipl-e", [data], tmp_path / "kattis.parquet")
    assert (summary.problems, summary.rejected) == (1, {"not_verifiable": 1})
    cheats = (prompt + early, prompt + DISARMED.get(language, early))
    programs = (prompt + rest, prompt + rest.replace("+ 1", "+ 2"), prompt, *cheats)
    right, wrong, open_ended, *cheated = verdicts(tmp_path, f"HumanEval_x-{language}", *programs)
    assert right == "accepted"
    assert {wrong, *cheated} <= {"runtime_error", "wrong_answer"}, cheated
    assert open_ended in ("compile_error", "runtime_error")


@pytest.mark.parametrize("name", ["java", "cs", "go", "pl", "rb", "lua", "jl", "scala", "swift", "d", "rkt", "hs"])
def test_a_language_of_multipl_e_is_refused_with_its_own_reason(tmp_path: Path, name: str) -> None:
    row = {"name": "HumanEval_x", "language": name, "prompt": "x", "tests": "y"}
    with pytest.raises(CannotImport):
        import_files("multipl-e", [jsonl(tmp_path / "data.jsonl", row)], tmp_path / "out.parquet")
    (line,) = (tmp_path / "out.parquet.rejected.jsonl").read_text().splitlines()
    assert f"rows in {name} cannot be graded: " in line
    assert ("no such language" in line) is (name in {"jl", "scala", "swift", "d", "rkt", "hs"})


def test_an_answer_in_php_that_closes_its_tag_is_still_tested(tmp_path: Path) -> None:
    """After ?> the tests would be text, and any answer right."""
    row = {"name": "x", "language": "php", "prompt": "<?php\nfunction add_one($n) {\n", "tests": PHP_TESTS}
    import_files("multipl-e", [jsonl(tmp_path / "data.jsonl", row)], tmp_path / "out.parquet")
    (item,) = read_parquet(tmp_path / "out.parquet")
    assert isinstance(item.problem.tests, AssertTests)
    assert item.problem.tests.cases[0].startswith("// ?><?php\nfunction candidate")


CONTEXT = '''
import copy, tokenize, io
def generate_test_case(test_case_id):
    return [3, 1, 2], [1, 2, 3]
def exec_test(result, ans):
    assert result == ans
    return 1
exec_context = r"""
import json
a = test_input
[insert]
"""
def test_execution(solution: str):
    code = exec_context.replace("[insert]", solution)
    test_input, expected_result = generate_test_case(1)
    test_env = {"test_input": test_input}
    exec(code, test_env)
    assert exec_test(test_env["result"], expected_result)
def test_string(solution: str):
    assert "for" not in [t.string for t in tokenize.tokenize(io.BytesIO(solution.encode("utf-8")).readline)]
'''


def test_a_ds1000_row_is_judged_by_its_code_context(tmp_path: Path) -> None:
    """The answer takes the place of [insert]; `test_string` refuses words; ending the process is no way out."""
    row = {
        "prompt": "Sort it.",
        "reference_code": "result = sorted(a)",
        "metadata": {"problem_id": 7, "library": "Pandas"},
        "code_context": CONTEXT,
    }
    other = row | {"code_context": CONTEXT.replace("import json", "import pandas as pd\nfrom sklearn.svm import SVC")}
    data = jsonl(tmp_path / "data.jsonl", row, other | {"metadata": {"problem_id": 8}})
    import_files("ds1000", [data], tmp_path / "kattis.parquet")
    first, second = read_parquet(tmp_path / "kattis.parquet")
    assert (first.problem.libraries, second.problem.libraries) == ((), ("pandas", "sklearn"))
    programs = (
        *("result = sorted(a)", "result = a", "result = sorted(x for x in a)"),
        *("import os; os._exit(0)", "raise SystemExit(0)", "result = ("),
        "import __main__ as m, os; os.write(m.write, m.token); os._exit(0)",
        "import __main__ as m; m.exec_test = lambda *_: 1; result = 0",
        "import os\nfor fd in range(3, 20):\n    try: os.write(fd, bytes(16))\n    except OSError: pass\nos._exit(0)",
        "import os, signal; os.kill(os.getppid(), signal.SIGKILL)",
    )
    assert verdicts(tmp_path, "DS-1000/7", *programs) == ["accepted", *["wrong_answer"] * 9]
