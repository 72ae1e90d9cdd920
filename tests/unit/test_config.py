"""Settings: unknown keys, wrong types and values out of range are refused by name; files fill three specs."""

from __future__ import annotations

import numpy as np
import pytest

from rlkit.config import ClusterSpec, EngineSpec, SampleSpec, TrainSpec, as_plain
from rlkit.errors import ConfigError
from rlkit.zero.ds_config import packing_of


def test_make_lets_keywords_win_and_ignores_none():
    spec = SampleSpec.make({"n": 4, "temperature": 0.5}, n=8, temperature=None)
    assert (spec.n, spec.temperature, spec.max_tokens) == (8, 0.5, 256)


def test_an_unknown_key_names_the_nearest_known_one():
    with pytest.raises(ConfigError, match=r"SampleSpec has no setting 'temprature', did you mean 'temperature'\?.*Known: n, temperature"):
        SampleSpec.make(temprature=1.0)


def test_a_key_like_no_other_gets_no_guess():
    with pytest.raises(ConfigError, match=r"no setting 'zzz'\. Known"):
        TrainSpec.make(zzz=1)


@pytest.mark.parametrize(
    ("cls", "setting", "value", "rule"),
    [
        (SampleSpec, "n", 0, "at least 1"),
        (SampleSpec, "n", True, "whole number"),
        (SampleSpec, "n", 2.0, "whole number"),
        (SampleSpec, "temperature", -0.1, "0 .greedy. or above"),
        (SampleSpec, "temperature", float("nan"), "a finite number"),
        (SampleSpec, "temperature", "hot", "must be a number"),
        (SampleSpec, "top_p", 0, "above 0 and at most 1"),
        (SampleSpec, "top_p", 1.01, "above 0 and at most 1"),
        (SampleSpec, "top_k", -1, "positive whole number"),
        (SampleSpec, "max_tokens", 0, "at least 1"),
        (SampleSpec, "min_tokens", 257, "from 0 to max_tokens"),
        (SampleSpec, "stop", ("",), "non-empty"),
        (SampleSpec, "stop", (3,), "non-empty texts"),
        (SampleSpec, "stop", 3, "list of texts"),
        (SampleSpec, "logprobs", "yes", "true or false"),
        (EngineSpec, "engine", "sglang", "'vllm' or 'hf'"),
        (EngineSpec, "scheduler", "fast", "'rollout' or 'vllm'"),
        (EngineSpec, "engines", 0, "at least 1"),
        (EngineSpec, "dtype", "fp32", "float32"),
        (EngineSpec, "gpus_per_engine", -1, "at least 0"),
        (EngineSpec, "gpu_memory_utilization", 1.5, "at most 1"),
        (EngineSpec, "max_model_len", 1, "at least 2"),
        (EngineSpec, "sync_timeout_s", 0, "above 0"),
        (EngineSpec, "kv_cache_gib", float("inf"), "a finite number"),
        (EngineSpec, "vllm", ["x"], "a mapping"),
        (TrainSpec, "zero_stage", 4, "0, 1, 2 or 3"),
        (TrainSpec, "ranks", 0, "at least 1"),
        (TrainSpec, "lr", float("inf"), "finite"),
        (TrainSpec, "lr", -1e-6, "at least 0"),
        (TrainSpec, "lr", True, "must be a number"),
        (TrainSpec, "betas", (0.9,), "2 numbers"),
        (TrainSpec, "betas", (0.9, 1.0), "below 1"),
        (TrainSpec, "betas", ("a", "b"), "2 numbers"),
        (TrainSpec, "eps", 0, "above 0"),
        (TrainSpec, "lora_alpha", float("nan"), "a finite number"),
        (TrainSpec, "update_timeout_s", float("inf"), "a finite number"),
        (TrainSpec, "max_logprob_gap", float("nan"), "above 0"),
        (TrainSpec, "schedule", "step", "constant, linear or cosine"),
        (TrainSpec, "schedule", "cosine", "set for a cosine schedule"),
        (TrainSpec, "offload_param", True, "unless zero_stage is 3"),
        (TrainSpec, "max_lag", -1, "at least 0"),
        (TrainSpec, "min_lr_ratio", 2, "from 0 to 1"),
        (TrainSpec, "lora_targets", "q_proj", "list of module names"),
        (ClusterSpec, "min_nodes", 0, "at least 1"),
        (ClusterSpec, "connect_timeout_s", 0, "above 0"),
        (ClusterSpec, "address", 6379, "text"),
        (ClusterSpec, "sampler", [1], "a section of settings"),
    ],
)
def test_a_bad_value_names_the_setting_and_the_rule(cls, setting, value, rule):
    named = "total_steps" if value == "cosine" else setting
    with pytest.raises(ConfigError, match=rf"{cls.__name__}\.{named} is .*{rule}"):
        cls.make({setting: value})


def test_numbers_become_what_the_field_says():
    spec = TrainSpec.make(lr="1e-6", weight_decay=0, betas=[0.9, "0.95"], ranks=np.int64(2))
    assert (spec.lr, spec.weight_decay, spec.betas, spec.ranks) == (1e-6, 0.0, (0.9, 0.95), 2)
    assert [type(v) for v in (spec.lr, spec.weight_decay, spec.ranks)] == [float, float, int]


def test_one_stop_text_is_a_tuple_of_one():
    assert SampleSpec(stop="\n").stop == ("\n",)
    assert SampleSpec(stop=["a", "b"]).stop == ("a", "b")


def test_but_changes_a_copy_and_diff_finds_it():
    one = TrainSpec(lr=1e-4)
    two = one.but(lr=1e-5, zero_stage=None)
    assert one.lr == 1e-4
    assert one.diff(two) == {"lr": (1e-4, 1e-5)}
    assert one.diff(TrainSpec(lr=1e-4)) == {}


def test_specs_are_frozen():
    with pytest.raises(AttributeError):
        SampleSpec().n = 2  # type: ignore[misc]


def test_a_file_fills_cluster_sampler_and_learner(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("name: mine\nmin_gpus: 2\nsampler:\n  engines: 2\n  vllm: {quantization: fp8}\nlearner:\n  lr: 1e-6\n  ranks: 2\n")
    spec = ClusterSpec.from_yaml(path)
    assert (spec.name, spec.min_gpus) == ("mine", 2.0)
    assert (spec.sampler.engines, spec.sampler.vllm) == (2, {"quantization": "fp8"})
    assert (spec.learner.ranks, spec.learner.lr) == (2, 1e-6)


def test_an_empty_section_keeps_the_defaults(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("name: mine\nlearner:\n")
    assert ClusterSpec.from_yaml(path).learner == TrainSpec()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: [", "not valid YAML"),
        ("- a\n- b\n", "must hold a mapping of settings; it holds list"),
        ("", "it holds NoneType"),
        ("nme: x\n", r"'nme', did you mean 'name'"),
        ("learner:\n  zero: 3\n", r"in section 'learner': TrainSpec has no setting 'zero'"),
        ("sampler:\n  engines: many\n", r"in section 'sampler': EngineSpec.engines is 'many'; it must be a whole number"),
    ],
)
def test_a_bad_file_is_named_with_its_section(tmp_path, text, message):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=rf"bad\.yaml.*{message}"):
        ClusterSpec.from_yaml(path)


def test_a_missing_file_says_where_it_was_looked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=rf"No cluster config at none\.yaml \(looked in {tmp_path}\)"):
        ClusterSpec.from_yaml("none.yaml")


def test_as_plain_gives_what_json_and_make_take():
    spec = ClusterSpec(sampler=EngineSpec(engines=2), learner=TrainSpec(betas=(0.8, 0.9)))
    plain = as_plain(spec)
    assert plain["sampler"]["engines"] == 2
    assert plain["learner"]["betas"] == [0.8, 0.9]
    assert ClusterSpec.make(plain) == spec


def test_settings_of_the_updates_speed():
    spec = TrainSpec()
    assert (spec.packing, spec.kernels, spec.gradient_checkpointing, spec.logits_chunk) == ("auto", "auto", None, None)
    assert TrainSpec(gradient_checkpointing=False).gradient_checkpointing is False
    assert TrainSpec(gpus_per_rank=1, kernels="compile").kernels == "compile"
    for wrong, message in (
        ({"packing": "dense"}, "packing is 'dense'; it must be auto, varlen or padded"),
        ({"kernels": "fast"}, "kernels is 'fast'; it must be auto, plain, liger or compile"),
        ({"kernels": "compile", "zero_stage": 3, "gpus_per_rank": 1}, "auto, plain or liger with zero_stage 3"),
        ({"kernels": "liger"}, "auto or plain on the CPU"),
        ({"gradient_checkpointing": "yes"}, "gradient_checkpointing is 'yes'; it must be true or false"),
        ({"logits_chunk": 0}, "logits_chunk is 0; it must be at least 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            TrainSpec(**wrong)


def test_what_auto_packing_means():
    assert packing_of(TrainSpec()) == "padded"
    assert packing_of(TrainSpec(gpus_per_rank=0.5)) == "varlen"
    assert packing_of(TrainSpec(packing="varlen")) == "varlen"
