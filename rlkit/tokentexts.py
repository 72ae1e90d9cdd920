"""What each token of a response reads as, from the run's own copy of its tokenizer.

The recorder keeps the engines' ``tokenizer.json`` in the run's folder, so that a view needs neither the model nor the hub.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rlkit.errors import RunError

TOKENIZER_FILE = "tokenizer.json"


def tokenizer_json(tokenizer: Any) -> bytes:
    """A transformers tokenizer as the JSON of the `tokenizers` library; empty for one that is not built on it."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return b"" if backend is None else backend.to_str().encode()


class TokenTexts:
    """Turns token ids into texts.

    Args:
        raw: a ``tokenizer.json``.

    Raises:
        RunError: it is none.
    """

    def __init__(self, raw: bytes) -> None:
        import tokenizers

        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(raw)
        except Exception as error:  # the library raises nothing narrower
            raise RunError(f"The run's {TOKENIZER_FILE} cannot be read: {error}") from error
        self._top = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)

    def __call__(self, tokens: Iterable[int]) -> list[str | None]:
        """One text a token, special tokens too; together they are the decoded response. None where a token is only a part of a character,
        whose text its last token has, and for an id that the vocabulary lacks."""
        from tokenizers.decoders import DecodeStream

        stream = DecodeStream(skip_special_tokens=False)
        return [stream.step(self._tokenizer, token) if 0 <= token <= self._top else None for token in map(int, tokens)]
