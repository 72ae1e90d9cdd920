"""Token ids as texts: whole characters, special tokens, ids that the vocabulary lacks."""

import pytest

from rlkit.errors import RunError
from rlkit.models import ASSETS, load_tokenizer
from rlkit.tokentexts import TokenTexts, tokenizer_json


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(ASSETS / "tiny")


@pytest.fixture(scope="module")
def texts(tokenizer):
    return TokenTexts(tokenizer_json(tokenizer))


def test_texts_together_are_the_response_and_a_character_has_its_last_token(tokenizer, texts):
    ids = tokenizer.encode("12 + é = 😀")
    found = texts(ids)
    assert len(found) == len(ids)
    assert "".join(t or "" for t in found) == "12 + é = 😀"
    assert found[-4:] == [None, None, None, "😀"]


def test_special_tokens_have_a_text(tokenizer, texts):
    assert texts([*tokenizer.encode("1"), tokenizer.eos_token_id]) == ["1", tokenizer.eos_token]


@pytest.mark.parametrize("token", [-1, 10**9, 2**40])
def test_an_id_that_is_no_token_has_none(token, texts, tokenizer):
    one, two = tokenizer.encode("12")
    assert texts([one, token, two]) == ["1", None, "2"]


def test_no_tokens_no_texts(texts):
    assert texts([]) == []


def test_a_tokenizer_of_another_library_has_no_json():
    assert tokenizer_json(object()) == b""


@pytest.mark.parametrize("raw", [b"", b"{}", b"not json", b"\xff"])
def test_what_is_no_tokenizer_is_refused(raw):
    with pytest.raises(RunError, match="tokenizer\\.json cannot be read"):
        TokenTexts(raw)
