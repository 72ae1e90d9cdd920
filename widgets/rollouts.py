"""`RolloutBrowser`: the completions of any step and prompt, with what the graders said of them."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any, ClassVar

from rlkit.errors import RunError
from rlkit.reprs import html_table
from rlkit.widgets.panel import Panel

if TYPE_CHECKING:
    import pandas as pd

    from rlkit.tokentexts import TokenTexts

KEPT = 4  # steps whose samples are kept in memory
LOOK_S = 2.0  # for a prompt in other steps
STEPS_BESIDE = 8  # steps that are put side by side
CUT = 4000  # characters of a response that the browser gets
TOKENS = 2000  # tokens of a response that it gets
ROWS = 6  # samples in the static picture


class RolloutBrowser(Panel):
    """Any step, any prompt of it: its group of completions; groups that went wrong; one prompt through the steps.

    Reads the samples that ``run.log(step, scored, ...)`` keeps; a step that was logged without them says so.
    """

    kind: ClassVar[str] = "rollouts"
    title: ClassVar[str] = "Rollouts"

    def __init__(self, run: Any) -> None:
        super().__init__(run)
        self._frames: dict[tuple[int, float, int], pd.DataFrame] = {}  # restarts, when the step was logged, step
        self._texts: tuple[int, TokenTexts] | None = None  # of which run of this name

    def answer(self, ask: dict[str, Any]) -> dict[str, Any]:
        """Answer a question of the browser: the groups of a step, a group, the tokens of a sample, a prompt in other steps.

        Raises:
            RunError: the step has no samples, or they cannot be read from here; or the question is none.
        """
        what = ask.get("what")
        if what == "step":
            return {"groups": self.groups(whole(ask, "step"))}
        if what == "group":
            return self.group(whole(ask, "step"), str(ask.get("prompt")))
        if what == "tokens":
            return self.tokens(whole(ask, "step"), whole(ask, "row"))
        if what == "across":
            return self.across(str(ask.get("prompt")))
        return super().answer(ask)

    def groups(self, step: int) -> list[dict[str, Any]]:
        """The step's prompts, with what filters need: counts of wrong, unparsed and truncated answers, no spread.

        Raises:
            RunError: the step has no samples here.
        """
        out = []
        for prompt, rows in self._samples(step).groupby("prompt_id", sort=False):
            rewards, verdicts = rows["reward"].to_numpy(float), rows["verdict"]
            out.append(
                {
                    "prompt": str(prompt),
                    "question": str(rows["question"].iloc[0])[:300],
                    "reward": plain(rewards.mean()),
                    "wrong": int((verdicts == "wrong").sum()),
                    "unparsed": int((verdicts == "unparsed").sum()),
                    "truncated": int((rows["finish_reason"] == "length").sum()),
                    "no_spread": bool((rewards == rewards[0]).all()),
                }
            )
        return out

    def group(self, step: int, prompt: str) -> dict[str, Any]:
        """A prompt's completions at a step.

        Raises:
            RunError: the step has no samples here, or not that prompt.
        """
        frame = self._samples(step)
        rows = frame[frame["prompt_id"] == prompt]
        if not len(rows):
            raise RunError(f"Prompt {prompt!r} is not in step {step}.")
        first = rows.iloc[0]
        return {"question": first["question"], "answer": first["answer"], "samples": samples(step, rows)}

    def tokens(self, step: int, row: int) -> dict[str, Any]:
        """The tokens of the sample in this row of the step: ids, log-probs and texts, of the first `TOKENS`.

        Raises:
            RunError: the step has no samples here, or not so many.
        """
        frame = self._samples(step)
        if not 0 <= row < len(frame):
            raise RunError(f"Step {step} has {len(frame)} samples: there is no row {row}.")
        found = frame.iloc[row]
        ids = [int(t) for t in found["tokens"][:TOKENS]]
        left = len(found["tokens"]) - len(ids)
        said = f"{left:,} more tokens are not shown." if left else ""
        texts: list[str | None] = [None] * len(ids)
        try:
            if self._texts is None or self._texts[0] != self.watched.restarts:
                self._texts = self.watched.restarts, self.watched.source.token_texts()
            texts = self._texts[1](ids)
        except RunError as error:
            said = f"{error} {said}".strip()
        return {"tokens": ids, "logprobs": [plain(v) for v in found["logprobs"][:TOKENS]], "texts": texts, "said": said}

    def across(self, prompt: str) -> dict[str, Any]:
        """A prompt's completions at the newest steps that had it, oldest first; looks for two seconds at most."""
        steps = [int(s) for s in self.watched.steps["step"]]
        found: list[dict[str, Any]] = []
        end, looked = time.monotonic() + LOOK_S, 0
        for step in reversed(steps):
            if len(found) == STEPS_BESIDE or time.monotonic() > end:
                break
            looked += 1
            try:
                frame = self._samples(step)
            except RunError:
                continue
            rows = frame[frame["prompt_id"] == prompt]
            if len(rows):
                found.append({"step": step, "reward": plain(rows["reward"].mean()), "samples": samples(step, rows)})
        said = f"In {len(found)} of the newest {looked} of {len(steps)} steps"
        return {"steps": found[::-1], "said": said + (f"; at most {STEPS_BESIDE} are shown." if len(found) == STEPS_BESIDE else ".")}

    def _samples(self, step: int) -> pd.DataFrame:
        steps = self.watched.steps
        at = int(steps["step"].searchsorted(step))
        logged = float(steps["t"][at]) if at < len(steps) and steps["step"][at] == step else math.nan
        key = self.watched.restarts, logged, step  # a step that a rewind took back is logged again
        if key not in self._frames:
            frame = self.watched.source.samples(step)
            while len(self._frames) >= KEPT:
                self._frames.pop(next(iter(self._frames)))
            self._frames[key] = frame
        return self._frames[key]

    # --- static --------------------------------------------------------------------------------------------------------------------------

    def table(self) -> str:
        """Some samples of the newest step as an HTML table."""
        steps = self.watched.steps["step"]
        if not len(steps):
            return "<p>No step is complete yet.</p>"
        step = int(steps[-1])
        try:
            frame = self._samples(step)
        except RunError as error:
            return html_table(("rollouts",), [[str(error)]])
        worth = frame.iloc[:: max(1, len(frame) // ROWS)].head(ROWS)
        rows = [
            (
                row["question"][:80],
                row["response"][:160],
                row["n_tokens"],
                row["finish_reason"],
                row["verdict"] or "",
                f"{row['reward']:+.2f}",
            )
            for _, row in worth.iterrows()
        ]
        return html_table(
            ("question", "response", "tokens", "finish", "verdict", "reward"), rows, f"{len(rows)} of {len(frame)} samples of step {step}"
        )

    def static_html(self) -> str:
        return self.framed(self.table())

    def text(self) -> str:
        steps = self.watched.steps["step"]
        return f"RolloutBrowser({self.watched.name!r}, {f'steps 0 to {int(steps[-1])}' if len(steps) else 'no step is complete yet'})"


def whole(ask: dict[str, Any], key: str) -> int:
    """Raises:
    RunError: the question has no such whole number.
    """
    value = ask.get(key)
    if not isinstance(value, int | float) or not abs(value) < 2**53 or value != int(value):
        raise RunError(f"{key} is {value!r}; it must be a whole number.")
    return int(value)


def samples(step: int, rows: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows of a step's samples as JSON, each with its place, by which its tokens are asked for."""
    return [{"step": step, "row": int(at), **sample(row)} for at, row in rows.iterrows()]


def sample(row: Any) -> dict[str, Any]:
    """One sample as JSON, without its tokens."""
    parts = {name.removeprefix("reward/"): plain(value) for name, value in row.items() if name.startswith("reward/")}
    response = str(row["response"])
    return {
        "response": response if len(response) <= CUT else response[:CUT] + f"… ({len(response) - CUT:,} more characters)",
        "n_tokens": int(row["n_tokens"]),
        "finish_reason": row["finish_reason"],
        "verdict": row["verdict"],
        "extracted": row["extracted"],
        "reward": plain(row["reward"]),
        "advantage": plain(row.get("advantage")),
        "parts": parts,
    }


def plain(value: Any) -> float | None:
    """A number as JSON takes it: null for what is not finite."""
    return float(value) if value is not None and math.isfinite(value) else None
