// The examples of each type of tests. LANGUAGES, before this script, is made from languages.toml.
const HINTS = {
  stdin: "The program reads the input on stdin and must print the output. In the first example the last test fails on purpose: 5 + 5 is not 11.",
  call: "The function, or the method of class Solution, is called with args and kwargs; the returned value is compared.",
  assert: "Each case is a few lines of Python after the program and the setup; it passes when they raise nothing.",
  checker: "A program of yours, given the files input, output and answer, says by its exit code whether the output is right.",
  interactive: "The program talks with a program of yours over stdin and stdout.",
  math: "Nothing is run: the text on the left is an answer, compared with the expected one as mathematics.",
};
const CHECKER = `import sys
given, output, answer = (open(name).read().split() for name in sys.argv[1:4])
sys.exit(0 if sorted(output) == sorted(answer) else 1)
`;
const INTERACTOR = `import sys
secret = int(open(sys.argv[1]).read())
for turn in range(10):
    guess = int(input())
    print("=" if guess == secret else "<" if secret < guess else ">", flush=True)
    if guess == secret:
        sys.exit(0)
sys.exit(1)
`;
const EXAMPLES = {
  stdin: {
    code: LANGUAGES.python.starter,
    tests: { type: "stdin", cases: [{ input: "1 2\n", output: "3\n" }, { input: "40 2\n", output: "42\n" }, { input: "5 5\n", output: "11\n" }] },
  },
  call: {
    code: "class Solution:\n    def twoSum(self, nums, target):\n        seen = {}\n        for i, n in enumerate(nums):\n            if target - n in seen:\n                return [seen[target - n], i]\n            seen[n] = i\n",
    tests: { type: "call", entry_point: "twoSum", cases: [{ args: [[2, 7, 11, 15], 9], expected: [0, 1] }, { args: [[3, 3], 6], expected: [0, 1] }] },
  },
  assert: {
    code: "def is_even(n):\n    return n % 2 == 0\n",
    tests: { type: "assert", setup: "", cases: ["assert is_even(4)", "assert not is_even(7)"] },
  },
  checker: {
    code: "n = int(input())\nprint(*range(n, 0, -1))\n",
    tests: { type: "checker", checker: { language: "python", code: CHECKER }, cases: [{ input: "3\n", output: "1 2 3\n" }] },
  },
  interactive: {
    code: "low, high = 1, 100\nwhile True:\n    guess = (low + high) // 2\n    print(guess, flush=True)\n    answer = input()\n    if answer == \"=\":\n        break\n    if answer == \"<\":\n        high = guess - 1\n    else:\n        low = guess + 1\n",
    tests: { type: "interactive", interactor: { language: "python", code: INTERACTOR }, cases: [{ input: "37\n", output: "" }] },
  },
  math: {
    code: "The area is $\\frac{1}{2}\\pi$.\n",
    tests: { type: "math", cases: [{ expected: "\\frac{\\pi}{2}" }] },
  },
};
