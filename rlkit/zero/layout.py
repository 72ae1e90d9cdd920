"""A micro-batch as the model reads it: rows padded to a rectangle, or one row of samples end to end with no padding.

Everything the model needs is worked out on the host and sent in one copy, so that no step of a forward pass waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

# What `Policy.forward` takes before the temperature: ids, at, targets, positions, cu_seqlens, max_len.
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, "torch.Tensor | None", "torch.Tensor | None", int]


@dataclass(frozen=True)
class Inputs:
    """S samples. The last token of a sample is no input: nothing follows it."""

    ids: np.ndarray  # (B, T) int64; B is 1 without padding
    at: np.ndarray  # (M,) int64, places in the flattened (B x T) whose next token is a response token; sample by sample
    targets: np.ndarray  # (M,) int64, those next tokens
    positions: np.ndarray | None = None  # (1, T) int64, from 0 in each sample; None when padded
    cu_seqlens: np.ndarray | None = None  # (S + 1,) int64, where samples start, and the end; None when padded
    max_len: int = 0  # of the longest sample, tokens; 0 when padded

    def to(self, device: torch.device) -> Tensors:
        """The tensors on ``device``; ``cu_seqlens`` becomes int32, which is what attention kernels take."""
        arrays = [self.ids, self.at, self.targets]
        if self.positions is not None and self.cu_seqlens is not None:
            arrays += [self.positions, self.cu_seqlens]
        flat = send(np.concatenate([a.reshape(-1) for a in arrays]), device)
        parts = [p.view(a.shape) for p, a in zip(flat.split([a.size for a in arrays]), arrays, strict=True)]
        if len(parts) == 3:
            return parts[0], parts[1], parts[2], None, None, 0
        return parts[0], parts[1], parts[2], parts[3], parts[4].to(torch.int32), self.max_len


def padded(rows: Sequence[np.ndarray], prompt_lens: np.ndarray) -> Inputs:
    """One row of the rectangle a sample, padded on the right with 0.

    Args:
        rows: (n,) int64 tokens of prompt and response each, n at least 2.
        prompt_lens: (S,) prompt tokens of each, at least 1.
    """
    width = max(len(row) for row in rows) - 1
    ids = np.zeros((len(rows), width), dtype=np.int64)
    for r, row in enumerate(rows):
        ids[r, : len(row) - 1] = row[:-1]
    at, targets = _predictions(rows, prompt_lens, np.arange(len(rows)) * width)
    return Inputs(ids, at, targets)


def varlen(rows: Sequence[np.ndarray], prompt_lens: np.ndarray) -> Inputs:
    """All samples end to end in one row; arguments as for `padded`."""
    lens = np.array([len(row) - 1 for row in rows], dtype=np.int64)
    cu_seqlens = np.concatenate([[0], np.cumsum(lens)]).astype(np.int64)
    ids = np.concatenate([row[:-1] for row in rows]).astype(np.int64)[None]
    positions = (np.arange(ids.size) - np.repeat(cu_seqlens[:-1], lens))[None]
    at, targets = _predictions(rows, prompt_lens, cu_seqlens[:-1])
    return Inputs(ids, at, targets, positions, cu_seqlens, int(lens.max()))


def _predictions(rows: Sequence[np.ndarray], prompt_lens: np.ndarray, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Position t predicts token t + 1, so the response's log-probs come from positions prompt - 1 ... prompt + response - 2."""
    lens = [(int(p), len(row)) for p, row in zip(prompt_lens, rows, strict=True)]
    at = [np.arange(start + p - 1, start + n - 1) for (p, n), start in zip(lens, starts.tolist(), strict=True)]
    targets = [row[p:] for (p, _), row in zip(lens, rows, strict=True)]
    return np.concatenate(at).astype(np.int64), np.concatenate(targets).astype(np.int64)


def send(array: np.ndarray, device: torch.device) -> Any:
    """``array`` as a tensor on ``device``; to a GPU through pinned memory, so that the host does not wait for earlier kernels."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
