"""The grader, under the name where people look for it. It lives in `rlkit.rewards`, since the maths reward is the same grader."""

from rlkit.rewards.extract import RULES, extract
from rlkit.rewards.grading import VERDICTS, Verdict, grade, grade_many

__all__ = ["RULES", "VERDICTS", "Verdict", "extract", "grade", "grade_many"]
