"""The pure parts of rollouts: settings, spreading, seeds, sampling, and the weights' way to an engine."""

from __future__ import annotations

import math
import types

import numpy as np
import pytest
import torch

from rlkit import weights
from rlkit.checksum import checksum
from rlkit.config import EngineSpec, SampleSpec
from rlkit.engines.flight import split
from rlkit.engines.sampling import keep_top, pick
from rlkit.engines.settings import GPU_SEQS, engine_args, environment, gpu_args, kv_cache_bytes
from rlkit.engines.worker import held
from rlkit.errors import ConfigError, RolloutError, SyncError
from rlkit.sampler import as_prompts, prompt_seeds
from rlkit.types import Prompt


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_tokens": 0}, "max_tokens is 0; it must be a whole number of at least 1"),
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"n": 0}, "n is 0"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens is 9"),
        ({"stop": ("",)}, "non-empty"),
        ({"max_token": 8}, "did you mean 'max_tokens'"),
    ],
)
def test_impossible_sampling_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        SampleSpec().but(**settings)


def test_prompts_are_spread_in_order_and_evenly():
    assert split(10, 4) == [3, 3, 2, 2]
    assert split(2, 4) == [1, 1]
    assert split(5, 1) == [5]


def test_a_prompts_seed_depends_on_its_place_and_the_call_only():
    few, many = prompt_seeds(7, 3), prompt_seeds(7, 100)
    assert few == many[:3]
    assert len(set(many)) == 100
    assert all(0 <= s < 2**31 for s in many)
    assert prompt_seeds(8, 3) != few


def test_prompts_may_be_strings_or_a_task_set():
    (one,) = as_prompts("2+2=")
    assert (one.id, one.question) == ("text-0", "2+2=")
    prompt = Prompt("a", ({"role": "user", "content": "x"},))

    class Tasks:
        def __len__(self):
            return 2

        def __getitem__(self, i):
            return prompt

    assert as_prompts(Tasks()) == [prompt, prompt]
    with pytest.raises(RolloutError, match="no prompts"):
        as_prompts([])
    with pytest.raises(ConfigError, match="number 1 is int"):
        as_prompts(["a", 3])
    assert as_prompts(p for p in ["a", prompt])[1] is prompt
    for wrong in (None, 3, {"a": 1}):
        with pytest.raises(ConfigError, match=f"given {type(wrong).__name__}"):
            as_prompts(wrong)


KNOWN = ["model", "tensor_parallel_size", "seed", "trust_remote_code", "enable_prefix_caching", "max_num_seqs", "kv_cache_dtype"]


def test_engine_arguments_pass_through_and_unknown_ones_are_refused():
    args = engine_args(EngineSpec(max_num_seqs=7, vllm={"kv_cache_dtype": "fp8"}), KNOWN, model="m")
    assert (args["max_num_seqs"], args["kv_cache_dtype"], args["model"], args["enable_prefix_caching"]) == (7, "fp8", "m", True)
    with pytest.raises(ConfigError, match="no engine argument 'kv_cache_dtyp', did you mean 'kv_cache_dtype'"):
        engine_args(EngineSpec(vllm={"kv_cache_dtyp": "fp8"}), KNOWN)
    with pytest.raises(ConfigError, match="'swap_space'"):
        engine_args(EngineSpec(swap_space=4.0), KNOWN)  # this vLLM no longer has it
    with pytest.raises(ConfigError, match="give it there"):
        engine_args(EngineSpec(vllm={"max_num_seqs": 8}), KNOWN)
    with pytest.raises(ConfigError, match="rlkit sets itself"):
        engine_args(EngineSpec(vllm={"model": "other"}), KNOWN)


def test_threads_default_to_the_cpus_of_an_engine():
    assert environment(EngineSpec(cpus_per_engine=0.5))["OMP_NUM_THREADS"] == "1"
    assert environment(EngineSpec(cpus_per_engine=3.5))["OMP_NUM_THREADS"] == "4"
    assert environment(EngineSpec(threads=2, engine="hf"))["OMP_NUM_THREADS"] == "2"
    assert "TORCHDYNAMO_DISABLE" not in environment(EngineSpec(gpus_per_engine=1))


def test_key_value_cache_is_as_large_as_needed_and_at_most_a_gib():
    assert kv_cache_bytes(EngineSpec(max_num_seqs=4), token_bytes=100, max_model_len=200) == 4 * 256 * 100  # two blocks of 128 a sequence
    assert kv_cache_bytes(EngineSpec(), token_bytes=50_000, max_model_len=8192) == 2**30
    assert kv_cache_bytes(EngineSpec(), token_bytes=50_000, max_model_len=32768) == 2 * 32768 * 50_000
    assert kv_cache_bytes(EngineSpec(kv_cache_gib=0.5), token_bytes=1, max_model_len=1) == 2**29


def test_top_k_and_top_p_keep_the_right_tokens():
    logits = torch.log(torch.tensor([[0.5, 0.2, 0.05, 0.25]]))
    assert torch.isfinite(keep_top(logits, 0, 1.0)).tolist() == [[True] * 4]
    assert torch.isfinite(keep_top(logits, 2, 1.0)).tolist() == [[True, False, False, True]]
    assert torch.isfinite(keep_top(logits, 0, 0.5)).tolist() == [[True, False, False, False]]  # 0.5 is reached by the first
    assert torch.isfinite(keep_top(logits, 0, 0.6)).tolist() == [[True, False, False, True]]
    assert torch.isfinite(keep_top(logits, 0, 0.01)).tolist() == [[True, False, False, False]]  # never none


def test_picked_tokens_follow_the_distribution_and_carry_its_log_probs():
    probs = torch.tensor([0.1, 0.2, 0.7])
    rows = 4000
    generators = [torch.Generator().manual_seed(i) for i in range(rows)]
    tokens, logprobs = pick((torch.log(probs) * 2).repeat(rows, 1), SampleSpec(temperature=2.0), generators)
    share = np.bincount(tokens.numpy(), minlength=3) / rows
    assert np.abs(share - probs.numpy()).max() < 4 * math.sqrt(0.25 / rows)
    assert torch.allclose(logprobs, torch.log(probs)[tokens], atol=1e-6)
    again, _ = pick(torch.log(probs)[None], SampleSpec(temperature=1.0), [torch.Generator().manual_seed(5)])
    assert again.item() == tokens[5].item()  # a row's draw depends on its own generator only


def published(items, **changes):
    return weights.publish(items, **({"version": 3, "dtype": "float32", "put": lambda bucket: bucket} | changes))


def test_weights_survive_their_buckets():
    items = [("a", torch.randn(3, 4)), ("b", torch.randn(7)), ("c", torch.randn(2, 2, dtype=torch.float64))]
    manifest = published(items, bucket_bytes=60)
    assert len(manifest.buckets) == 2  # 48 bytes, then 28 + 16
    assert manifest.bytes == 4 * (12 + 7 + 4)
    back = dict(weights.tensors(manifest))
    assert list(back) == ["a", "b", "c"]
    for name, tensor in items:
        assert torch.equal(back[name], tensor.float())
        assert checksum(back[name]) == manifest.checksums[name]
    half = published(items, dtype="bfloat16")
    assert torch.equal(dict(weights.tensors(half))["b"], items[1][1].bfloat16())
    with pytest.raises(SyncError, match="twice"):
        published([*items, items[0]])


def test_fingerprints_tell_values_and_places_but_not_the_sign_of_zero():
    t = torch.tensor([1.0, 2.0, 0.0])
    assert checksum(t) == checksum(torch.tensor([1.0, 2.0, -0.0]))
    assert checksum(t) != checksum(torch.tensor([2.0, 1.0, 0.0]))
    assert checksum(t) != checksum(torch.tensor([1.0, 2.0000002, 0.0]))


class Fused(torch.nn.Module):
    """What vLLM makes of a layer on the CPU: q, k and v in one weight that only a matrix product can reach."""

    def __init__(self, *parts):
        super().__init__()
        whole = torch.cat(parts)
        self.weight = torch.nn.Parameter(torch.empty(0))
        self.params_dtype = torch.float32
        self.cpu_linear = lambda x, weight, bias: torch.nn.functional.linear(x, whole, bias)


def model_of(q, k, v, embed, tied=True):
    model = torch.nn.Module()
    model.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    model.attn = torch.nn.Module()
    model.attn.qkv_proj = Fused(q, k, v)
    model.embed = torch.nn.Embedding(10, 6)  # padded from 8 rows to 10
    with torch.no_grad():
        model.embed.weight[:8].copy_(embed)
    model.lm_head = torch.nn.Module()
    model.lm_head.weight = model.embed.weight if tied else torch.nn.Parameter(torch.zeros(10, 6))
    return model


def test_weights_are_read_back_out_of_fused_packed_and_tied_layers():
    q, k, v, embed = torch.randn(4, 6), torch.randn(2, 6), torch.randn(2, 6), torch.randn(8, 6)
    names = [f"attn.{part}_proj.weight" for part in "qkv"]
    manifest = published([*zip(names, (q, k, v), strict=True), ("embed.weight", embed)])

    def found(model):
        return [(n, where, checksum(t)) for n, where, t in held(model, manifest.shapes)]

    good = found(model_of(q, k, v, embed))
    weights.check(good, manifest, "engine-0")
    assert [where for name, where, _ in good if name == "embed.weight"] == ["embed", "lm_head"]

    swapped = k.clone()
    swapped[0, :2] = k[0, [1, 0]]
    with pytest.raises(SyncError, match=r"engine-0 holds other values for 1 of 4 tensors: attn\.k_proj"):
        weights.check(found(model_of(q, swapped, v, embed)), manifest, "engine-0")

    stale = model_of(q, k, v, embed)
    stale.lm_head.cpu_linear = lambda x, weight, bias: x @ torch.zeros(6, 10)  # packed from older weights than it shows
    with pytest.raises(SyncError, match=r"embed\.weight \(in lm_head, packed\)"):
        weights.check(found(stale), manifest, "engine-0")

    with pytest.raises(SyncError, match=r"holds, but was not sent, 1 .* lm_head\.weight"):
        weights.check(found(model_of(q, k, v, embed, tied=False)), manifest, "engine-0")

    short = types.SimpleNamespace(**{**manifest.__dict__, "names": (*manifest.names, "norm.weight")})
    with pytest.raises(SyncError, match=r"did not take 1 of 5 tensors: norm\.weight"):
        weights.check(good, short, "engine-0")


def test_a_gpu_engine_captures_graphs_up_to_its_batch_and_compiles_nothing():
    graphs = gpu_args(EngineSpec(gpus_per_engine=1, max_num_seqs=300))["compilation_config"]
    assert graphs == {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 128, 256, 300]}
    assert gpu_args(EngineSpec(gpus_per_engine=1, max_num_seqs=2))["compilation_config"]["cudagraph_capture_sizes"] == [1, 2]
    assert gpu_args(EngineSpec(gpus_per_engine=1))["max_num_seqs"] == GPU_SEQS


def test_what_the_user_says_of_compilation_stays():
    assert gpu_args(EngineSpec(gpus_per_engine=1, enforce_eager=True)) == {"max_num_seqs": GPU_SEQS}
    assert "compilation_config" not in gpu_args(EngineSpec(gpus_per_engine=1, vllm={"compilation_config": {"mode": 3}}))
