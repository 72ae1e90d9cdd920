"""Templates render what their definitions say, and say so when they cannot."""

import dataclasses

import pytest
from tiny_models import make_tokenizer

from rlkit import templates
from rlkit.errors import DataError
from rlkit.types import Prompt

PROMPT = Prompt("set/train/0", ({"role": "user", "content": "1+1=?"},))


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="module")
def base():
    """A base model's tokenizer: no chat template."""
    bare = make_tokenizer()
    bare.chat_template = None
    return bare


def asked(template: str, *messages: tuple[str, str]) -> Prompt:
    said = tuple({"role": role, "content": text} for role, text in messages)
    return dataclasses.replace(PROMPT, template=template, messages=said or PROMPT.messages)


def test_chat_ends_where_the_assistant_begins(tokenizer):
    expected = "<|im_start|>user\n1+1=?<|im_end|>\n<|im_start|>assistant\n"
    assert templates.render(asked("chat"), tokenizer) == expected
    assert templates.render(asked("auto"), tokenizer) == expected
    tokens = templates.encode(asked("chat"), tokenizer)
    assert tokenizer.decode(tokens, skip_special_tokens=False) == expected
    assert tokens[0] == tokenizer.convert_tokens_to_ids("<|im_start|>")  # a single token, not spelled out


def test_plain_is_the_question_itself(tokenizer, base):
    assert templates.render(asked("plain"), tokenizer) == "1+1=?"
    assert templates.render(asked("plain", ("system", "Add."), ("user", "1+1=?")), tokenizer) == "Add.\n\n1+1=?"
    assert PROMPT.template == "auto"
    assert templates.render(PROMPT, base) == "1+1=?"


def test_chat_needs_a_chat_template(base):
    with pytest.raises(DataError, match=r"'set/train/0'.*no chat template.*plain"):
        templates.render(asked("chat"), base)


def test_qwen_boxed_is_chatml_with_the_maths_instruction(base):
    text = templates.render(asked("qwen-boxed"), base)
    assert text == (
        "<|im_start|>system\nPlease reason step by step, and put your final answer within \\boxed{}.<|im_end|>\n"
        "<|im_start|>user\n1+1=?<|im_end|>\n<|im_start|>assistant\n"
    )
    own = templates.render(asked("qwen-boxed", ("system", "Add."), ("user", "1+1=?")), base)
    assert own.startswith("<|im_start|>system\nAdd.<|im_end|>\n")
    assert "boxed" not in own


def test_r1_names_its_tags_and_ends_at_the_assistant(base):
    text = templates.render(asked("r1"), base)
    assert all(tag in text for tag in ("<think>", "</think>", "<answer>", "</answer>"))
    assert text.endswith("\nUser: 1+1=?\nAssistant:")


def test_special_tokens_come_once():
    class Llama:
        """Adds a beginning-of-sequence token (99) when asked to, as Llama's tokenizer does."""

        chat_template = None

        def encode(self, text, add_special_tokens=True):
            return [99] * add_special_tokens + [1]

    assert templates.encode(asked("plain"), Llama()) == [99, 1]
    assert templates.encode(asked("r1"), Llama()) == [99, 1]
    assert templates.encode(asked("auto"), Llama()) == [99, 1]
    assert templates.encode(asked("qwen-boxed"), Llama()) == [1]


def test_unknown_template_is_refused_with_the_nearest(tokenizer):
    with pytest.raises(DataError, match="'qwen_boxed', did you mean 'qwen-boxed'"):
        templates.render(asked("qwen_boxed"), tokenizer)
