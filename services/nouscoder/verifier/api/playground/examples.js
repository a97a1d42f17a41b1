// The examples of each type of tests, and a first program in each language.
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
    code: "a, b = map(int, input().split())\nprint(a + b)\n",
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

// The sum of two numbers in each language.
const STARTERS = {
  python: EXAMPLES.stdin.code,
  pypy: EXAMPLES.stdin.code,
  c: '#include <stdio.h>\n\nint main(void) {\n    long a, b;\n    scanf("%ld %ld", &a, &b);\n    printf("%ld\\n", a + b);\n}\n',
  cpp: "#include <iostream>\n\nint main() {\n    long a, b;\n    std::cin >> a >> b;\n    std::cout << a + b << std::endl;\n}\n",
  java: "import java.util.Scanner;\n\npublic class Main {\n    public static void main(String[] args) {\n        Scanner in = new Scanner(System.in);\n        System.out.println(in.nextLong() + in.nextLong());\n    }\n}\n",
  kotlin: "fun main() {\n    println(readLine()!!.trim().split(\" \").map { it.toLong() }.sum())\n}\n",
  javascript: 'const [a, b] = require("fs").readFileSync(0, "utf8").trim().split(/\\s+/).map(Number);\nconsole.log(a + b);\n',
  typescript: 'import * as fs from "fs";\n\nconst [a, b]: number[] = fs.readFileSync(0, "utf8").trim().split(/\\s+/).map(Number);\nconsole.log(a + b);\n',
  go: 'package main\n\nimport "fmt"\n\nfunc main() {\n\tvar a, b int\n\tfmt.Scan(&a, &b)\n\tfmt.Println(a + b)\n}\n',
  rust: "use std::io::Read;\n\nfn main() {\n    let mut text = String::new();\n    std::io::stdin().read_to_string(&mut text).unwrap();\n    let sum: i64 = text.split_whitespace().map(|word| word.parse::<i64>().unwrap()).sum();\n    println!(\"{}\", sum);\n}\n",
  bash: "read -r a b\necho $((a + b))\n",
  perl: "use strict;\nuse warnings;\n\nmy ($a, $b) = split ' ', <STDIN>;\nprint $a + $b, \"\\n\";\n",
  ruby: "a, b = gets.split.map(&:to_i)\nputs a + b\n",
  lua: 'local a, b = io.read("n", "n")\nprint(a + b)\n',
  php: "<?php\n[$a, $b] = array_map('intval', explode(' ', trim(fgets(STDIN))));\necho $a + $b, PHP_EOL;\n",
  r: 'numbers <- scan(file("stdin"), quiet = TRUE)\ncat(sum(numbers), "\\n")\n',
  csharp: "using System;\nusing System.Linq;\n\nclass Program {\n    static void Main() {\n        Console.WriteLine(Console.ReadLine().Trim().Split(' ').Sum(long.Parse));\n    }\n}\n",
};
