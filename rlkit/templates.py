"""How a prompt's messages become the text that the model continues.

    auto        the tokenizer's chat template when it has one, else plain
    chat        the tokenizer's chat template, up to where the assistant begins
    plain       the messages' text as it is
    qwen-boxed  ChatML with Qwen2.5-Math's system message: reason step by step, answer in ``\\boxed{}`` (simpleRL-reason's "qwen-boxed")
    r1          a plain text dialogue that asks for ``<think>`` and ``<answer>`` tags, after DeepSeek-R1-Zero (arXiv:2501.12948, table 1)

The last three need no chat template, so they also serve base models. Rendering happens on the engine, beside the tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlkit.errors import DataError, nearest
from rlkit.rewards.extract import RULES
from rlkit.types import Prompt

BOXED = "Please reason step by step, and put your final answer within \\boxed{}."
R1 = (
    "The following is a dialogue between a user and an assistant. The user poses a problem and the assistant solves it. The assistant "
    "first works through the problem in its mind and then states the result. The reasoning stands between <think> and </think>, the "
    "final answer between <answer> and </answer>, like this: <think> the reasoning </think> <answer> the final answer </answer>\n"
)


def render(prompt: Prompt, tokenizer: Any) -> str:
    """The text that the model is to continue.

    Raises:
        DataError: the template is unknown, or it is "chat" and the tokenizer has no chat template; the message names the prompt.
    """
    return TEMPLATES[check(prompt.template)](prompt, tokenizer)


def encode(prompt: Prompt, tokenizer: Any) -> list[int]:
    """`render`, as token ids.

    Special tokens that the tokenizer adds by itself (such as a beginning-of-sequence token) are added only to ``plain`` and ``r1``: in the
    others the text holds them already.
    """
    text = render(prompt, tokenizer)
    bare = prompt.template in ("plain", "r1") or (prompt.template == "auto" and not has_chat_template(tokenizer))
    return list(tokenizer.encode(text, add_special_tokens=bare))


def check(name: str) -> str:
    """``name`` when there is such a template.

    Raises:
        DataError: there is none; the message names the nearest.
    """
    if name not in TEMPLATES:
        raise DataError(f"There is no prompt template {name!r}{nearest(str(name), TEMPLATES) or '.'} Known: {', '.join(TEMPLATES)}.")
    return name


def has_chat_template(tokenizer: Any) -> bool:
    return bool(getattr(tokenizer, "chat_template", None))


def _auto(prompt: Prompt, tokenizer: Any) -> str:
    return _chat(prompt, tokenizer) if has_chat_template(tokenizer) else _plain(prompt, tokenizer)


def _chat(prompt: Prompt, tokenizer: Any) -> str:
    if not has_chat_template(tokenizer):
        raise DataError(
            f"Prompt {prompt.id!r} asks for the template 'chat' but the model's tokenizer has no chat template. "
            f"Use template='plain', 'qwen-boxed' or 'r1'."
        )
    return str(tokenizer.apply_chat_template([dict(m) for m in prompt.messages], tokenize=False, add_generation_prompt=True))


def _plain(prompt: Prompt, tokenizer: Any) -> str:
    return "\n\n".join(m["content"] for m in prompt.messages)


def _qwen_boxed(prompt: Prompt, tokenizer: Any) -> str:
    told = any(m["role"] == "system" for m in prompt.messages)
    messages = [*([] if told else [{"role": "system", "content": BOXED}]), *prompt.messages]
    turns = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
    return f"{turns}<|im_start|>assistant\n"


def _r1(prompt: Prompt, tokenizer: Any) -> str:
    names = {"user": "User: ", "assistant": "Assistant: ", "system": ""}
    turns = "".join(f"{names.get(m['role'], '')}{m['content']}\n" for m in prompt.messages)
    return f"{R1}{turns}Assistant:"


def rules(name: str) -> tuple[str, ...]:
    """Where a final answer may stand in a response to this template; see `rlkit.rewards.extract`. Where the template asks for a form,
    only that form counts.
    """
    asked = {"qwen-boxed": ("boxed",), "r1": ("boxed", "answer_tag")}
    return asked.get(check(name), RULES)


TEMPLATES: dict[str, Callable[[Prompt, Any], str]] = {
    "auto": _auto,
    "chat": _chat,
    "plain": _plain,
    "qwen-boxed": _qwen_boxed,
    "r1": _r1,
}
