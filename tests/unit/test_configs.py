"""The shipped cluster configs: they load, fit the machine that they name, and every line has its comment."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from rlkit.choosing import choose
from rlkit.cluster import load_spec
from rlkit.config import ClusterSpec
from rlkit.errors import ConfigError
from rlkit.models import ModelSize
from rlkit.placement import plan
from rlkit.preflight import Node, check_resources

FOLDER = Path(__file__).parents[2] / "cluster_configs"
NAMES = ["laptop", "one_gpu", "node_4gpu_zero2", "node_8gpu_zero3", "multi_node"]
GIB = 2**30


TINY = ModelSize(800_000, 4, 128, 64, 2, 32, True)
QWEN_1_5B = ModelSize(1_543_714_304, 28, 1536, 151_936, 2, 128, True)
QWEN_3B = ModelSize(3_085_938_688, 36, 2048, 151_936, 2, 128, True)
QWEN_7B = ModelSize(7_615_616_512, 28, 3584, 152_064, 4, 128, False)

# The machine and the model that each file's first lines name.
FITS: dict[str, tuple[list[Node], ModelSize, int | None]] = {
    "laptop": ([Node("a", cpus=2, memory=8 * GIB)], TINY, None),
    "one_gpu": ([Node("a", cpus=8, gpus=1, memory=64 * GIB)], QWEN_1_5B, 40),
    "node_4gpu_zero2": ([Node("a", cpus=32, gpus=4, memory=256 * GIB)], QWEN_3B, 80),
    "node_8gpu_zero3": ([Node("a", cpus=64, gpus=8, memory=900 * GIB)], QWEN_7B, 80),
    "multi_node": ([Node(n, cpus=64, gpus=8, memory=900 * GIB) for n in "ab"], QWEN_7B, 80),
}


def test_all_files_are_tested():
    assert sorted(p.stem for p in FOLDER.glob("*.yaml")) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_loads_and_is_named_like_its_file(name):
    spec = ClusterSpec.from_yaml(FOLDER / f"{name}.yaml")
    assert spec.name == name


@pytest.mark.parametrize("name", NAMES)
def test_every_setting_has_a_comment(name):
    bare = [
        line
        for line in (FOLDER / f"{name}.yaml").read_text().splitlines()
        if line.strip() and "#" not in line and not line.rstrip().endswith(":")
    ]
    explained = {"name", "engine", "engines", "ranks", "dtype", "storage", "num_gpus"}  # explained in laptop.yaml
    repeated = {"cpus_per_engine", "cpus_per_rank", "gpus_per_rank", "zero_stage", "gradient_checkpointing"}
    repeated |= {"max_model_len", "max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization"}
    repeated |= {"min_cpus", "min_gpus", "min_memory_gib"}
    assert {line.split(":")[0].strip() for line in bare} <= explained | repeated


@pytest.mark.parametrize("name", NAMES)
def test_fits_the_machine_and_model_that_it_names(name):
    nodes, size, gpu_gib = FITS[name]
    spec = ClusterSpec.from_yaml(FOLDER / f"{name}.yaml")
    check_resources(spec, nodes, "in a test")
    sampler, learner, made = choose(nodes, size, spec.sampler, spec.learner, gpu_gib)
    assert learner is not None
    assert len(made.roles) == sampler.engines + learner.ranks
    left = {"engines", "gpus_per_engine", "kv_cache_gib", "sleep_level"}  # open in one of the files, as are these of the learner:
    left |= {"offload_between_turns", "gradient_checkpointing"}
    assert {*spec.sampler.diff(sampler), *spec.learner.diff(learner)} <= left
    assert made.colocated is (name in ("laptop", "one_gpu", "node_8gpu_zero3"))


def test_colocated_gpus_hold_one_engine_and_one_rank_each():
    nodes, size, _ = FITS["node_8gpu_zero3"]
    spec = load_spec(FOLDER / "node_8gpu_zero3.yaml")
    made = plan(nodes, size, spec.sampler, spec.learner, references=1, gpus_per_reference=0.1, gpu_memory_gib=100)
    for kind in ("engine-", "rank-"):
        assert sorted(r.gpu_ids for r in made.roles if r.name.startswith(kind)) == [(i,) for i in range(8)]


def test_laptop_leaves_room_for_a_reference():
    spec = load_spec(FOLDER / "laptop.yaml")
    used = spec.sampler.engines * spec.sampler.cpus_per_engine + spec.learner.ranks * spec.learner.cpus_per_rank
    assert spec.num_cpus is not None
    assert spec.num_cpus - used >= 1.0


def test_found_by_name_and_relative_to_the_checkout(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # as from notebooks/
    by_name, by_path = load_spec("laptop"), load_spec("cluster_configs/laptop.yaml")
    assert by_name == by_path == ClusterSpec.from_yaml(FOLDER / "laptop.yaml")


def test_changes_win_and_keep_the_rest_of_a_section():
    spec = load_spec("laptop", address="10.0.0.1:6379", learner={"ranks": 2})
    assert (spec.address, spec.learner.ranks, spec.learner.cpus_per_rank) == ("10.0.0.1:6379", 2, 0.5)


def test_addresses_are_configs_too():
    assert load_spec("ray://head:10001").address == "ray://head:10001"
    assert load_spec("head:6379").address == "head:6379"
    assert load_spec("local").address == load_spec().address == "local"


def test_unknown_config_and_key_name_the_nearest(tmp_path):
    with pytest.raises(ConfigError, match="did you mean 'laptop'"):
        load_spec("labtop")
    with pytest.raises(ConfigError, match=r"no_such\.yaml"):
        load_spec("no_such.yaml")
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({"name": "mine", "object_store_gb": 1}))
    with pytest.raises(ConfigError, match="object_store_gib"):
        load_spec(path)
