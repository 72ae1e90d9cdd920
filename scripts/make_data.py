"""Make the task sets that rlkit ships: ``eval/data/<name>/{train,test}.jsonl``.

    python scripts/make_data.py [--out eval/data]

Every set is a function of its seed alone, so running the script again gives the same bytes. Within a set no problem occurs twice, and none
is in both splits: problems are told apart by a *key* that ignores wording (the order of two summands, the names in a story).

    arithmetic_easy   levels 1-3: sums with one- and two-digit numbers, two-digit differences
    arithmetic        level 4: three-digit sums, what the bundled tiny model was trained on
    arithmetic_hard   levels 5-7: four-digit sums, two-digit products, mixed expressions with brackets
    countdown         reach a target from three or four numbers, each used once
    word_problems     short stories of one or two steps
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Maker = Callable[[random.Random], tuple[Hashable, Row]]  # -> (key, row)

TRAIN, TEST = 2000, 256  # rows


def pick(rng: random.Random, low: int, high: int) -> int:
    """An integer in [low, high]. Uses only ``random()``, whose stream Python promises not to change."""
    return low + int(rng.random() * (high - low + 1))


def choose(rng: random.Random, items: Any) -> Any:
    return items[pick(rng, 0, len(items) - 1)]


def _plain(level: int, expression: str, value: int, key: Hashable) -> tuple[Hashable, Row]:
    return (level, key), {"question": f"What is {expression}?", "answer": str(value), "level": level}


def three_digit_sum(rng: random.Random) -> tuple[Hashable, Row]:
    a, b = pick(rng, 100, 999), pick(rng, 100, 999)
    return _plain(4, f"{a} + {b}", a + b, (min(a, b), max(a, b)))


def easy(rng: random.Random) -> tuple[Hashable, Row]:
    level = pick(rng, 1, 3)
    if level == 1:
        a, b = pick(rng, 1, 9), pick(rng, 10, 99)
        if rng.random() < 0.5:
            a, b = b, a
    else:
        a, b = pick(rng, 10, 99), pick(rng, 10, 99)
    if level == 3:
        a, b = max(a, b), min(a, b)
        return _plain(level, f"{a} - {b}", a - b, (a, b))
    return _plain(level, f"{a} + {b}", a + b, (min(a, b), max(a, b)))


def hard(rng: random.Random) -> tuple[Hashable, Row]:
    level = pick(rng, 5, 7)
    if level == 5:
        a, b = pick(rng, 1000, 9999), pick(rng, 1000, 9999)
        return _plain(level, f"{a} + {b}", a + b, (min(a, b), max(a, b)))
    if level == 6:
        a, b = pick(rng, 11, 99), pick(rng, 11, 99)
        return _plain(level, f"{a} * {b}", a * b, (min(a, b), max(a, b)))
    a, b, c, d = pick(rng, 10, 99), pick(rng, 10, 99), pick(rng, 2, 9), pick(rng, 10, 99)
    return _plain(level, f"({a} + {b}) * {c} - {d}", (a + b) * c - d, (min(a, b), max(a, b), c, d))


def countdown(rng: random.Random) -> tuple[Hashable, Row]:
    """Combine the numbers by random steps that keep every value a positive integer; the last value is the target."""
    while True:
        numbers = [pick(rng, 2, 25) for _ in range(pick(rng, 3, 4))]
        pool = [(n, str(n)) for n in numbers]
        while len(pool) > 1:
            (a, left), (b, right) = pool.pop(pick(rng, 0, len(pool) - 1)), pool.pop(pick(rng, 0, len(pool) - 1))
            if a < b:
                (a, left), (b, right) = (b, right), (a, left)
            operation = choose(rng, "++--*/")
            if operation == "/" and (b == 0 or a % b):
                operation = "-"
            value = {"+": a + b, "-": a - b, "*": a * b, "/": a // b if b else 0}[operation]
            pool.append((value, f"({left} {operation} {right})"))
        target, solution = pool[0]
        if 10 <= target <= 100 and target not in numbers:
            break
    question = (
        f"Use each of the numbers {', '.join(map(str, numbers))} exactly once, with +, -, *, / and brackets, "
        f"to write an expression that equals {target}."
    )
    row = {"question": question, "answer": str(target), "numbers": numbers, "target": target, "solution": solution[1:-1]}
    return (tuple(sorted(numbers)), target), row


NAMES = ("Ada", "Ben", "Chidi", "Dara", "Elif", "Farid", "Grace", "Hugo", "Ines", "Jun", "Kofi", "Lena", "Mateo", "Nia", "Omar", "Priya")
THINGS = ("apples", "books", "buttons", "cards", "coins", "marbles", "pencils", "shells", "stamps", "stickers")
PLACES = ("box", "bag", "jar", "basket", "crate", "tin")


def word_problem(rng: random.Random) -> tuple[Hashable, Row]:
    kind = pick(rng, 0, 9)
    name, other = choose(rng, NAMES), choose(rng, NAMES)
    while other == name:
        other = choose(rng, NAMES)
    things, place = choose(rng, THINGS), choose(rng, PLACES)
    a, b, c = pick(rng, 12, 60), pick(rng, 2, 11), pick(rng, 2, 9)
    key: tuple[int, ...]
    if kind == 0:
        key, value = (a, b), a + b
        text = f"{name} has {a} {things}. {other} gives {name} {b} more. How many {things} does {name} have now?"
    elif kind == 1:
        key, value = (a, b), a - b
        text = f"{name} had {a} {things} and gave {b} of them to {other}. How many {things} does {name} have left?"
    elif kind == 2:
        key, value = (a, c), a * c
        text = f"There are {a} {things} in each {place}. How many {things} are there in {c} of them?"
    elif kind == 3:
        key, value = (a, b), a
        text = f"{name} shares {a * b} {things} equally among {b} friends. How many {things} does each friend get?"
    elif kind == 4:
        key, value = (a, b, c), a + b * c
        text = f"{name} has {a} {things} and buys {c} packs with {b} {things} each. How many {things} does {name} have in all?"
    elif kind == 5:
        key, value = (a, b, c), a * 5 - b * c
        text = f"{name} has {a * 5} cents and buys {c} {things} for {b} cents each. How many cents are left?"
        if value < 0:
            return word_problem(rng)
    elif kind == 6:
        key, value = (a, c), a + a * c
        text = f"{name} has {a} {things}. {other} has {c} times as many. How many {things} do {name} and {other} have together?"
    elif kind == 7:
        key, value = (a, b, c), a - b + c
        text = (
            f"A bus leaves with {a} people. At the first stop {b} get off and {c} get on. How many people are on the bus after that stop?"
        )
    elif kind == 8:
        key, value = (a, b), 2 * (a + b)
        text = f"A garden is {a} metres long and {b} metres wide. How many metres of fence go around it?"
    else:
        key, value = (a, b, c), a + b * c
        text = f"{name} reads {a} pages on Monday and {b} pages on each of the next {c} days. How many pages does {name} read in all?"
    return (kind, *key), {"question": text, "answer": str(value), "steps": 1 if kind < 4 else 2}


SETS: dict[str, tuple[int, Maker]] = {  # name -> (seed, maker)
    "arithmetic": (1, three_digit_sum),
    "arithmetic_easy": (2, easy),
    "arithmetic_hard": (3, hard),
    "countdown": (4, countdown),
    "word_problems": (5, word_problem),
}


def make(name: str) -> dict[str, list[Row]]:
    """The rows of both splits of one set; test rows are drawn first, so that more train rows never change them."""
    seed, maker = SETS[name]
    rng, seen = random.Random(seed), set()
    splits: dict[str, list[Row]] = {}
    for split, size in (("test", TEST), ("train", TRAIN)):
        rows: list[Row] = []
        while len(rows) < size:
            key, row = maker(rng)
            if key not in seen:
                seen.add(key)
                rows.append({"id": f"{name}-{split}-{len(rows):04d}", **row})
        splits[split] = rows
    return splits


def write(out: Path) -> None:
    """Write every set below ``out``."""
    for name in SETS:
        folder = out / name
        folder.mkdir(parents=True, exist_ok=True)
        for split, rows in make(name).items():
            text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            (folder / f"{split}.jsonl").write_text(text, encoding="utf-8", newline="\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "eval" / "data")
    write(parser.parse_args().out)
