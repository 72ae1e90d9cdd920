"""Task sets: questions with answers, in a seeded order that a resumed run takes up again."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np

from rlkit import templates
from rlkit.context import active_owner, derive_seed
from rlkit.errors import DataError
from rlkit.formats import from_fields, read_row
from rlkit.reprs import html_table
from rlkit.taskfiles import find
from rlkit.types import Prompt

_SHOWN = 5  # rows of the HTML table


class Tasks:
    """Prompts of one split of a set, and a position in their seeded order.

    ``tasks[i]``, iteration and `take` go by the set's own order and move nothing. `batch` goes through a new permutation each epoch.
    """

    def __init__(self, name: str, split: str, prompts: Sequence[Prompt], *, template: str = "auto", seed: int = 0) -> None:
        """``prompts`` carry ``template`` already; it is named here for the repr.

        Raises:
            DataError: no prompts, two with the same id, or an unknown template.
        """
        if not prompts:
            raise DataError(f"The task set {name}/{split} is empty.")
        seen: set[str] = set()
        twice = [p.id for p in prompts if p.id in seen or seen.add(p.id)]  # type: ignore[func-returns-value]
        if twice:
            raise DataError(f"The task set {name}/{split} has {len(twice)} ids more than once, the first of them {twice[0]!r}.")
        self.name, self.split, self.seed, self.template = name, split, seed, templates.check(template)
        self._prompts = tuple(prompts)
        self._epoch, self._at = 0, 0
        self._last: list[int] = []  # of the epoch before, drawn into the batch that began this epoch
        self._order = self._permutation()

    def __len__(self) -> int:
        return len(self._prompts)

    @overload
    def __getitem__(self, i: int) -> Prompt: ...
    @overload
    def __getitem__(self, i: slice) -> list[Prompt]: ...
    def __getitem__(self, i: int | slice) -> Prompt | list[Prompt]:
        return list(self._prompts[i]) if isinstance(i, slice) else self._prompts[i]

    def __iter__(self) -> Iterator[Prompt]:
        return iter(self._prompts)

    def take(self, n: int, start: int = 0) -> list[Prompt]:
        """The ``n`` prompts from ``start`` on, in the set's order. Moves nothing: called again, it gives the same.

        Raises:
            DataError: there are not so many.
        """
        if n < 1 or start < 0 or start + n > len(self):
            raise DataError(
                f"take({n}, start={start}) asks for prompts {start} to {start + n - 1}; {self.name}/{self.split} has {len(self)}."
            )
        return list(self._prompts[start : start + n])

    def batch(self, n: int) -> list[Prompt]:
        """The next ``n`` prompts of the seeded order, never one twice; each epoch has every prompt once.

        A batch that takes the rest of an epoch is filled from the next one, whose first prompts are then others than that rest.
        Within a step of a run, the run restores the position when the step is done again or the run resumes.

        Raises:
            DataError: the batch is larger than the set.
        """
        if not 1 <= n <= len(self):
            raise DataError(f"batch({n}): a batch has from 1 to {len(self)} prompts, all that {self.name}/{self.split} has.")
        owner = active_owner()
        if owner is not None:
            owner.register_stateful(f"tasks/{self.name}/{self.split}", self)
        drawn = [int(i) for i in self._order[self._at : self._at + n]]
        self._at += len(drawn)
        if len(drawn) < n:
            self._epoch, self._at, self._last = self._epoch + 1, n - len(drawn), drawn
            self._order = self._permutation()
            drawn = drawn + [int(i) for i in self._order[: self._at]]
        return [self._prompts[i] for i in drawn]

    def state(self) -> dict[str, Any]:
        """The position in the order, as JSON-ready values, with what it belongs to."""
        return {"fingerprint": self.fingerprint, "seed": self.seed, "epoch": self._epoch, "at": self._at, "last": list(self._last)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go to a position that `state` gave.

        Raises:
            DataError: it belongs to another set or another seed, or is no position.
        """
        if set(state) != {"fingerprint", "seed", "epoch", "at", "last"}:
            raise DataError(f"This is no position in a task set: it has the keys {', '.join(map(str, state)) or 'none'}.")
        for key, mine in (("fingerprint", self.fingerprint), ("seed", self.seed)):
            if state[key] != mine:
                raise DataError(
                    f"The saved position belongs to another task set: its {key} is {state[key]!r}, that of {self.name}/{self.split} here "
                    f"is {mine!r}. Load the same rows, limit and seed as before, or start a new run."
                )
        self._epoch, self._at, self._last = int(state["epoch"]), int(state["at"]), [int(i) for i in state["last"]]
        self._order = self._permutation()

    def _permutation(self) -> np.ndarray:
        """(len,) int64: this epoch's order. Those in ``_last`` go to its end."""
        order = np.random.default_rng(derive_seed(self.seed, self._epoch)).permutation(len(self))
        late = np.isin(order, self._last)
        return np.concatenate([order[~late], order[late]])

    @functools.cached_property
    def fingerprint(self) -> str:
        """16 hex digits over ids, questions and answers, in order."""
        digest = hashlib.blake2b(digest_size=8)
        for p in self._prompts:
            digest.update(repr((p.id, p.question, p.answer)).encode())
        return digest.hexdigest()

    def __repr__(self) -> str:
        return f"Tasks({self.name}/{self.split}, {len(self)} prompts, template {self.template!r}, seed {self.seed}, epoch {self._epoch})"

    def _repr_html_(self) -> str:
        shown = self._prompts[:_SHOWN]
        keys = [k for k in ("level", "steps", "subject") if any(k in p.meta for p in shown)]
        rows = [(p.id, p.question, "" if p.answer is None else p.answer, *(p.meta.get(k, "") for k in keys)) for p in shown]
        if len(self) > len(shown):
            rows.append((f"… {len(self) - len(shown)} more", "", "", *("" for _ in keys)))
        return html_table(("prompt", "question", "answer", *keys), rows, caption=repr(self))


def load_tasks(
    name_or_path: str | Path,
    split: str = "train",
    *,
    fields: Mapping[str, str] | None = None,
    template: str | None = None,
    seed: int = 0,
    limit: int | None = None,
    level: int | str | Collection[int | str] | None = None,
    data_dir: str | Path | None = None,
    solutions: bool = False,
) -> Tasks:
    """Load a task set.

    Args:
        name_or_path: a set that rlkit ships (such as "arithmetic", "countdown", "word_problems"); a public maths set (such as "gsm8k")
            that lies in ``data_dir`` or that ``rlkit data get`` fetched; a .jsonl or .parquet file, or a folder with one a split; a
            Hugging Face hub id ("org/name", or "org/name:config").
        fields: which columns hold what, such as ``{"question": "Body+Question", "answer": "Answer", "id": "ID"}``. Only the question is
            needed. Without ``fields``: "question" and "answer", or what `rlkit.formats.SETS` says of a public set.
        template: an entry of `rlkit.templates`; None: the model's chat template when it has one, else the plain question.
        seed: of the order in which `Tasks.batch` draws.
        limit: only the first so many rows.
        level: only rows whose field "level" is this, or among these: ``level=range(1, 4)``. "Level 3" counts as 3.
        data_dir: where ``<name>/<split>.jsonl`` (or .parquet) is looked for first; then among the shipped sets, then in
            ``$RLKIT_HOME/data``.
        solutions: keep worked solutions as ``Prompt.meta["solution"]``, where the set has them (gsm8k, math, math500, minerva_math, or a
            file whose ``fields`` name a column "solution"): for examples in a prompt.

    Raises:
        DataError: no such set, split or file; a malformed row (file and line named); a field that is missing; an empty set.
    """
    if limit is not None and limit < 1:
        raise DataError(f"limit is {limit}; it must be at least 1, or None for all rows.")
    style = templates.check("auto" if template is None else template)
    source = find(name_or_path, split, data_dir)
    form = source.form if fields is None else from_fields(fields)
    wanted = None if level is None else {level} if isinstance(level, int | str) else set(level)
    levels: set[Any] = set()
    prompts: list[Prompt] = []
    for i, (row, where) in enumerate(source.rows()):
        if wanted is not None:
            if "level" not in row:
                raise DataError(f"{where}: the rows of {source.name!r} have no field 'level' to choose by. They have {', '.join(row)}.")
            levels.add(row["level"])
            if row["level"] not in wanted and _number(row["level"]) not in wanted:
                continue
        item = read_row(row, form, where, solutions=solutions)
        message = {"role": "user", "content": item.question}
        prompt_id = f"{source.name}/{source.split}/{i if item.id is None else item.id}"
        prompts.append(Prompt(prompt_id, (message,), item.answer, style, item.meta))
        if len(prompts) == limit:
            break
    if not prompts and levels:
        raise DataError(f"{source.name}/{source.split} has no row of level {level!r}; its levels are {sorted(levels, key=str)}.")
    return Tasks(source.name, source.split, prompts, template=style, seed=seed)


def _number(level: Any) -> int | None:
    """3 for "Level 3", as MATH writes its levels."""
    found = re.fullmatch(r"Level (\d+)", level) if isinstance(level, str) else None
    return int(found[1]) if found else None
