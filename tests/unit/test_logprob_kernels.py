"""The GPU kernels, interpreted on the CPU, against the torch functions that they replace."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# In a process of its own: Triton decides once, at import, whether it interprets.
CODE = """
import torch
from rlkit.zero import logprob_kernels as kernels, logprobs

kernels.BLOCK = 16  # 50 logits are three whole tiles and a part
torch.manual_seed(0)
for dtype in (torch.float32, torch.bfloat16):
    for temperature in (1.0, 0.6):
        logits = (torch.randn(7, 64) * 4).to(dtype)[:, :50]  # rows further apart than they are long
        targets = torch.tensor([0, 15, 16, 31, 32, 48, 49])
        got, want = (f.measure(logits, targets, temperature) for f in (kernels, logprobs))
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
        lse, _, entropy = want
        for up, up_entropy in ((torch.randn(7), torch.zeros(7)), (torch.randn(7), torch.randn(7))):
            rest = (targets, lse, entropy, up, up_entropy, temperature)
            want_grad, in_place = torch.empty_like(logits), logits.clone()
            logprobs.gradient(logits, *rest, want_grad)
            kernels.gradient(in_place, *rest, in_place)
            tolerance = 1e-5 if dtype == torch.float32 else 1e-2
            torch.testing.assert_close(in_place, want_grad, atol=tolerance, rtol=tolerance)
logits = torch.randn(1, 50)
logits[0, 20] = float("-inf")  # a token that is ruled out
lse, logprob, entropy = kernels.measure(logits, torch.tensor([1]), 1.0)
p = torch.cat([logits[0, :20], logits[0, 21:]]).softmax(0)
torch.testing.assert_close(entropy[0], -(p * p.log()).sum())
kernels.gradient(logits, torch.tensor([1]), lse, entropy, torch.ones(1), torch.ones(1), 1.0, logits)
assert logits[0, 20] == 0 and logits.isfinite().all()
kernels.measure(logits[:0], torch.tensor([], dtype=torch.int64), 1.0)
"""


def test_kernels_equal_the_torch_functions():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CODE],
        env={"TRITON_INTERPRET": "1", "PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
