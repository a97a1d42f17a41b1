"""Extraction of the program from a model's answer."""

from __future__ import annotations

import time

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from nouscoder.domain.submission import Limits, MathCase, MathTests, Profile, Submission
from nouscoder.verifier.grading.extract import MAX_MARKS, extract_code, extract_program, text_to_grade

PROGRAM = "a, b = map(int, input().split())\nprint(a + b)"
BLOCK = f"```python\n{PROGRAM}\n```"
INDENTED = PROGRAM.replace("\n", "\n   ")
DOCUMENTED = f'def add(a, b):\n    """Add.\n\n    ```\n    add(1, 2)\n    ```\n    """\n    return a + b\n{PROGRAM}'
OUTER_STRING = f'TEXT = """\n```json\n{{}}\n```\n"""\n{PROGRAM}'


@pytest.mark.parametrize(
    ("completion", "code"),
    [
        ("```python\nprint(1)\n```", "print(1)"),
        ("```\nprint(1)\n```\n", "print(1)"),
        ("```py\na = 1\nprint(a)\n```\nThat is all.", "a = 1\nprint(a)"),
        ("First:\n```python\nprint(1)\n```\nBetter:\n```python\nprint(2)\n```", "print(2)"),
        ("```python\nprint(1)\n```\nand cut off:\n```python\nprint(2", "print(2"),
        ("```python\nprint(1)", "print(1)"),
        ("~~~python\nprint(1)\n~~~", "print(1)"),
        ("~~~python\nprint(1)\n```\n~~~", "print(1)\n```"),
        ("````python\ns = '''\n```\n'''\n````", "s = '''\n```\n'''"),
        ("```python\r\nprint(1)\r\n```\r\n", "print(1)"),
        ("no code at all", None),
        ("print(1)", None),
        ("inline ```print(1)``` only", None),
        ("```print(1)``` at the start of a line", None),
        ("```python\n```", None),
        ("```python\n   \n```", None),
        ("```", None),
        ("", None),
    ],
)
def test_the_last_fenced_block_is_the_program(completion: str, code: str | None) -> None:
    assert extract_code(completion) == code


@pytest.mark.parametrize(
    "behind",
    [
        "<|im_end|>",
        "<|eot_id|>",
        "</s>",
        "</answer>",
        ".",
        " .",
        "<\uff5cend▁of▁sentence\uff5c>",
        " That is it.",
        "</answer><|im_end|>",
    ],
)
def test_text_behind_a_closing_fence_does_not_keep_the_block_open(behind: str) -> None:
    assert extract_code(f"<answer>\n{BLOCK}{behind}") == PROGRAM
    assert extract_code(f"{BLOCK}{behind}\nIt adds.") == PROGRAM


@pytest.mark.parametrize(
    "before",
    [
        "Here is the code: ",
        "**Answer:** ",
        "### Solution ",
        "<answer>",
        "<|channel|>final<|message|>",
        "\ufeff",
        "The function `add` does it: ",
        "> ",
        "Answer:",
        "I always write code in ```.\n",
    ],
)
def test_a_fence_behind_text_opens_a_block(before: str) -> None:
    assert extract_code(before + BLOCK) == PROGRAM
    assert extract_code(f"{before}```\n{PROGRAM}\n```") == PROGRAM
    assert extract_code(f"An example.\n\n{before}{BLOCK}\nIt adds.") == PROGRAM


@pytest.mark.parametrize(
    "completion",
    [
        f"1. Code:\n\n   ```python\n   {INDENTED}\n   ```\n",
        f"- ```python\n  {PROGRAM.replace(chr(10), chr(10) + '  ')}\n  ```",
        f"\t```python\n\t{PROGRAM.replace(chr(10), chr(10) + chr(9))}\n\t```",
        f" ```python\n {PROGRAM.replace(chr(10), chr(10) + ' ')}\n ```",
        f"  1. a\n     - b\n\n       ```python\n       {PROGRAM.replace(chr(10), chr(10) + ' ' * 7)}\n       ```",
        f"1. Code:\n   ```python\n{PROGRAM}\n   ```",
        f"{BLOCK[:-3]}    ```",
    ],
)
def test_the_indentation_of_a_fence_is_no_part_of_the_program(completion: str) -> None:
    assert extract_code(completion) == PROGRAM


def test_a_line_that_is_less_indented_than_its_fence_loses_what_it_has() -> None:
    assert extract_code("  ```python\n  if 1:\n      print(1)\n print(2)\n  ```") == "if 1:\n    print(1)\nprint(2)"
    assert extract_code("  ```python\n  if 1:\n\tprint(1)\n  ```") == "if 1:\n  print(1)"


@pytest.mark.parametrize(
    "program", [DOCUMENTED, OUTER_STRING, DOCUMENTED.replace("    ```", "  ```").replace('"""', "'''")]
)
def test_a_pair_of_fences_in_a_string_of_three_quotes_is_text(program: str) -> None:
    assert extract_code(f"```python\n{program}\n```") == program
    assert extract_code(f"```\n{program}\n```\nIt adds.\n```output\n3\n```") == program
    assert extract_code(f"```python\nprint('''draft\n```\nNo:\n```python\n{program}\n```") is not None


def test_a_string_that_is_never_closed_does_not_hide_the_fences_behind_it() -> None:
    assert extract_code(f'```python\ns = """draft\n```\nNo:\n{BLOCK}') == PROGRAM
    assert extract_code(f'```python\n{PROGRAM}\ns = """draft\n```\nIt adds.') == f'{PROGRAM}\ns = """draft'
    assert extract_code(f"```python\n# it's '''\n{PROGRAM}\n```\nIt's.") == f"# it's '''\n{PROGRAM}"


@pytest.mark.parametrize(
    ("completion", "code"),
    [
        ("<think>```python\nprint(0)\n```</think>```python\nprint(1)\n```", "print(1)"),
        ("reasoning\n```python\nprint(0)\n```\n</think>\n```python\nprint(1)\n```", "print(1)"),
        ("reasoning</think>```python\nprint(1)\n```", "print(1)"),
        ("```\nprint(0\n</think>\n```\nprint(1)\n```", "print(1)"),
        ("<think>a</think>\n```python\nprint('</think>')\n```", "print('</think>')"),
        ("<|im_start|>assistant\n<think>\n```python\nprint(0)\n```", None),
        ("<think>```python\nprint(0)\n```", None),
        ("<think>```python\nprint(0)\n```</think>nothing after it", None),
        ("```python\nprint(0)\n```</think>nothing after it", None),
        ("```python\nprint(0)\n```\n</think>\n", None),
        ("```python\nprint('<think>')\n```", "print('<think>')"),
        ("```python\nprint(0)  # <think>\n```", "print(0)  # <think>"),
        ("```python\nprint(0)  # </think>\n```", "print(0)  # </think>"),
        ("```python\nprint('''\n</think>\n''')\n```", "print('''\n</think>\n''')"),
        ("Sure.\n  <think>\n```python\nprint(0)\n```", None),
        ("<|start|>assistant<|message|><think>\n```python\nprint(0)\n```", None),
        ("I think in <think> tags.\n```python\nprint(0)\n```", "print(0)"),
        ("<thinking>\n```python\nprint(0\n</thinking>\n```python\nprint(1)\n```", "print(1)"),
        ("```python\nprint(0\n**Answer:** ```python\nprint(1)\n```", "print(1)"),
        ("[THINK]\n```\nprint(0\n[/THINK] So: ```python\nprint(1)\n```", "print(1)"),
    ],
)
def test_reasoning_is_ignored_and_its_tags_can_be_text(completion: str, code: str | None) -> None:
    assert extract_code(completion) == code


@pytest.mark.parametrize("behind", ["", "\nIt adds.", "<|im_end|>", "</answer>", "\n```\n3\n```"])
def test_a_fence_at_the_end_of_the_last_line_of_code_closes_the_block(behind: str) -> None:
    assert extract_code(f"```python\n{PROGRAM}```{behind}") == PROGRAM


@pytest.mark.parametrize("line", ["# ends with ```", "s = '```'", "s = '''```\n```'''", "x = 1  # a ``` b"])
def test_a_fence_inside_a_line_of_code_is_text(line: str) -> None:
    assert extract_code(f"```python\n{line}\n{PROGRAM}\n```") == f"{line}\n{PROGRAM}"


@pytest.mark.parametrize(
    "behind",
    [
        "\nRun:\n```bash\npython a.py (now)\n```",
        "\n```text\nf(1) = 2\n```",
        "\n```output\n3\n```",
        "\n```mermaid\ngraph (a)\n```",
        "\n```\n3\n```",
        "\n```\n[(1, 2), {3: 4}]\n```",
        "\nOutput:\n```\nYES\n1 2\n```",
        "\n```python\n```",
        "\n```python\n",
        "\nThe end ```",
        "\n```",
        "\n```json\n{}\n```\n```cpp\nint main() {}\n```",
    ],
)
def test_a_block_that_cannot_be_the_program_does_not_count(behind: str) -> None:
    assert extract_code(BLOCK + behind) == PROGRAM
    assert extract_code(f"```\n{PROGRAM}\n```{behind}") == PROGRAM


@pytest.mark.parametrize(
    ("language", "tag"),
    [("cpp", "c++"), ("cpp", "C++17"), ("c", "cpp"), ("pypy", "python"), ("javascript", "ts"), ("python", "Python3")],
)
def test_the_block_of_the_language_asked_for_counts(language: str, tag: str) -> None:
    completion = f"```{tag}\nright(1)\n```\n```java\nwrong(1)\n```\n```bash\nwrong(2)\n```"
    assert extract_code(completion, language) == "right(1)"
    assert extract_code("```{.python .numbered}\nright(1)\n```\n```sh\nwrong\n```") == "right(1)"
    assert extract_code("```python:main.py\nright(1)\n```\n```sh\nwrong\n```") == "right(1)"


def test_a_block_that_hardly_can_be_the_program_counts_when_there_is_no_other() -> None:
    assert extract_code("```output\nprint(1)\n```") == "print(1)"
    assert extract_code("```\nf = max\n```") == "f = max"
    assert extract_code("```\nf = max\n```\n```sh\nrun\n```") == "f = max"
    assert extract_code("```\necho 1\n```\n```text\n1\n```", "bash") == "echo 1"
    assert extract_code("```main.py\nprint(1)\n```\n```text\n1\n```") == "print(1)"


@pytest.mark.parametrize(
    ("completion", "languages", "found"),
    [
        ("```java\nprint(1)\n```", ["python"], None),
        ("```python\nprint(1)\n```", ["cpp"], None),
        ("```\nint main() {}\n```\n```python\nprint(1)\n```", ["cpp"], ("int main() {}", "cpp")),
        ("```cpp\nint a;\n```\n```py\nprint(1)\n```", ["cpp", "python"], ("print(1)", "python")),
        ("```python3\nprint(1)\n```\n```c++\nint a;\n```", ["cpp", "python"], ("int a;", "cpp")),
        ("```C++17\nint a;\n```\n```rust\nfn main() {}\n```", ["python", "cpp"], ("int a;", "cpp")),
        ("```\nint main() {}\n```", ["cpp", "python"], ("int main() {}", "cpp")),
        ("```main.rs\nfn main() {}\n```", ["rust", "python"], ("fn main() {}", "rust")),
        ("```c\nint a;\n```", ["python", "cpp", "c"], ("int a;", "c")),
        ("```c\nint a;\n```", ["python", "cpp"], ("int a;", "cpp")),
        ("```js\nlet a\n```", ["rust", "typescript"], ("let a", "typescript")),
        ("```python2\nprint(1)\n```\n```\nprint(2)\n```", ["python"], ("print(2)", "python")),
    ],
)
def test_the_program_is_in_one_of_the_languages_of_the_problem(
    completion: str, languages: list[str], found: tuple[str, str] | None
) -> None:
    """A block of another language was graded in the only language that a problem had."""
    assert extract_program(completion, languages) == found


def test_special_tokens_behind_a_program_without_a_closing_fence_are_removed() -> None:
    assert extract_code("```python\nprint(1)\n<|im_end|></s>\n") == "print(1)"
    assert extract_code("```python\nprint(1)<|eot_id|>") == "print(1)"


@pytest.mark.parametrize(
    ("completion", "code"),
    [
        ("```python\nprint(1)\n```", "print(1)"),
        ("text ``` text\nprint(1)\n  ```<|im_end|>", "print(1)"),
        ("```python\nprint(1)\n```\n```bash\nrun\n```", "run"),
        ("```python\nprint(1)\n```\nText.\n```", "Text."),
        ("~~~\nprint(1)\n~~~", None),
        ("```python\nprint(1)", None),
        ("```python\n```", None),
        ("```", None),
        ("", None),
        ("<think>\n```python\nprint(0)\n```", "print(0)"),
        ("<think>\n```python\nprint(0)\n```\n</think>\n```python\nprint(1)", "</think>"),
    ],
)
def test_the_lcb_profile_takes_what_is_between_the_last_two_lines_with_a_fence(
    completion: str, code: str | None
) -> None:
    assert extract_code(completion, profile=Profile.LCB) == code


@given(
    st.lists(
        st.sampled_from(["```", "```python", "a", "", "b ```", "x ``` y", "~~~", "<think>", "</think>", "c\r"]),
        max_size=12,
    )
)
def test_the_rule_of_the_lcb_profile_is_that_of_livecodebench(lines: list[str]) -> None:
    text = "\n".join(lines)
    places = [at for at, line in enumerate(lines) if "```" in line]
    published = "" if len(places) < 2 else "\n".join(lines[places[-2] + 1 : places[-1]])
    assert (extract_code(text, profile=Profile.LCB) or "") == (published if published.strip() else "")


PARTS = [
    "```",
    "````",
    "~~~",
    "```python",
    "```bash",
    "\n",
    "\n",
    "x",
    "(",
    " ",
    "\t",
    "    ",
    "<think>",
    "</think>",
    "\r",
]
PARTS += ["'''", '"""', "#", "'", "\\", ".", "- ", "1. ", "</s>", "<|im_end|>", "\ufeff", "é"]


@given(st.lists(st.sampled_from(PARTS)).map("".join), st.sampled_from(["python", "cpp", "bash"]))
def test_each_line_of_a_found_program_is_the_end_of_a_line_of_the_text(completion: str, language: str) -> None:
    code = extract_code(completion, language)
    assert code == extract_code(completion, language)
    if code is None:
        return
    assert code.strip()
    rest = iter(completion.replace("\r\n", "\n").split("\n"))
    for line in code.split("\n"):
        assert any(line.strip() in whole for whole in rest)


names = st.sampled_from(["x", "total", "s"])
statements = st.one_of(
    st.builds("{} = int(input())".format, names),
    st.builds("print({})  # don't".format, names),
    st.builds('{} = """\n```\nf({})\n```\n"""'.format, names, names),
    st.builds("if {}:\n    print('```')".format, names),
    st.builds("def f({}):\n    '''Doc.\n\n    ```python\n    f(1)\n    ```\n    '''".format, names),
    st.just(""),
)
programs = st.lists(statements, max_size=6).map(lambda parts: "\n".join(["print(0)", *parts, "print(1)"]))
openings = st.sampled_from(
    ["", "Code: ", "**Answer:** ", "### Solution ", "<answer>", "\ufeff", "<|message|>", "a `b` c: "]
)
closings = st.sampled_from(["\n```", "\n```.", "\n```<|im_end|>", "\n```</answer>", "\n``` That is it.", "```", ""])
befores = st.sampled_from(
    ["", "<think>\n```python\nno(0)\n</think>\n", "no</think>", "Text.\n", "```python\nno(0)\n```\n"]
)
behinds = st.sampled_from(
    ["", "\n", "\nIt's.\n", "\n```text\n(3)\n```", "\n```\n3\n```", "\n```bash\nrun ()\n```\n", "\n```"]
)


@given(befores, openings, st.sampled_from(["python", "py", "Python3", ""]), programs, closings, behinds)
def test_a_program_is_found_in_any_form_of_the_grammar(
    before: str, opening: str, tag: str, program: str, closing: str, behind: str
) -> None:
    assume(tag or "```python\nno(0)\n```" not in before)  # a block with the language's tag goes before one without
    assert extract_code(f"{before}{opening}```{tag}\n{program}{closing}{behind if closing else ''}") == program


EXAMPLES = [
    ">>> print(1 + 1)\n2",
    "Traceback (most recent call last):\n  File 'main.py', line 1\n    print(x)\nNameError: x",
    "print(add(1, 2))  # 3",
    "$ echo 1 2 | python3 main.py  # print\n3",
    "def add(a, b): ...",
    "stdin: 1 2\nwrites: 3",
]


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_without_a_tag_after_the_answer_is_no_program(example: str) -> None:
    assert extract_code(f"{BLOCK}\nExample:\n```\n{example}\n```\n") == PROGRAM
    assert extract_code(f"{BLOCK}\nExample:\n```text\n{example}\n```\nThat is it.") == PROGRAM


@pytest.mark.parametrize("fence", ["````", "`````", "~~~", "~~~~"])
@pytest.mark.parametrize("tag", ["markdown", "md", "", "text", "Markdown"])
@pytest.mark.parametrize("behind", ["", "\nThat prints the sum.", "\n```\n>>> print(3)\n```"])
def test_an_answer_that_is_wrapped_in_a_longer_fence_is_found(fence: str, tag: str, behind: str) -> None:
    assert extract_code(f"{fence}{tag}\n# Solution\nI print it.\n{BLOCK}\n{fence}{behind}") == PROGRAM
    assert extract_code(f"Here:\n\n{fence}{tag}\n{BLOCK}\nIt prints.\n{fence}{behind}") == PROGRAM


@pytest.mark.parametrize("tag", ["jsx", "mjs"])
def test_an_unknown_tag_before_a_program_hides_it_behind_no_output(tag: str) -> None:
    code = "console.log(1 + 1)"
    assert extract_code(f"```{tag}\n{code}\n```\nIt prints:\n```\n2\n```", "javascript") == code
    assert extract_code(f"```{tag}\n2\n```\nSo:\n```\n{code}\n```", "javascript") == code


def test_a_fence_after_spaces_that_do_not_break_is_one() -> None:
    assert extract_code(f"\xa0\xa0{BLOCK}") == PROGRAM


def test_a_program_with_a_longer_fence_may_hold_blocks() -> None:
    code = f'"""\n{BLOCK}\n"""\nprint(1)'
    assert extract_code(f"````python\n{code}\n````") == code
    assert extract_code(f"~~~python\n{code}\n~~~") == code


@pytest.mark.parametrize("mark", ["> ", ">", "  > ", "> > ", ">>"])
def test_a_program_in_a_quotation_is_found_without_the_marks(mark: str) -> None:
    quoted = "\n".join(f"{mark}{line}" for line in BLOCK.split("\n"))
    assert extract_code(f"{mark}The answer:\n{mark}\n{quoted}\n\nThat is it.") == PROGRAM
    assert extract_code(f"{quoted}\n{mark}It prints the sum.") == PROGRAM
    assert extract_code(f"{BLOCK}\n{mark}```text\n{mark}3\n{mark}```") == PROGRAM
    assert extract_code("```python\nx = 3\nprint(x\n> 2)\n```") == "x = 3\nprint(x\n> 2)"


ONE_LINE_HARMONY = [
    f"<|channel|>analysis<|message|>```python\nprint('no')\n```<|end|><|start|>assistant<|channel|>final<|message|>{BLOCK}<|return|>",
    f"<|channel|>analysis<|message|>```\nprint('no')\n```<|end|><|start|>assistant<|channel|>final<|message|>{BLOCK}<|return|>",
    f"```python\nprint('no')\n``` ```python\n{PROGRAM}\n```",
    f"```python\nprint('no')\n```<|im_end|>```py\n{PROGRAM}\n```<|im_end|>",
    f"```json\n{{}}\n```<|end|>```python\n{PROGRAM}\n```",
]


@pytest.mark.parametrize("completion", ONE_LINE_HARMONY)
def test_a_fence_may_close_and_open_in_one_line(completion: str) -> None:
    assert extract_code(completion) == PROGRAM


@given(st.integers(1, 12), programs, closings)
def test_a_program_in_a_list_is_found_without_its_indentation(columns: int, program: str, closing: str) -> None:
    lines = f"```python\n{program}{closing}".split("\n")
    completion = "\n".join(f"{' ' * columns}{line}" for line in lines)
    assert extract_code(f"1. Code:\n\n{completion}") == program


PLAIN_LINES = ["```", "````", "~~~", "~~~~", "```python", "````python", "~~~python", "  ```python", "  ```", " ~~~", ""]
PLAIN_LINES += ["print(1)", "  print(2)", "print(3)", "   print(4)", "text"]


@given(st.lists(st.sampled_from(PLAIN_LINES), max_size=9))
def test_blocks_are_those_of_commonmark(lines: list[str]) -> None:
    """A fence with a tag inside a block, which begins another block here, is left out."""
    markdown_it = pytest.importorskip("markdown_it", reason="markdown-it-py is not installed")
    text = "\n".join(lines)
    blocks = [token for token in markdown_it.MarkdownIt("commonmark").parse(text) if token.type == "fence"]
    assume(not any("python" in line and line.strip()[0] in "`~" for one in blocks for line in one.content.split("\n")))
    programs = [one.content for one in blocks if one.content.strip() and (one.info or "print" in one.content)]
    tagged = [one.content for one in blocks if one.content.strip() and one.info]
    programs = tagged or programs or [one.content for one in blocks if one.content.strip()]
    wanted = programs[-1].rstrip("\n").split("\n") if programs else None
    code = extract_code(text)
    found = None if code is None else code.rstrip("\n").split("\n")
    assert found is None if wanted is None else [line.strip() for line in found or ()] == [*map(str.strip, wanted)]


def test_the_answer_to_a_math_problem_is_the_text_behind_the_reasoning() -> None:
    def answer(completion: str) -> str | None:
        found = text_to_grade(Submission(MathTests((MathCase("1"),)), completion=completion, limits=Limits()))
        return None if found is None else found.code

    assert answer("<think>7</think> 8") == " 8"
    assert answer("7</think> 8") == " 8"
    assert answer("<think>7") is None
    assert answer("8, not <think>") == "8, not <think>"


HOSTILE = [
    "```\n", "```python\n", "~~~\n", "</think>\n", "`", "` ", "```python\n'''\n", "```python\n'''\n```\n",
    "```python\n\\'''\n```\n", '```python\nx = """\n```\n', " ", "x ```\n", "x```y ", "- ", "1. ```python\n ",
    "\t```\n\tx\n", "'", "\\", "#", "<", "<think>", "> ", "```python\n'\\\n", "(```)\n", "print(1)```\n",
]  # fmt: skip


@pytest.mark.parametrize("part", HOSTILE)
def test_the_work_is_linear_in_the_length_of_a_hostile_text(part: str) -> None:
    def seconds(begin: str, num_chars: int) -> float:
        text = begin + part * (num_chars // len(part))
        started = time.thread_time()
        extract_code(text)
        return time.thread_time() - started

    for begin in ("", "```python\n", "```python\n'''", " " * 1000 + "```\n"):
        short_s = min(seconds(begin, 5_000) for _ in range(3))
        assert seconds(begin, 40_000) < 0.05 + 8 * 6 * short_s  # quadratic work would take 64 times as long


def test_a_text_with_very_many_fences_is_not_followed_to_its_end() -> None:
    text = "```\n" * (2 * MAX_MARKS) + BLOCK
    assert extract_code(text) is None
    assert extract_code("```\n" * (MAX_MARKS - 4) + BLOCK) == PROGRAM
