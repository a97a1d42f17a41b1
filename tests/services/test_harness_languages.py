"""Languages that run by exec: compiled once, then one fresh process per test, in a clean folder, program read-only."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from nouscoder.config import SandboxSection
from nouscoder.domain.submission import Limits
from nouscoder.verifier.sandbox import (
    CompileFailed,
    CompileStarved,
    Exit,
    Program,
    RunResult,
    Sandbox,
    SandboxUnavailable,
    open_sandbox,
)
from nouscoder.verifier.toolchains.languages import installed, registry

pytestmark = pytest.mark.asyncio(loop_scope="module")
LIMITS = Limits(wall_time_s=60, cpu_time_s=30, memory_bytes=256 << 20, output_bytes=1 << 20, processes=64)

ECHO = {  # prints its input doubled, then its arguments
    "c": '#include <stdio.h>\nint main(int c, char **v) { int n; scanf("%d", &n); printf("%d", n * 2);'
    ' for (int i = 1; i < c; i++) printf(" %s", v[i]); puts(""); }',
    "cpp": "#include <iostream>\nint main(int c, char **v) { int n; std::cin >> n; std::cout << n * 2;"
    " for (int i = 1; i < c; i++) std::cout << ' ' << v[i]; std::cout << std::endl; }",
    "java": "import java.util.*;\npublic class Main { record P(int x) {}\n public static void main(String[] a) {"
    " P p = new P(new Scanner(System.in).nextInt() * 2); System.out.print(p.x());"
    ' for (String s : a) System.out.print(" " + s); System.out.println(); } }',
    "javascript": "const n = parseInt(require('fs').readFileSync(0, 'utf8'));"
    " console.log([n * 2, ...process.argv.slice(2)].join(' '))",
    "rust": "use std::io::Read;\n"
    "fn main() { let mut s = String::new();"
    " std::io::stdin().read_to_string(&mut s).unwrap();"
    ' print!("{}", s.trim().parse::<i64>().unwrap() * 2); for a in std::env::args().skip(1) { print!(" {}", a); }'
    " println!(); }",
    "pypy": "import sys\nprint(int(input()) * 2, *sys.argv[1:])",
    "go": 'package main\nimport ("fmt"; "os")\nfunc main() { var n int; fmt.Scan(&n); fmt.Print(n * 2);'
    ' for _, a := range os.Args[1:] { fmt.Print(" ", a) }; fmt.Println() }',
    "typescript": "import * as fs from 'fs';\nconst n: number = parseInt(fs.readFileSync(0, 'utf8'));\n"
    "console.log([n * 2, ...process.argv.slice(2)].join(' '))",
    "bash": 'read -r n; printf "%s" $((n * 2)); for a in "$@"; do printf " %s" "$a"; done; echo',
    "perl": "use strict; my $n = <STDIN>; print join(' ', $n * 2, @ARGV), qq(\n);",
    "ruby": "puts [$stdin.gets.to_i * 2, *ARGV].join(' ')",
    "lua": 'local n = io.read("n"); print(table.concat({tostring(n * 2), table.unpack(arg)}, " "))',
    "php": "<?php $n = (int)fgets(STDIN); echo implode(' ', array_merge([$n * 2], array_slice($argv, 1))), PHP_EOL;",
    "r": 'n <- as.integer(readLines(file("stdin"), 1)); cat(c(n * 2, commandArgs(TRUE))); cat("\\n")',
    "kotlin": 'fun main(args: Array<String>) { println((listOf(readLine()!!.toInt() * 2) + args).joinToString(" ")) }',
    "csharp": "using System;\nclass P { static void Main(string[] a) { int n = int.Parse(Console.ReadLine());"
    ' Console.Write(n * 2); foreach (var s in a) Console.Write(" " + s); Console.WriteLine(); } }',
}
# Go compiles its library when it is first used, which takes a minute on a busy machine.
LANGUAGES = [pytest.param(one, marks=pytest.mark.heavy if one == "go" else ()) for one in ECHO]


async def test_every_language_has_a_program_here() -> None:
    assert {*ECHO, "python"} == set(registry())


async def opened(config: SandboxSection) -> AsyncIterator[Sandbox]:
    made = open_sandbox(config)
    try:
        await made.start()
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    yield made
    await made.close()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def sandbox() -> AsyncIterator[Sandbox]:
    async for made in opened(SandboxSection(slots=1, compile_time_s=120)):
        yield made


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def impatient() -> AsyncIterator[Sandbox]:
    """A sandbox with a compile limit of 3 s."""
    async for made in opened(SandboxSection(slots=1, compile_time_s=3)):
        yield made


def program(language: str, code: str, limits: Limits = LIMITS) -> Program:
    if language not in installed():
        pytest.skip(f"no {language} here")
    return Program(installed()[language], code, limits)


async def run_twice(sandbox: Sandbox, code: str, language: str = "c") -> RunResult:
    async with sandbox.session(program(language, code)) as session:
        first, second = await session.run(b"1\n"), await session.run(b"1\n")
    assert (first.exit, first.exit_code, first.signal) == (second.exit, second.exit_code, second.signal)
    return second


async def compile_failure(sandbox: Sandbox, code: str) -> CompileFailed:
    """Why the code does not compile. A compiler that lacked a CPU is started again, as the grader does."""
    for _ in range(10):
        try:
            await run_twice(sandbox, code)
        except CompileFailed as failed:
            return failed
        except CompileStarved:
            continue
        raise AssertionError("the code compiled")
    raise AssertionError("the compiler never had a CPU")


# What compilers make, and its folders: as files of the program, and of a run.
NAMES = ("main", "main-class", "Main.class", "main.js", "main.jar", "main.exe")
NAMES_OF_RUN = ("P.class", "main.a", "made", "source", "Main$P.class")


@pytest.mark.parametrize("language", LANGUAGES)
async def test_a_users_file_may_have_the_name_of_anything_that_is_compiled(sandbox: Sandbox, language: str) -> None:
    """Before, a file of a run ended with the service's own error, and one of the program had the compiler's bytes."""
    asked = program(language, ECHO[language])
    files = {name: name.encode() for name in NAMES if name != asked.language.source_name}
    of_run = {name: name.encode() for name in NAMES_OF_RUN}
    asked = replace(asked, files=files, fetch=tuple(of_run))
    async with sandbox.session(asked) as session:
        for _ in range(2):
            result = await session.run(b"21\n", files=of_run)
            assert (result.exit_code, result.stdout, result.stderr) == (0, b"42\n", b"")
            assert result.files == of_run


@pytest.mark.parametrize("language", ["java", "javascript", "typescript"])
async def test_further_source_files_are_found(sandbox: Sandbox, language: str) -> None:
    files = {
        "java": ("Other.java", "class Other { static int value = 7; }"),
        "javascript": ("other.js", "exports.value = 7"),
        "typescript": ("other.js", "exports.value = 7"),
    }
    code = {
        "java": "public class Named { public static void main(String[] a) { System.out.println(Other.value); } }",
        "javascript": "console.log(require('./other').value)",
        "typescript": "const other: any = require('./other'); console.log(other.value)",
    }
    name, text = files[language]
    async with sandbox.session(replace(program(language, code[language]), files={name: text.encode()})) as session:
        result = await session.run(b"")
        assert (result.stdout, result.stderr) == (b"7\n", b"")


@pytest.mark.parametrize("language", LANGUAGES)
async def test_each_language_reads_prints_and_takes_arguments(sandbox: Sandbox, language: str) -> None:
    async with sandbox.session(program(language, ECHO[language])) as session:
        for number, args in ((1, ()), (2, ("a", "b c")), (3, ())):
            result = await session.run(b"%d\n" % number, args=args)
            wanted = " ".join((str(number * 2), *args)).encode() + b"\n"
            assert (result.exit, result.exit_code, result.stdout) == (Exit.EXITED, 0, wanted), result.stderr.decode()


OPENS_ITS_STREAMS = {  # by their paths in /dev; prints its input
    "cpp": '#include <cstdio>\nint main() { int n; if (!freopen("/dev/stdin", "r", stdin)) return 1;'
    ' if (!freopen("/dev/stdout", "w", stdout)) return 2; if (!freopen("/dev/stderr", "w", stderr)) return 3;'
    ' scanf("%d", &n); printf("%d\\n", n); }',
    "javascript": "const fs = require('fs'); const text = fs.readFileSync('/dev/stdin');"
    " fs.writeFileSync('/dev/stderr', 'noise'); fs.writeFileSync('/dev/stdout', text)",
}


@pytest.mark.parametrize("language", OPENS_ITS_STREAMS)
async def test_a_program_can_open_its_streams_by_path(sandbox: Sandbox, language: str) -> None:
    async with sandbox.session(program(language, OPENS_ITS_STREAMS[language])) as session:
        for number in range(2):
            result = await session.run(b"%d\n" % number)
            assert (result.exit_code, result.stdout) == (0, b"%d\n" % number), result.stderr.decode()


NOT_COMPILED = [  # and a part of the message
    ("c", "int main( {", b"error"),
    ("cpp", "int main() { return undeclared; }", b"undeclared"),
    ("java", "public class Main { int f() { return x; } }", b"cannot find symbol"),
    ("javascript", "let let = 1 +;", b"SyntaxError"),
    ("typescript", "let x: number = ;", b"main.ts(1,17): error TS1109"),
    ("bash", "if true; then", b"syntax error"),
    ("perl", "my $x = ;", b"syntax error"),
    ("ruby", "def f(", b"syntax error"),
    ("lua", "x = = 1", b"unexpected symbol"),
    ("php", "<?php $x = ;", b"syntax error"),
    ("r", "x <- (", b"unexpected end of input"),
    ("kotlin", "fun main() { x }", b"unresolved reference"),
    ("csharp", "class P { static void Main() { x; } }", b"error CS"),
    ("rust", "fn main() { x }", b"cannot find value"),
]


@pytest.mark.parametrize(("language", "code", "said"), NOT_COMPILED)
async def test_code_that_does_not_compile_has_a_message(
    sandbox: Sandbox, language: str, code: str, said: bytes
) -> None:
    with pytest.raises(CompileFailed) as caught:
        async with sandbox.session(program(language, code)):
            pytest.fail("the session must not open")
    assert said.decode() in caught.value.detail
    assert len(caught.value.detail) <= 2000


_PRINTS = 'public static void main(String[] a) { System.out.println("ok"); }'


@pytest.mark.parametrize(
    "code",
    [
        f"// public class Wrong\npublic class Other {{ {_PRINTS} }}",
        f"package some.where;\npublic class Other {{ {_PRINTS} }}",
        f"class Helper {{ }}\nclass Other {{ {_PRINTS} }}",
        "public class Other { public static void main(String[] a) { try { assert a.length > 0; }"
        ' catch (AssertionError e) { System.out.println("ok"); } } }',
    ],
    ids=["public class", "package", "no public class", "asserts are on"],
)
async def test_java_runs_the_class_that_has_main(sandbox: Sandbox, code: str) -> None:
    wide = Limits(wall_time_s=60, cpu_time_s=60)
    async with sandbox.session(program("java", code, wide)) as session:
        result = await session.run(b"")
        assert result.stdout == b"ok\n", result.stderr.decode()


async def test_java_collects_garbage_within_a_small_memory_limit(sandbox: Sandbox) -> None:
    code = (
        "public class Main { static byte[] kept; public static void main(String[] a) {"
        ' for (int i = 0; i < 512; i++) kept = new byte[1 << 20]; System.out.println("ok"); } }'
    )
    small = Limits(wall_time_s=60, cpu_time_s=60, memory_bytes=96 << 20)
    async with sandbox.session(program("java", code, small)) as session:
        result = await session.run(b"")
    assert (result.exit, result.stdout) == (Exit.EXITED, b"ok\n"), result.stderr.decode()


@pytest.mark.parametrize(
    ("language", "code"),
    [
        ("java", "public class Other { static int f() { return 1; } }"),
        ("go", "package other\nfunc main() { }"),
    ],
)
async def test_a_program_without_a_place_to_start_is_a_compile_error(
    sandbox: Sandbox, language: str, code: str
) -> None:
    with pytest.raises(CompileFailed, match="main"):
        async with sandbox.session(program(language, code)):
            pytest.fail("the session must not open")


@pytest.mark.parametrize(
    ("code", "exit_", "exit_code", "signal"),
    [
        ("int main(void) { return 3; }", Exit.EXITED, 3, 0),
        ("#include <stdlib.h>\nint main(void) { abort(); }", Exit.SIGNALLED, 0, 6),
        ("int main(void) { return *(volatile int *)0; }", Exit.SIGNALLED, 0, 11),
        ("int main(void) { for (volatile int i = 0;;) i++; }", Exit.TIME_LIMIT, 0, 9),
        (
            "#include <stdlib.h>\n#include <string.h>\n"
            "int main(void) { for (;;) memset(malloc(1 << 20), 1, 1 << 20); }",
            Exit.MEMORY_LIMIT,
            0,
            9,
        ),
        ('#include <stdio.h>\nint main(void) { for (;;) puts("flood"); }', Exit.OUTPUT_LIMIT, 0, 25),
        ("#include <unistd.h>\nint main(void) { for (;;) if (fork() < 0) break; for (;;) pause(); }", None, 0, 9),
    ],
)
async def test_how_a_compiled_program_ends(
    sandbox: Sandbox, code: str, exit_: Exit | None, exit_code: int, signal: int
) -> None:
    endless = exit_ in (None, Exit.TIME_LIMIT)
    limits = Limits(0.6 if endless else 60, 1 if endless else 30, 64 << 20, output_bytes=1 << 16, processes=20)
    async with sandbox.session(program("c", code, limits)) as session:
        result = await session.run(b"")
    assert (result.exit, result.exit_code, result.signal) == (exit_ or Exit.TIME_LIMIT, exit_code, signal)
    async with sandbox.session(program("c", "int main(void) { return 7; }")) as session:  # and a canary
        assert (await session.run(b"")).exit_code == 7


async def test_deep_recursion_and_threads_have_enough_memory(sandbox: Sandbox) -> None:
    deep = "int f(int n) { volatile char pad[512]; pad[0] = n; return n ? 1 + f(n - 1) + 0 * pad[0] : 0; }\n"
    deep += '#include <stdio.h>\nint main(void) { printf("%d\\n", f(200000)); }'
    assert (await run_twice(sandbox, deep)).stdout == b"200000\n"
    threads = (
        "#include <pthread.h>\n#include <stdio.h>\nvoid *g(void *p) { return p; }\nint main(void) { pthread_t t[4];"
        " for (int i = 0; i < 4; i++) if (pthread_create(t + i, 0, g, 0)) return 1;"
        ' for (int i = 0; i < 4; i++) pthread_join(t[i], 0); puts("ok"); }'
    )
    async with sandbox.session(program("c", threads, Limits())) as session:
        assert (await session.run(b"")).stdout == b"ok\n"


async def test_threads_have_small_stacks_and_the_main_thread_a_large_one(sandbox: Sandbox) -> None:
    threads = (
        "#include <pthread.h>\n#include <stdio.h>\nvoid *g(void *p) { return p; }\nint main(void) { pthread_t t[32];"
        " for (int i = 0; i < 32; i++) if (pthread_create(t + i, 0, g, 0)) return 1;"
        ' for (int i = 0; i < 32; i++) pthread_join(t[i], 0); puts("ok"); }'
    )
    deep = (
        "#include <stdio.h>\n#include <string.h>\n"
        "int f(int n) { volatile char pad[1 << 20]; memset((void *)pad, n, sizeof pad);"
        " return n ? 1 + f(n - 1) + 0 * pad[9] : 0; }\n"
        'int main(void) { printf("%d\\n", f(300)); }'
    )
    for code, memory_bytes, said in ((threads, 256 << 20, b"ok\n"), (deep, 512 << 20, b"300\n")):
        limits = Limits(wall_time_s=60, cpu_time_s=60, memory_bytes=memory_bytes)
        async with sandbox.session(program("c", code, limits)) as session:
            result = await session.run(b"")
        assert (result.exit, result.stdout) == (Exit.EXITED, said)


async def test_a_run_has_a_read_only_program_and_no_file_of_an_earlier_run(sandbox: Sandbox) -> None:
    code = (
        "#include <dirent.h>\n#include <fcntl.h>\n#include <stdio.h>\n#include <string.h>\n#include <unistd.h>\n"
        'int main(void) { int seen = 0; DIR *d = opendir("."); struct dirent *e;'
        ' while ((e = readdir(d))) if (!strcmp(e->d_name, "kept")) seen = 1;'
        ' int kept = open("kept", O_CREAT | O_WRONLY, 0600);'
        ' printf("%d %d %d %d %d\\n", seen, kept >= 0, open("main.c", O_WRONLY),'
        ' open("/program/new", O_CREAT | O_WRONLY, 0600), unlink("main")); }'
    )
    assert (await run_twice(sandbox, code)).stdout == b"0 1 -1 -1 -1\n"


async def test_a_program_gets_files_and_only_python_has_entry_points(sandbox: Sandbox) -> None:
    code = '#include <stdio.h>\nint main(void) { FILE *f = fopen("in.txt", "r"); putchar(f ? fgetc(f) : \'-\'); }'
    async with sandbox.session(program("c", code)) as session:
        assert (await session.run(b"", files={"in.txt": b"7"})).stdout == b"7"
        assert (await session.run(b"")).stdout == b"-"
    with pytest.raises(ValueError, match="only python"):
        Program(installed()["c"], code, LIMITS, entry_point="f")


async def test_a_prelude_runs_before_the_program_and_shifts_no_line_number(sandbox: Sandbox) -> None:
    python = installed()["python"]
    code = "from __future__ import annotations\nprint(sqrt(4))\n1 / 0\n"
    async with sandbox.session(Program(python, code, LIMITS, prelude="from math import *\n")) as session:
        for _ in range(2):
            result = await session.run(b"")
            assert result.stdout == b"2.0\n"
            assert b'"/tmp/main.py", line 3' in result.stderr


BOMBS = {
    "endless include": '#include "/dev/zero"\n',
    "included again and again": '#include "main.c"\n#include "main.c"\n',
    "huge initialised data": "char x[1ull << 33] = {1};\nint main(void) { return 0; }",
    "message flood": "#define A x y z;\n#define B A A A A A A A A\n#define C B B B B B B B B\nC C C C C C C C",
    "secrets of the host": '#include "/etc/shadow"\n',
    "secrets of the service": f'#include "{Path(__file__).parents[2]}/pyproject.toml"\n',
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.heavy) if name == "included again and again" else name for name in BOMBS],
)
async def test_a_hostile_source_is_a_compile_error(impatient: Sandbox, name: str) -> None:
    detail = (await compile_failure(impatient, BOMBS[name])).detail
    assert 0 < len(detail) <= 2000
    assert "root:" not in detail
    assert (await run_twice(impatient, "int main(void) { return 7; }")).exit_code == 7


MANY = 'BEGIN { for my $i (1..%d) { open F, ">h$i" or last; close F } } my @files = <h*>; print scalar(@files);'
LITTER = {
    "one file too many": (MANY % 1001, "more than 1000 files"),
    "far too many": (MANY % 60_000, "more than 1000 files"),
    "far too many, and the compiler fails": (MANY % 60_000 + " BEGIN { die }", "more than 1000 files"),
    "folders below each other": ("BEGIN { for (1..40) { mkdir 'd'; chdir 'd' } }", "more than 16 deep"),
}


@pytest.mark.parametrize("name", LITTER)
async def test_what_a_compiler_leaves_is_limited(sandbox: Sandbox, name: str) -> None:
    code, why = LITTER[name]
    with pytest.raises(CompileFailed, match=why):
        await run_twice(sandbox, code, "perl")
    assert (await run_twice(sandbox, MANY % 900, "perl")).stdout == b"900"


async def test_the_first_class_with_main_is_found_among_many(sandbox: Sandbox) -> None:
    others = "".join(
        f"class A{i:03} {{ static void {'main(int' if i % 2 else 'f(String[]'} a) {{}} }}\n" for i in range(300)
    )
    code = others + "class B { public static void main(String[] a) { System.out.print(7); } }\nclass C extends B {}"
    assert (await run_twice(sandbox, code, "java")).stdout == b"7"


async def test_the_main_thread_of_java_has_a_large_stack(sandbox: Sandbox) -> None:
    deep = (
        "public class Main { static int f(int n) { return n == 0 ? 0 : 1 + f(n - 1); }\n"
        " public static void main(String[] a) { System.out.println(f(500000)); } }"
    )
    for memory_bytes in (256 << 20, 2 << 30):
        wide = Limits(wall_time_s=60, cpu_time_s=60, memory_bytes=memory_bytes)
        async with sandbox.session(program("java", deep, wide)) as session:
            result = await session.run(b"")
            assert (result.exit, result.stdout) == (Exit.EXITED, b"500000\n"), result.stderr.decode()[-500:]


USES_THE_JUDGE_SET = {  # with what the program needs
    "cpp": (
        "/usr/include/boost/version.hpp /usr/include/gmpxx.h /usr/include/openssl/md5.h",
        "#include <boost/multiprecision/cpp_int.hpp>\n#include <gmpxx.h>\n#include <iostream>\n"
        "#include <openssl/sha.h>\n"
        "int main() { mpz_class n; std::cin >> n; boost::multiprecision::cpp_int m(n.get_str());"
        ' unsigned char d[20]; SHA1((unsigned char *)"abc", 3, d); std::cout << m * m << std::hex << int(d[0]); }',
    ),
    "c": (
        "/usr/include/gmpxx.h",
        '#include <gmp.h>\nint main(void) { mpz_t n; mpz_init(n); gmp_scanf("%Zd", n); mpz_mul(n, n, n);'
        ' gmp_printf("%Zda9", n); }',
    ),
    "javascript": (
        "/usr/share/nodejs/lodash/package.json",
        "const _ = require('lodash'); const n = BigInt(require('fs').readFileSync(0, 'utf8'));"
        " process.stdout.write(_.chunk([n * n, 'a', 9], 3)[0].join(''));",
    ),
}


@pytest.mark.parametrize("language", USES_THE_JUDGE_SET)
async def test_a_program_can_use_the_libraries_of_the_judge_set(sandbox: Sandbox, language: str) -> None:
    needs, code = USES_THE_JUDGE_SET[language]
    if missing := [file for file in needs.split() if not Path(file).exists()]:
        pytest.skip(f"the judge set is not here: {missing}")
    async with sandbox.session(program(language, code)) as session:
        result = await session.run(b"123456789012345678901234567890\n")
    assert result.stdout == b"15241578753238836750495351562536198787501905199875019052100a9", result.stderr.decode()


async def test_compiled_programs_run_beside_the_systems_own_interpreter() -> None:
    """Debian's has a fixed address, and variables of libc are in its data."""
    if not Path("/usr/bin/python3").exists() or "bash" not in installed():
        pytest.skip("this host has no /usr/bin/python3, or no bash")
    sandbox = open_sandbox(SandboxSection(slots=1, python="/usr/bin/python3"))
    try:
        await sandbox.start()
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    try:
        async with sandbox.session(Program(installed()["bash"], "read n; echo $((n + 1))", Limits(60, 60))) as session:
            for _ in range(2):
                assert (await session.run(b"41\n")).stdout == b"42\n"
    finally:
        await sandbox.close()
