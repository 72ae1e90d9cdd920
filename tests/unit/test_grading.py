"""The grader against a table written by hand, hostile answers, and where answers stand in a response."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlkit.errors import ConfigError
from rlkit.rewards.extract import extract
from rlkit.rewards.grading import VERDICTS, grade, grade_many, shared_pool
from rlkit.rewards.pool import KillablePool

SAME = [  # (answer, gold), decided without a worker process
    ("72", "72"), ("1,234", "1234"), ("1{,}234", "1234"), ("12,345,678", "12345678"), ("+5", "5"), ("-5", "-5"), ("−5", "-5"),
    ("5.0", "5"), ("5.", "5"), ("007", "7"), (".5", "0.5"), ("0.50", "0.5"), ("1/2", "0.5"), ("0.5", "1/2"), ("2/4", "1/2"),
    (r"\frac{1}{2}", "0.5"), (r"\dfrac{1}{2}", r"\frac{1}{2}"), (r"\frac12", "1/2"), (r"\frac{3}4", "0.75"), (r"-\frac{1}{2}", "-0.5"),
    (r"\frac{-1}{2}", r"-\frac{1}{2}"), (r"1\frac{1}{2}", "1.5"), ("1 1/2", "3/2"), ("0.3333", "1/3"), ("0.6667", r"\frac{2}{3}"),
    ("50%", "0.5"), (r"50\%", "50"), (r"50\%", r"50\%"), ("12.5%", "1/8"), ("$18", "18"), (r"\$18.00", "18"), ("18 dollars", "18"),
    ("$18", "18 dollars"), ("€5", "5"), ("5 cm", "5"), (r"5\text{ cm}", "5"), (r"5~\mathrm{cm}", "5"), ("5cm", "5 centimeters"),
    ("12 apples", "12"), (r"90^\circ", "90"), ("90°", "90"), (r"90^{\circ}", "90"), ("90 degrees", "90"), (r"3.2 \text{ m}^2", "3.2"),
    ("1.5e3", "1500"), (r"1.5 \times 10^{3}", "1500"), (r"1.5\cdot10^3", "1500"), ("10^6", "1000000"), (r"2 \times 10^{-3}", "0.002"),
    ("3 million", "3000000"), ("$x=5$", "5"), ("x = 5", "5"), ("5", "x=5"), ("f(x) = 2", "2"), (r"\theta = 30^\circ", "30"),
    ("The area = 12", "12"), ("**42**", "42"), ("$42$", "42"), (r"\(42\)", "42"), ("42.", "42"), ("(42)", "42"), ("{42}", "42"),
    ("A", "A"), ("(A)", "A"), ("a", "A"), ("A.", "A"), ("A) 12 cm", "A"), (r"\text{A}", "A"), (r"\textbf{(A)}", "A"), ("B", "(B)"),
    ("Yes", "yes"), (r"\text{Evelyn}", "Evelyn"), ("evelyn", r"\text{Evelyn}"), ("the east", "east"), ("Monday.", "monday"),
    ("(1,2)", "(1, 2)"), (r"\left(1, 2\right)", "(1,2)"), ("(0.5, 3)", r"(\frac{1}{2}, 3)"), ("[1,2)", "[1, 2)"),
    (r"(-\infty, 3]", r"(-\infty,3]"), ("1 and 2, 3", "1,2,3"), ("10^{500}", "10^{500}"),
    ("1, 2, 3", "3, 2, 1"), ("1 and 2", "2, 1"), (r"\{1,2\}", r"\{2, 1\}"), ("1,2", r"\{1,2\}"), (r"\pm 3", "3, -3"), ("x = 1, 2", "1,2"),
    ("（1，2）", "(1,2)"), ("５".replace("５", "5") + "。", "5"), ("[1, 2, 3]", "[1,2,3]"),
]  # fmt: skip
DIFFERENT = [
    ("71", "72"), ("-5", "5"), ("1234", "12345"), ("1,2", "12"), ("0.5", "0.51"), ("1/2", "1/3"), ("0.33", "1/3"), ("10001", "10000"),
    ("3.14", "3.1416"), ("100000", "100001"), ("50%", "5"), ("0.5%", "0.5001"), ("5 cm", "5 m"), ("5 kg", "5 g"), ("5 million", "5"),
    ("1.5e4", "1500"), ("1e999999999", "5"), ("1e400", "1e401"), (r"\frac{1}{0}", "0"), ("x = 5", "6"), ("x=5", "y=5"), ("B", "A"),
    ("(B)", "A"), ("C. 12", "A"), ("no", "yes"), ("north", "east"), ("yes", "5"), ("hello world", "5"), ("(1,2)", "(2,1)"),
    ("(1,2)", "[1,2]"), ("10^{99999999}", "5"), ("9" * 250, "9" * 251),
    ("(1,2]", "(1,2)"), ("(1,2,3)", "(1,2)"), ("1, 2", "1, 2, 3"), ("1, 1", "1, 2"), (r"\{1,2\}", r"\{1,3\}"), (r"\pm 3", "3"),
    ("(1,2)", "(1,3)"), ("5x", "5"), ("500", "5"), ("0.05", "5"), ("2.0001", "2.1"), ("", "5"),
]  # fmt: skip
SYMBOLIC_SAME = [
    (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}"), (r"\sqrt{8}", r"2\sqrt{2}"), ("2\\pi", r"\pi \cdot 2"), ("x^2+2x+1", "(x+1)^2"),
    ("2^{10}", "1024"), (r"\sqrt{16}", "4"), (r"\frac{x}{2}", "0.5x"), (r"\sin^2 x + \cos^2 x", "1"), ("a+b", "b+a"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}"),
    (r"(\sqrt{4}, 3)", "(2, 3)"), (r"2\pm 1", "1, 3"), (r"\left[\frac{\sqrt{4}}{4}, 1\right]", "[0.5, 1]"),
    (r"1 \pm \sqrt{2}", r"1+\sqrt{2}, 1-\sqrt{2}"),
    (r"(-\infty,1)\cup(2,\infty)", r"(2,\infty) \cup (-\infty, 1)"), (r"\sqrt[3]{27}", "3"), ("y = 2x + 1", "y=1+2x"),
    (r"\log_2 8", "3"), (r"3\text{i}", "3i"), (r"5!", "120"), (r"\binom{5}{2}", "10"),
]  # fmt: skip
SYMBOLIC_DIFFERENT = [
    (r"\sqrt{2}", r"\sqrt{3}"), ("x^2+1", "x^2+2"), (r"2\pi", r"3\pi"), (r"\frac{\pi}{2}", r"\frac{\pi}{3}"), ("x+y", "x-y"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&2\\3&5\end{pmatrix}"), (r"(\sqrt{4}, 3)", "(3, 2)"),
    (r"(-\infty,1)\cup(2,\infty)", r"(-\infty,1)\cup(3,\infty)"), (r"__import__('os').system('x')", "5"),
]  # fmt: skip

# More of the same kind, by what is written: (answer, gold), decided without a worker process.
MORE_SAME = [
    # integers, separators, signs
    ("1,000,000", "1000000"), ("1000000", "1,000,000"), (r"1\,000", "1000"), (r"10,\!080", "10080"), ("+12", "12"), ("0012", "12"),
    ("-0", "0"),
    ("(-5)", "-5"), ("–7", "-7"), ("2,500.50", "2500.5"), (r"1{,}234{,}567", "1234567"), ("５０", "50"),
    # decimals, fractions, percents
    ("0.1250", r"\frac18"), (r"\tfrac{3}{4}", "0.75"), (r"\dfrac{10}{4}", r"\frac{5}{2}"), (r"\frac{6}{3}", "2"), ("22/7", r"\frac{22}{7}"),
    ("-1/2", r"-\frac12"), (r"\frac{1}{-2}", "-0.5"), ("33.33%", "33.33"), ("25%", r"\frac{1}{4}"), (r"25 \%", "25"), ("0.25", r"25\%"),
    ("7 percent", "7"), ("100%", "1"), ("1.41421", r"\sqrt{2}"), ("3.14159", r"\pi"), ("0.866025", r"\frac{\sqrt{3}}{2}"),
    # mixed numbers
    (r"3\frac{1}{2}", "3.5"), (r"2\tfrac{3}{4}", r"\frac{11}{4}"), ("5 1/4", "5.25"), (r"-1\frac12", "-1.5"), (r"3\frac{1}{2}", r"\frac72"),
    # roots, powers, pi, logarithms
    (r"\sqrt{16}", "4"), (r"\sqrt[3]{27}", "3"), (r"\sqrt{12}", r"2\sqrt{3}"), (r"\frac{2}{\sqrt{2}}", r"\sqrt{2}"),
    (r"\sqrt 2", r"\sqrt{2}"),
    (r"2^{\frac12}", r"\sqrt{2}"), (r"\sqrt{\frac{1}{4}}", "0.5"), (r"3+2\sqrt{2}", r"(1+\sqrt{2})^2"), ("2^{10}", "1024"),
    ("2^10", "1024"),
    (r"\frac{\pi}{2}", r"0.5\pi"), ("π/3", r"\frac{\pi}{3}"), (r"2\pi r", r"r\cdot 2\pi"), (r"\log_2 8", "3"), (r"\ln e", "1"),
    (r"e^{\ln 2}", "2"),
    ("5!", "120"), (r"\binom{6}{2}", "15"), (r"\cos 0", "1"), (r"\sin\frac{\pi}{6}", r"\frac12"), (r"\arctan 1", r"\frac{\pi}{4}"),
    # scientific notation
    (r"6.02 \times 10^{23}", "6.02e23"), ("1e-3", "0.001"), (r"5\cdot 10^{4}", "50000"), (r"3.0×10^8", "3e8"), (r"10^{-2}", "0.01"),
    # units, currency, degrees
    (r"\$1,250", "1250"), ("£3.50", "3.5"), ("20 dollars", "$20"), (r"12\text{ inches}", "12"), ("3 hours", "3 h"), ("45 mph", "45"),
    (r"9.8 \mathrm{~m/s^2}", "9.8"), (r"2\sqrt{3}\text{ cm}", r"2\sqrt{3}"), (r"10\pi \text{ square units}", r"10\pi"),
    (r"45^{\circ}", "45"),
    ("60 degrees", r"60^\circ"), ("4 pencils", "4"), (r"16\text{ cm}^2", "16"), ("5元", "5"), ("12 个", "12"), ("3.5厘米", "3.5"),
    # intervals, unions, inequalities
    (r"[0, \infty)", r"\left[0,\infty\right)"), ("(0.5,1)", r"\left(\frac12,1\right)"), (r"(0,1)\cup(2,3)", r"(2,3)\cup(0,1)"),
    (r"(0,1) ∪ (2,3)", r"(0,1)\cup(2,3)"), ("x>2", r"(2,\infty)"), ("2<x", "x > 2"), (r"x \ge 1", r"[1,\infty)"), ("1 < x < 2", "(1,2)"),
    (r"x\in[1,2]", "[1,2]"), (r"\{x \mid x < 3\}", r"(-\infty,3)"), (r"\{x|-2\leq x<1\}", "[-2,1)"),
    ("x<1 or x>2", r"(-\infty,1)\cup(2,\infty)"),
    (r"3 \le k \le 5", "[3,5]"), ("x+y<2", "2>x+y"),
    # sets, tuples, lists
    (r"\{3,1,2\}", r"\{1,2,3\}"), (r"\{106, 3\}", r"\{3,106\}"), ("(3, 106)", "(3,106)"), ("1; 2", "2, 1"), (r"1 \text{ and } 2", "1,2"),
    (r"\left\{\frac12, 3\right\}", r"\{0.5,3\}"), ("3 or 4", "4, 3"),
    (r"(\frac{1}{2}, \sqrt{4})", "(0.5, 2)"), (r"\langle", r"\langle"), ("(x,y)=(1,2)", "(1,2)"), (r"\lbrace 1,2\rbrace", r"\{1,2\}"),
    # matrices
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}"),
    (r"\begin{bmatrix}1\\2\end{bmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
    (r"\begin{pmatrix}0.5&1\end{pmatrix}", r"\begin{pmatrix}\frac12&1\end{pmatrix}"),
    # equations, plus-minus
    ("y = 2x+1", "y=1+2x"), ("n=12", "12"), (r"x_1 = 3", "3"), ("2x+3y=6", "4x+6y-12=0"), ("y=x+1", "x-y+1=0"),
    (r"\pm\sqrt{2}", r"\sqrt{2}, -\sqrt{2}"),
    (r"1\pm\sqrt{3}", r"1-\sqrt{3}, 1+\sqrt{3}"), ("±5", r"\pm 5"), (r"x=\pm 2", "-2, 2"), ("P(x) = x^2", "x^2"),
    # expressions
    ("x(x+1)", "x^2+x"), (r"\frac{x+1}{2}", r"\frac{x}{2}+\frac12"), ("(a+b)(a-b)", "a^2-b^2"), ("3+4i", "4i+3"),
    (r"\sqrt{1/n}", r"\frac{1}{\sqrt{n}}"),
    (r"\sin 2x", r"2\sin x\cos x"), (r"\frac{1}{x^{2}}", "x^{-2}"), ("2(n-1)", "2n-2"), (r"|x-1|", r"|1-x|"), ("-(a-b)", "b-a"),
    (r"e^{i\pi}", "-1"),
    ("tan x + sin x + cos x", "sin x + cos x + tan x"),
    ("200, 40", "40, 200"), ("a_{n} = 2n", "a_n = n+n"), ("Area = 12", "A = 12"), ("$5$ ft", "5"),
    ("x^2+C", "x^2+c"), ("ab", "ba"), (r"\alpha+\beta", r"\beta+\alpha"), ("a_1+a_2", "a_{2}+a_{1}"),
    # numerals with a base
    ("1011_2", "1011_{2}"), ("1011", "1011_2"), ("2A_{16}", "2a_{16}"),
    # multiple choice, text, Chinese punctuation
    (r"\text{(C)}", "C"), ("C: 15", "C"), ("(c)", "C"), ("D、20", "D"), (r"\mathrm{B}", "B"), ("**E**", "E"), ("No.", "no"),
    ("TRUE", "True"),
    (r"\text{no solution}", "No solution"), ("The Tuesday", "tuesday"), ("even", r"\text{even}"), ("I, II", "II, I"), ("（A）", "A"),
    ("１２。", "12"), ("｛1，2｝", r"\{2,1\}"), ("x＝3", "3"), ("【1，2】", "[1,2]"), ("１，２", "2,1"),
]  # fmt: skip
MORE_DIFFERENT = [
    (r"\sum_{n=0}^{9} t^n", "x^2+1"), ("I=2", "y=2"),
    ("1,000", "1"), ("100,000", "10,000"), ("1.000", "1000"), ("2.5", "25"), ("-3", "3"), ("12", "21"), ("1000001", "1000000"),
    ("0.05", "5"),
    ("5000%", "5"), ("0.5%", "0.5001"), ("33%", "1/3"), (r"\frac{1}{3}", "0.33"), (r"\frac{2}{3}", r"\frac{3}{2}"),
    (r"3\frac12", r"\frac32"),
    (r"\sqrt{3}", "3"), (r"\sqrt[3]{2}", r"\sqrt{2}"), (r"2\sqrt{3}", r"3\sqrt{2}"), (r"2\pi", r"\pi"), ("3.14", r"\pi"),
    (r"\pi^2", r"2\pi"),
    (r"3\times10^{8}", r"3\times10^{9}"), ("1e-3", "1e3"), ("10^{-20}", "10^{-21}"), (r"\frac{1}{2^{99}}", r"\frac{1}{2^{98}}"),
    ("5 km", "5 m"), ("5 kg", "5 g"), (r"2\sqrt{3}\text{ cm}", r"2\sqrt{3}\text{ km}"), (r"30^\circ", "45"), ("3 hours", "3 minutes"),
    ("(0,1]", "[0,1]"), (r"(0,\infty)", r"[0,\infty)"), (r"(0,1)\cup(2,3)", r"(0,1)\cup(2,4)"), ("x>2", r"[2,\infty)"), ("x<2", "x>2"),
    ("1<x<2", r"1<x\le 2"), ("x>2", r"(2,5)"), (r"\{1,2,3\}", r"\{1,2\}"), (r"\{1,2\}", r"\{1,2,2,3\}"), ("(1,2,3)", "(3,2,1)"),
    ("1,2", "1,3"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&2\\3&5\end{pmatrix}"),
    (r"\begin{pmatrix}1&2\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}2\\1\end{pmatrix}"),
    ("x=5", "x=-5"), ("2x+3y=6", "2x+3y=7"), ("x^2+y^2=1", "1"), (r"\pm 2", "2"), ("2", r"\pm 2"), ("y=x+1", "y=x-1"),
    ("x+y<2", r"x+y\le 2"),
    ("x+1", "x+2"), ("2n-2", "2"), ("a^2-b^2", "a^2+b^2"), ("2-3i", "2+3i"), ("x^2", "x^3"), ("ab", "a+b"), (r"\sin x", r"\cos x"),
    (r"e^{x}", r"e^{-x}"), (r"2^{100}", r"2^{100}+1"), (r"\frac{2^{2005}+1}{3\cdot 2^{2006}}", r"\frac{1}{3\cdot 2^{2006}}"), ("x", "y"),
    ("|x|", "-x"),
    ("1011_2", "1011_3"), ("1010_2", "1011_2"), ("A", "B"), ("(D)", "C"), ("A or B", "A"), ("E. 5", "5"), ("B", "5"), ("even", "odd"),
    ("Wednesday", "Thursday"), ("no solution", "0"), ("3", "no solution"), (r"\text{undefined}", "0"), ("0", r"\text{undefined}"),
    ("I, II", "I, III"),
    ("（1，2）", "(2,1)"), ("[1,2]", "(1,2)"), ("[31, 106)", "[31,105)"), ("12:00", "1:00"), (r"\frac{1}{0}", "1"), ("5,10", "510"),
    (r"\infty", r"-\infty"),
]  # fmt: skip

# KNOWN PUBLIC ERRORS OF OTHER GRADERS: (answer, gold, right verdict).
# Each was checked by running `verify(parse(rf"\boxed{{{gold}}}"), parse(rf"\boxed{{{answer}}}"))` with math-verify 0.9.0, which says the
# opposite; those with "$" were checked with both between dollars instead. Numbers are issues of huggingface/Math-Verify.
MATH_VERIFY_IS_WRONG = [
    # false negatives
    ("1 1/2", "1.5", True), ("0.3333", "1/3", True), ("3 million", "3000000", True), ("x > 2", r"(2,\infty)", True),  # one way only: #25
    ("[-2,1)", r"\{x|-2\leq x < 1\}", True), ("**73**", "73", True), ("**B**", "B", True),  # #76
    ("evelyn", "Evelyn", True), ("the east", "east", True), ("B. 12", "B", True), ("3.5e3", "3500", True), ("18 dollars", "18", True),
    ("1 000", "1000", True), (r"\sqrt{1/n}", r"\frac{1}{\sqrt{n}}", True),  # #64
    ("14.0 + -1.0i", "14 - i", True), ("-1 + exp(16)", "e^{16} - 1", True), ("pi/2", r"\frac{\pi}{2}", True),  # #69
    ("（1，2）", "(1,2)", True), ("５", "5", True), ("5元", "5", True), ("2^{0.5}", r"\sqrt{2}", True), (r"\ln 2", r"\log_e 2", True),
    (r"x<1 \text{ or } x>2", r"(-\infty,1)\cup(2,\infty)", True),
    # false positives
    (r"1, 2, \ldots, n", r"1, 3, 5, \ldots, 2n-1", False), (r"\frac{1}{2^{99}}", r"\frac{1}{2^{98}}", False),  # #14
    (r"\frac{2^{2005}+1}{3 \cdot 2^{2006}}", r"\frac{1}{3 \cdot 2^{2006}}", False),  # #14
    (r"1 - \frac{1}{\mathrm{e}}", r"1 + \frac{1}{\mathrm{e}}", False), (r"4\sqrt(2)", "4", False),  # "$": #14, #41
    ("10^{-20}", "10^{-21}", False), ("0.00000001", "0.00000002", False), ("5 km", "5 m", False), ("11_{2}", "11_{3}", False),
    ("1011_2", "1011_3", False),
]  # fmt: skip
# The same for Qwen2.5-Math's evaluation/grader.py (commit 29a82a8), read, not run. Each follows from a few of its lines: a relative
# tolerance of 1e-4 for whole numbers as well; percents by a hundred either way; brackets and braces removed before texts are compared;
# the last of the letters A to E anywhere in an answer is the choice; digits joined across commas.
QWEN_IS_WRONG = [
    ("1000001", "1000000", False), ("20240", "20241", False), ("0.05", "5", False), ("500", "5", False), ("1,2", "12", False),
    ("[1,2)", "(1,2]", False),
    ("(1,2)", "[1,2]", False), ("(x+1)2", "x+12", False), ("not A", "A", False), ("either B or A", "A", False), ("(1,2", "1,2)", False),
]  # fmt: skip

# Verdicts that were wrong in version 2, and what had to stay as it was.
REPAIRED_DIFFERENT = [
    # measures
    (r"3\text{ m/s}", r"3\text{ km/h}"), (r"5\text{ km/h}", r"5\text{ mph}"), (r"10\text{ ft/s}", r"10\text{ m/s}"),
    (r"3\text{ m/s}", r"3\text{ m}"), (r"4\text{ cm}^2", r"4\text{ cm}^3"), (r"3\text{ hours}", r"3\text{ days}"),
    (r"20\%", r"20^\circ"), ("12 apples and 3 pears", "12"), ("5 ft 3 in", "5"), (r"4\pi\text{ cm}^2", r"4\pi\text{ cm}^3"),
    # unknowns, repeating decimals, letters, sets
    ("y>3", "x>3"), ("≥ 3", "x > 3"), (r"0.\overline{6}", r"\frac{3}{5}"), (r"0.\overline{6}", "0.66"), ("0.34...", r"\frac13"),
    (r"\sin 30^\circ", r"\sin 60^\circ"), ("5=x", "6"), ("C", r"\text{(D)}\ 8"), (r"\textbf{(D) } 8", "9"), ("B, C", "AC"),
    ("A", "AC"), (r"\{x \mid x \ne 2\}", r"x \neq 3"), (r"\langle 1,2 \rangle", "(2,1)"), ("1,2,2", "1,2"), (r"\{1,2,2\}", "1,2"),
    ("no solution", r"(-\infty,\infty)"), ("3或4", "34"),
]  # fmt: skip
REPAIRED_SAME = [
    (r"5\text{ cm}", "5 cm"), ("5 km/h", "5"), ("3 m/s", "3 meters per second"), ("20", r"20^\circ"), ("4 cm^2", "4 square centimeters"),
    ("5 cm^{2}", "5 cm²"), ("60 mph", "60 miles per hour"), ("3 red apples", "3 apples"), (r"4\pi\text{ cm}^2", r"4\pi\text{ cm}^{2}"),
    (r"0.\overline{6}", r"\frac{2}{3}"), (r"0.\overline{3}", r"\frac13"), (r"0.\dot{3}", r"\frac13"), (r"0.1\overline{6}", r"\frac16"),
    (r"0.\dot{1}4285\dot{7}", "1/7"), ("0.333...", r"\frac13"), (r"0.333\ldots", r"\frac13"), ("0.333...", "0.333"),
    ("½", "1/2"), ("3½", "3.5"), ("x²", "x^2"), ("≥ 3", r"x \ge 3"), (r"\ge 3", r"[3,\infty)"), ("5=x", "5"),
    (r"\text{The answer is } 5", "5"), (r"\sin 30^\circ", "0.5"), (r"\cos(60^{\circ})", r"\frac12"), (r"2\tan 45°", "2"),
    ("D", r"\text{(D)}\ 8"), (r"\textbf{(D) } 8", "8"), ("A, C", "AC"), ("ABD", r"\text{A, B and D}"), ("A、C", "AC"),
    (r"\text{no solution}", r"\emptyset"), (r"\text{No real solutions}", "no solution"), (r"\varnothing", r"\text{No solution}"),
    (r"\text{all real numbers}", r"(-\infty,\infty)"), (r"\mathbb{R}", r"(-\infty, \infty)"),
    (r"\{x \mid x \ne 2\}", r"x \neq 2"), (r"\langle 1,2 \rangle", "(1,2)"), ("3或4", "3,4"), (r"$x=2$ or $x=3$", "2,3"),
    (r"\{1,2,2\}", r"\{1,2\}"), (r"\{1,2\}", r"\{2,1,1\}"), (r"**$\{x \mid x>0$ and $x \neq 1\}$**", r"$\{x \mid x>0$ and $x \neq 1\}$"),
]  # fmt: skip


def box(answer: str) -> str:
    return f"Therefore \\boxed{{{answer}}}."


@pytest.mark.parametrize(("answer", "gold"), SAME + MORE_SAME + REPAIRED_SAME)
def test_same(answer, gold):
    found = grade(box(answer), gold)
    assert found.verdict == "correct", found
    assert not found.rule.endswith("symbolic")


@pytest.mark.parametrize(("answer", "gold"), DIFFERENT + MORE_DIFFERENT + REPAIRED_DIFFERENT)
def test_different(answer, gold):
    found = grade(box(answer), gold)
    assert found.verdict == ("wrong" if answer else "unparsed"), found


def test_symbolic_table():
    cases = [(c, "correct") for c in SYMBOLIC_SAME] + [(c, "wrong") for c in SYMBOLIC_DIFFERENT]
    found = grade_many([box(a) for (a, _), _ in cases], [g for (_, g), _ in cases], timeout_s=10)
    wrong = [(c, want, v) for (c, want), v in zip(cases, found, strict=True) if v.verdict != want]
    assert not wrong


def test_plain_grading_starts_no_process():
    before = shared_pool().started
    for answer, gold in SAME + DIFFERENT[:20]:
        grade(box(answer), gold)
    assert shared_pool().started == before


@pytest.mark.parametrize(("answer", "gold", "right"), MATH_VERIFY_IS_WRONG + QWEN_IS_WRONG)
def test_where_other_graders_are_known_to_be_wrong(answer, gold, right):
    assert grade(box(answer), gold).verdict == ("correct" if right else "wrong")


EXTRACTED = [
    (r"So \boxed{5}.", "5", "boxed"), (r"\boxed{1} then \boxed{\frac{1}{\sqrt{2}}}", r"\frac{1}{\sqrt{2}}", "boxed"), 
    (r"\boxed 7", "7", "boxed"),
    (r"\fbox{9}", "9", "boxed"), (r"\boxed{\{1, 2\}}", r"\{1, 2\}", "boxed"), (r"\boxed{a} and \boxed{b", "a", "boxed"),
    (r"\boxed{\boxed{3}}", "3", "boxed"), (r"\boxed{\text{(A)}}", r"\text{(A)}", "boxed"),
    ("<think>4</think><answer>5</answer>", "5", "answer_tag"), ("<answer>1</answer> no: <answer> 2 </answer>", "2", "answer_tag"),
    ("<answer>cut off 5", "5", "last_number"), ("work\n#### 18", "18", "hash"), ("#### 1\n#### 2\nend 3", "2", "hash"), 
    ("####42", "42", "hash"),
    ("The answer is 12.", "12", "phrase"), ("The final answer is: $x=5$. Done 9", "$x=5$", "phrase"), ("Answer: **B**", "B", "phrase"),
    ("The answer is 3.5 cm. Yes.", "3.5 cm", "phrase"), ("答案是 5。", "5", "phrase"), ("答案：7", "7", "phrase"),
    ("He has 3 + 4 = 7 apples", "7", "last_number"), ("costs $1,234.50 now", "$1,234.50", "last_number"), ("it is -3", "-3", "last_number"),
    ("10-5", "5", "last_number"), ("about 1/2 of it", "1/2", "last_number"), ("50% of x1", "50%", "last_number"),
    (r"\boxed{\frac{1}{1+\frac{1}{2}}}", r"\frac{1}{1+\frac{1}{2}}", "boxed"), (r"\boxed{1}, \boxed{2}, \boxed{3}", "3", "boxed"),
    (r"\boxed {12}", "12", "boxed"), ("\\boxed{\n x = 4 \n}", "x = 4", "boxed"), (r"$\boxed{(-\infty, 3]}$", r"(-\infty, 3]", "boxed"),
    (r"\boxed{5} is not \boxed{\frac{1}{2", "5", "boxed"), (r"The answer is 7. \boxed{8}", "8", "boxed"),
    (r"\boxed{答案}", "答案", "boxed"),
    (r"\boxed{\text{a } b}", r"\text{a } b", "boxed"), (r"\boxed\pi", r"\pi", "boxed"), ("}}}\\boxed{6}", "6", "boxed"),
    ("<answer>\n42\n</answer>", "42", "answer_tag"), ("<answer>7</answer>\n#### 8", "7", "answer_tag"), ("#### $1,200\n", "$1,200", "hash"),
    ("#### **9**", "9", "hash"), ("#### 7.", "7", "hash"), ("Thus the answer is\n\\[\n x=5 \n\\]\nas said.", "x=5", "phrase"),
    ("the answer is: $$\n5\n$$", "5", "phrase"), ("ANSWER IS 4", "4", "phrase"), ("Final answer: 3/4", "3/4", "phrase"),
    ("The answer = 6!", "6", "phrase"),
    ("The answer is 1. No, the answer is 2.", "2", "phrase"), ("所以答案为：12。谢谢", "12", "phrase"),
    ("答案是\\frac{1}{2}", r"\frac{1}{2}", "phrase"),
    ("共有 15 个", "15", "last_number"), ("3.14 is near", "3.14", "last_number"), ("from 2 to .5", ".5", "last_number"),
    ("total: 1,234,567", "1,234,567", "last_number"), ("x = -7.25.", "-7.25", "last_number"), ("v2 has 30 parts", "30", "last_number"),
]  # fmt: skip


@pytest.mark.parametrize(("response", "answer", "rule"), EXTRACTED)
def test_extract(response, answer, rule):
    assert extract(response) == (answer, rule)


@pytest.mark.parametrize(
    "response", ["", "   ", "no number here", r"\boxed{}", r"\boxed{\frac{}", r"\boxed{}}{{}", "x1 y2z", "####", "<answer></answer>"]
)
def test_nothing_to_extract(response):
    assert extract(response) is None
    assert grade(response, "5") == ("unparsed", None, "not_found")


def test_rules_limit_where_an_answer_may_stand():
    text = "#### 4\nThe answer is 5"
    assert extract(text) == ("4", "hash")
    assert extract(text, ("phrase",)) == ("5", "phrase")
    assert extract(text, ("boxed",)) is None
    assert grade(text, "5", rules=("phrase", "boxed")).verdict == "correct"
    with pytest.raises(ConfigError, match="no extraction rule 'hsh', did you mean 'hash'"):
        grade(text, "5", rules=("hsh",))
    with pytest.raises(ConfigError, match="rules is empty"):
        grade(text, "5", rules=())


def test_tolerance_is_a_setting():
    assert grade(box("0.33"), "1/3").verdict == "wrong"
    assert grade(box("0.33"), "1/3", rel_tol=0.02).verdict == "correct"
    assert grade(box("0.33333"), "1/3", rel_tol=0).verdict == "wrong"


OPTIONS = ("12", r"\frac{1}{2}", "15 cm", r"$x^2 + 1$", "none of these")
CHOSEN = [  # (answer, gold, verdict) with OPTIONS
    ("A", "A", True), ("(B)", "B", True), ("C) 15 cm", "C", True), ("option C", "C", True), ("B", "A", False), ("(A) 15 cm", "C", False),
    ("12", "A", True), ("12.0", "A", True), ("0.5", "B", True), (r"\dfrac12", "B", True), ("15", "C", True), (r"15\text{ cm}", "C", True),
    ("1+x^2", "D", True), ("None of these", "E", True), ("15 cm", "A", False), ("12", "B", False), ("x^2", "D", False), ("99", "A", False),
    ("none of these", "A", False), (r"\text{(E)}", "E", True), ("e", "E", True), ("F", "A", False), ("(C).", "C", True),
    (r"$\frac{1}{2}$", "(B)", True),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "gold", "right"), CHOSEN)
def test_choices(answer, gold, right):
    assert grade(box(answer), gold, choices=OPTIONS).verdict == ("correct" if right else "wrong")


@pytest.mark.parametrize(
    "answer", ["C", r"\text{C}", r"\textbf{C}", r"\textbf{(C)}", r"(\text{C})", r"\mathrm{(C)}", r"\textbf{(C) } 15", "15"]
)
@pytest.mark.parametrize("gold", ["15", "C", r"\textbf{(C)}"])
def test_letters_however_they_are_written(answer, gold):
    texts = ("12", "13", "15", "16")
    assert grade(box(answer), gold, choices=texts).verdict == "correct"
    assert grade(box(answer), gold, choices=("12", "15", "13", "16")).verdict == (
        "correct" if (answer == "15") == (gold == "15") else "wrong"
    )


@pytest.mark.parametrize(
    ("response", "gold"),
    [
        ("The correct option is (C).", "C"),
        ("故选 C。", "C"),
        ("故选：B", "B"),
        ("故选择D.", "D"),
        ("The answer is 12 apples, since 3+9 = 12.", "12"),
        ("The answer is 7 because 3+4 = 7.", "7"),
        ("答案为：$x=2$ 或 $x=3$。", "2,3"),
        ("The answer is (B), because it is longer.", "B"),
        ("The answer is yes, since 2+2=4.", "yes, since 2+2=4"),
        ("The answer is 93 (we take 3 because it is odd).", "93 (we take 3 because it is odd)"),
    ],
)
def test_answers_in_sentences(response, gold):
    assert grade(response, gold).verdict == "correct"
    assert grade(response, "E").verdict == "wrong"


def test_choices_are_an_items_own():
    texts = [("1", "2"), None, ("2", "1")]
    found = grade_many([box("2")] * 3, ["B", "2", "B"], choices=texts)
    assert [v.verdict for v in found] == ["correct", "correct", "wrong"]
    for answer, right in (
        ("B", True),
        ("(B) cup", True),
        ("cup", True),
        ("the cup", True),
        ("A", False),
        ("bowl", False),
        ("B) bowl", True),
    ):
        assert (grade(box(answer), "cup", choices=["bowl", "cup"]).verdict == "correct") is right, answer  # a gold that is an option's text
    assert grade(box("15"), "C").verdict == "wrong"  # without the options nobody can know
    twice = grade(box("5"), "A", choices=("5", "5", "6"))
    assert twice.verdict == "wrong"  # two options have this text
    with pytest.raises(ValueError, match=r"zip\(\)"):
        grade_many([box("1")], ["A"], choices=[None, None])


CHEAP_HOSTILE = [
    r"\boxed{" + "{" * 100_000 + "}" * 100_000 + "}", r"\boxed{" * 50_000, "x" * 1_000_000, "9" * 1_000_000, 
    r"\boxed{" + "9" * 60_000 + "}",
    "1," * 500_000 + "x", "1,111" * 100_000 + "x", "\x00\x01\x1b[31m\boxed{5}\x7f", "}" * 100_000, "answer is " * 50_000, "#" * 200_000,
    "<answer>" * 50_000, r"\boxed{" + "(" * 1500 + "}", "$" * 100_000, r"\boxed{" + " and ".join("x" * 300) + "}", "-" * 100_000,
    r"\boxed{1e999999999}", r"\boxed{10^{99999999}}", r"\boxed{" + "a" * 1900 + "=5}", r"\boxed{" + "cm " * 300 + "}", "\ud800 5",
]  # fmt: skip


@pytest.mark.parametrize("response", CHEAP_HOSTILE, ids=range(len(CHEAP_HOSTILE)))
def test_hostile_text_is_read_in_no_time(response):
    start = time.monotonic()
    extract(response)
    grade(response, "17")
    assert time.monotonic() - start < 3.0


def test_hostile_expressions_cost_one_time_limit_each_and_nothing_else():
    bombs = [r"9^{9^{9^{9}}}", r"\sqrt{" * 30 + "2" + "}" * 30, r"\frac{1}{" * 30 + "2" + "}" * 30]
    fair = [(rf"\sqrt{{{4 * k * k}}}+x", f"{2 * k}+x") for k in range(1, 6)]
    grade(box("x+1"), "1+x")  # processes are warm
    responses = [box(b) for b in bombs] + [box(a) for a, _ in fair]
    found = grade_many(responses, ["5"] * len(bombs) + [g for _, g in fair], timeout_s=2)
    assert found[0].verdict == "timeout"
    assert all(v.verdict in ("wrong", "timeout") for v in found[: len(bombs)])
    assert [v.verdict for v in found[len(bombs) :]] == ["correct"] * len(fair)


def hostile(path) -> list[str]:
    """Answers that would hang, crash, fill memory, or make a file where text is evaluated."""
    code = f"__import__('os').system('touch {path}')"
    return [
        r"9^{9^{9^{9}}}", "9**9**9**9", "1000000!", "((5!)!)!", r"\binom{10^9}{10^8}", "{" * 100_000 + "5" + "}" * 100_000, "7" * 1_000_000,
        "x+" * 500_000 + "x", r"\sqrt{" * 200 + "2" + "}" * 200, r"\sqrt" * 400 + "2", r"\frac{1}{" * 60 + "2" + "}" * 60, "x^" * 300 + "x",
        "-" * 5000 + "1", "(" * 39 + "x" + ")" * 39, r"\sin" * 300 + "x", "2^{2^{2^{2^{2^{2}}}}}", r"\int_0^{10^9} \frac{1}{x^x} dx",
        r"\sum_{n=1}^{10^{12}} \frac{1}{n^3}", r"\prod_{k=1}^{10^9} k", code, f"$({code})$", f"\\text{{{code}}}", f"x={code}",
        f"\\sqrt{{{code}}}",
        f"eval(\"{code}\")", f"{{{{{code}}}}}", "\x00\x01\x07\x1b[2J", "\ud800", "\u202e5\u202c", "}{)(][", r"\left(\left(\right",
        r"\begin{pmatrix}1&",
        r"\end{pmatrix}\begin{pmatrix}", "$" * 999, "\\" * 999, "|" * 99, "_^" * 99, "," * 299, "=" * 299, "<" * 299, r"\frac" * 99,
        r"x^{x^{x^{x^{x}}}}=9^9^9",
    ]  # fmt: skip


def test_hostile_answers_run_nothing_and_cost_one_time_limit_at_most(tmp_path):
    made = tmp_path / "made"
    pool = KillablePool(2, cpu_clock=True)
    fair = [(rf"{k}\sqrt{{x^2}} \otimes y", rf"{k}\sqrt{{x^2}} \otimes y+1") for k in range(2, 6)]
    golds = ("17", r"\frac{x+1}{2}", "(1,2]")
    answers = hostile(made)
    try:
        grade_many([box(a) for a, _ in fair], [g for _, g in fair], pool=pool)  # processes are warm
        for k, gold in enumerate(golds):
            responses = [box(a) for a in answers]
            start = time.monotonic()
            found = grade_many(responses, [gold] * len(responses), pool=pool, timeout_s=1.0)
            late = sum(v.verdict == "timeout" for v in found)
            assert all(v.verdict in ("wrong", "timeout", "unparsed") for v in found), [v for v in found if v.verdict == "correct"]
            assert time.monotonic() - start < 15 + 4 * late, k
    finally:
        pool.close()
    assert not made.exists()


@pytest.mark.slow
def test_hostile_answers_as_golds_and_against_themselves(tmp_path):
    answers = hostile(tmp_path / "made")
    assert {v.verdict for v in grade_many(answers, answers, timeout_s=1.0)} <= set(VERDICTS)
    assert {v.verdict for v in grade_many([box("5")] * len(answers), answers, timeout_s=1.0)} <= {"wrong", "correct", "timeout"}
    assert not (tmp_path / "made").exists()


def test_a_hang_delays_the_answers_around_it_by_one_time_limit():
    fair = [(rf"\vec{{a}}+{k}+{k}\cdot x", rf"\vec{{a}}+{k}\cdot x+{k}") for k in range(2, 30)]
    pool = KillablePool(2, cpu_clock=True)
    try:
        grade(box(r"\vec{a}+1"), r"1+\vec{a}")
        grade_many([box(r"\vec{a}+1")] * 2, [r"1+\vec{a}", r"1+1+\vec{a}"], pool=pool)
        start = time.monotonic()
        alone = grade_many([box(a) for a, _ in fair], [g for _, g in fair], pool=pool)
        usual = time.monotonic() - start
        again = [(a.replace("x", "y"), g.replace("x", "y")) for a, g in fair]
        again.insert(len(again) // 2, (r"9^{9^{9^{9}}}", "17"))
        start = time.monotonic()
        found = grade_many([box(a) for a, _ in again], [g for _, g in again], pool=pool, timeout_s=2.0)
        assert time.monotonic() - start < 2 * usual + 4 * 2.0 + 3  # a time limit counts computing, up to four times as long by the clock
        assert [v.verdict for v in found if v.verdict != "timeout"] == [v.verdict for v in alone]
        assert [v.verdict for v in found].count("timeout") == 1
    finally:
        pool.close()


def test_grading_from_threads():
    """No signal handler is needed: only a main thread may set one."""
    cases = [(box(rf"\vec{{a}}+{k}+1"), rf"\vec{{a}}+1+{k}") for k in range(2, 8)] + [(box("1/2"), "0.5")]

    def work(_):
        assert threading.current_thread() is not threading.main_thread()
        return [v.verdict for v in grade_many([a for a, _ in cases], [g for _, g in cases])]

    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(work, range(8)))
    assert all(f == found[0] for f in found)
    assert "timeout" not in found[0]


WITHOUT_SIGNALS = """
import json, signal, sys, threading

def refuse(*args):
    raise ValueError("signals are not for this process")

signal.signal = signal.alarm = signal.setitimer = refuse
from rlkit.rewards.grading import grade_many
out = []
run = lambda: out.extend(v.verdict for v in grade_many(*json.loads(sys.argv[1]), timeout_s=2.0))
thread = threading.Thread(target=run)
thread.start()
thread.join()
print(json.dumps(out))
"""


def test_grading_where_signals_cannot_be_used():
    cases = [[box("1/2"), box(r"9^{9^{9^{9}}}"), box(r"\int_0^1 x dx"), box("3")], ["0.5", "17", r"\frac{1}{2}", "4"]]
    done = subprocess.run([sys.executable, "-c", WITHOUT_SIGNALS, json.dumps(cases)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found[:2] == ["correct", "timeout"]
    assert found[3] == "wrong"


# --- random answers ----------------------------------------------------------------------------------------------------------------------

NUMBERS = st.one_of(
    st.integers(-(10**30), 10**30).map(str),
    st.floats(allow_nan=True).map(repr),
    st.from_regex(r"-?[0-9]{1,3}(,[0-9]{3}){1,3}", fullmatch=True),
    st.from_regex(r"[0-9]{1,4}/[0-9]{1,3}", fullmatch=True),
    st.from_regex(r"[0-9]{1,2}(\.[0-9]{0,3})?(e[+-]?[0-9]{1,9}|\\?%)", fullmatch=True),
)
PIECES = st.sampled_from(
    [
        *(
            r"\frac",
            r"\dfrac",
            r"\sqrt",
            r"\sqrt[3]",
            r"\pi",
            r"\infty",
            r"\cup",
            r"\pm",
            r"\le",
            r"\geq",
            r"\neq",
            r"\in",
            r"\mid",
            r"\text{",
        ),
        *(
            r"\mathrm{",
            r"\left(",
            r"\right)",
            r"\left[",
            r"\right]",
            r"\{",
            r"\}",
            r"\%",
            r"\$",
            r"^\circ",
            r"\\",
            r"\begin{pmatrix}",
            " & ",
        ),
        *(
            r"\end{pmatrix}",
            r"\begin{cases}",
            r"\end{cases}",
            r"\alpha",
            r"\sin",
            r"\log_2",
            r"\ln",
            r"\sum_{k=1}^n",
            r"\int",
            r"\binom{5}{2}",
        ),
        *(
            r"\cdot",
            r"\times",
            r"\boxed{",
            r"\boxed",
            "<answer>",
            "</answer>",
            "####",
            "answer",
            "答案是",
            "the answer is",
            " cm",
            " dollars",
        ),
        *(" apples", " and ", " or ", "a_1", "(B)", "C.", "yes", "no", "（", "）", "，", "。", "５", "½", "²", "√", "±", "∞", "∪", "°"),
        *"{}()[]|<>=+-*/^_!,;:.%$xynieA",
    ]
)
LATEX = st.lists(st.one_of(PIECES, NUMBERS, st.sampled_from([" ", "\n"])), max_size=14).map("".join)
TWO = [r"\frac{%s}{%s}", "%s^{%s}", "(%s, %s)", "%s+%s", r"%s \cup %s", r"\{%s, %s\}", "%s=%s", r"\begin{pmatrix}%s&%s\end{pmatrix}"]
ONE = [r"\sqrt{%s}", "-%s", "|%s|", r"\text{%s}", "[%s", "%s!"]


def fill(parts) -> str:
    """A template with its places filled in."""
    template, *inner = parts
    for text in inner:
        template = template.replace("%s", text, 1)
    return template


NESTED = st.recursive(
    st.one_of(NUMBERS, st.sampled_from(["x", "y", r"\pi", "2"])),
    lambda inner: st.one_of(st.tuples(st.sampled_from(TWO), inner, inner).map(fill), st.tuples(st.sampled_from(ONE), inner).map(fill)),
    max_leaves=6,
)
UNICODE = st.text(st.characters(), max_size=30)  # control characters and lone surrogates, too
ANSWERS = st.one_of(LATEX, NESTED, NUMBERS, UNICODE)
WRAPPED = st.tuples(
    st.sampled_from([r"So \boxed{%s}.", "The answer is %s.", "#### %s", "<answer>%s</answer>", r"\boxed{%s", "%s"]), ANSWERS
)
RESPONSES = st.tuples(WRAPPED, ANSWERS).map(lambda t: (t[0][0].replace("%s", t[0][1]), t[1]))
BATCH = 50  # pairs of (response, gold) an example


def check_random(pairs) -> None:
    found = grade_many([r for r, _ in pairs], [g for _, g in pairs], timeout_s=0.3, pool=fuzz_pool())
    assert len(found) == len(pairs)
    assert {v.verdict for v in found} <= set(VERDICTS)
    assert all((v.extracted is None) == (v.verdict == "unparsed") for v in found)
    for response, answer in pairs[:1]:
        grade_many([response], [answer], choices=[("1", answer, "x")], timeout_s=0.3, pool=fuzz_pool())


def fuzz_pool() -> KillablePool:
    return shared_pool()


FUZZ = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}


@settings(max_examples=30, derandomize=True, **FUZZ)
@given(st.lists(RESPONSES, min_size=BATCH, max_size=BATCH))
def test_random_answers_get_a_verdict(pairs):
    check_random(pairs)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=1000, **FUZZ)
@given(st.lists(RESPONSES, min_size=BATCH, max_size=BATCH))
def test_fifty_thousand_random_answers_get_a_verdict(pairs):
    check_random(pairs)
