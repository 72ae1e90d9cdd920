"""Which way the weights go, and how the manifests of several ranks become one."""

import dataclasses

import pytest
import torch

from rlkit import transfer, weights
from rlkit.checksum import checksum
from rlkit.engines import receiving
from rlkit.transfer import IPC, NCCL, OBJECT_STORE, DeviceBucket, Exporter, choose, fill, merge
from rlkit.weights import WeightManifest


def test_the_way_follows_who_shares_a_card():
    assert choose([], ["a"]) == OBJECT_STORE  # engines on the CPU
    assert choose(["a"], []) == OBJECT_STORE  # learner on the CPU
    assert choose(["a"], ["a"]) == IPC
    assert choose(["a", "b"], ["b", "a"]) == IPC
    assert choose(["b"], ["a"]) == NCCL
    assert choose(["c", "d"], ["a", "b"]) == NCCL
    assert choose(["a", "c"], ["a"]) == OBJECT_STORE  # NCCL refuses two members on one card


def manifest(gpu, sums):
    bucket = DeviceBucket(("w",), ((2, 3),), "bfloat16", 12, {gpu: ("handle of", gpu)})
    return WeightManifest(4, "bfloat16", ("w",), {"w": (2, 3)}, sums, (bucket,), 12, IPC)


def test_every_ranks_handles_come_together():
    one = merge([manifest("gpu-0", {"w": 7}), manifest("gpu-1", {})])
    assert one.checksums == {"w": 7}
    assert one.buckets[0].handles == {"gpu-0": ("handle of", "gpu-0"), "gpu-1": ("handle of", "gpu-1")}
    assert (one.version, one.bytes, one.transport) == (4, 12, IPC)


def test_tensors_lie_one_after_the_other_in_a_bucket():
    a, b = torch.randn(3, 5), torch.randn(7).bfloat16()
    flat = torch.empty(2 * 22, dtype=torch.uint8)
    fill(flat, [a, b], "bfloat16")
    assert torch.equal(flat.view(torch.bfloat16), torch.cat([a.bfloat16().flatten(), b]))


class Held(Exporter):
    """Buckets in this process's memory instead of a GPU's."""

    def pack(self, items, dtype, size):
        flat = torch.empty(size, dtype=torch.uint8)
        fill(flat, [t for _, t in items], dtype)
        self.flats.append(flat)
        return DeviceBucket(tuple(n for n, _ in items), tuple(tuple(t.shape) for _, t in items), dtype, size)

    def ready(self):
        self.was_ready = True


def test_what_is_published_for_a_gpu_is_checksummed_and_cut_into_buckets():
    exporter = Held(IPC)
    items = [("a", torch.randn(3, 5)), ("b", torch.randn(7)), ("c", torch.randn(2, 2))]
    made = weights.publish(items, version=1, dtype="bfloat16", exporter=exporter, bucket_bytes=44)
    assert [b.names for b in made.buckets] == [("a", "b"), ("c",)]  # 30 + 14 bytes, then 8
    assert (exporter.was_ready, made.transport) == (True, IPC)
    assert made.bytes == sum(len(f) for f in exporter.flats) == 52
    assert made.checksums == {name: checksum(t.bfloat16()) for name, t in items}
    unsummed = weights.publish(items, version=1, dtype="bfloat16", exporter=Held(IPC), sums=False)
    assert (unsummed.checksums, len(unsummed.buckets)) == ({}, 1)


@dataclasses.dataclass
class Older:
    """The fields of vLLM 0.26's update info for its ipc engine."""

    names: list
    dtype_names: list
    shapes: list
    ipc_handles: dict | None = None
    ipc_handles_pickled: str | None = None
    tensor_sizes: list | None = None
    packed: bool = False


def test_vllm_is_told_what_its_version_has_fields_for():
    from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferInitInfo, IPCWeightTransferUpdateInfo
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferInitInfo, NCCLWeightTransferUpdateInfo

    bucket = DeviceBucket(("w", "scale"), ((2, 3), ()), "bfloat16", 14, {"gpu-0": ("handle",)})
    old = Older(**receiving.update_info(Older, bucket))
    assert (old.packed, old.tensor_sizes, old.shapes, old.ipc_handles) == (True, [12, 2], [[2, 3], []], {"gpu-0": ("handle",)})
    new = IPCWeightTransferUpdateInfo(**receiving.update_info(IPCWeightTransferUpdateInfo, bucket))
    assert (new.names, new.dtype_names, new.tensor_sizes) == (["w", "scale"], ["bfloat16", "bfloat16"], [12, 2])
    assert receiving._known(IPCWeightTransferInitInfo, packed=True).packed
    sent = NCCLWeightTransferUpdateInfo(**receiving.update_info(NCCLWeightTransferUpdateInfo, bucket))
    assert sent.shapes == [[2, 3], []]

    class Engine:
        init_info_cls = NCCLWeightTransferInitInfo

        def init_transfer_engine(self, info):
            self.info = info

    engine = Engine()
    receiving.join(engine, "10.0.0.1", 1234, 3, 5)
    info = engine.info
    assert (info.master_address, info.master_port, info.rank_offset, info.world_size) == ("10.0.0.1", 1234, 3, 5)
    assert (info.packed, info.packed_buffer_size_bytes) == (True, receiving.WHOLE_BUCKETS)


def test_torch_still_has_the_places_that_an_export_is_made_of():
    at = transfer._positions()
    assert {"ref_counter_handle", "ref_counter_offset", "storage_device"} <= set(at)
    assert at["storage_device"] == 6  # where vLLM puts the number of its own card
    assert callable(torch.UntypedStorage._release_ipc_counter_cuda)


def test_layers_that_change_what_they_load_are_not_loaded_in_place():
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    def model(method):
        made = torch.nn.Sequential(torch.nn.Linear(2, 2))
        if method is not None:
            made[0].quant_method = method
        return made

    class Packed(UnquantizedLinearMethod):
        pass

    gpu = torch.device("cuda", 0)
    assert receiving.loads_in_place(model(None), gpu)
    assert receiving.loads_in_place(model(UnquantizedLinearMethod()), gpu)
    assert not receiving.loads_in_place(model(UnquantizedLinearMethod()), torch.device("cpu"))
    assert not receiving.loads_in_place(model(Packed()), gpu)
    latent = model(None)
    latent[0].process_weights_after_loading = lambda dtype: None
    assert not receiving.loads_in_place(latent, gpu)


@pytest.mark.parametrize("transport", [IPC, NCCL])
def test_the_engine_in_place_is_vllm_s_own_but_for_start_and_finish(transport):
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    name = receiving._in_place(transport)
    cls = WeightTransferEngineFactory._registry[name]()
    (base,) = cls.__bases__
    assert base is WeightTransferEngineFactory._registry[transport]()
    assert {n for n in vars(cls) if not n.startswith("_")} == {"start_weight_update", "finish_weight_update"}
    assert not cls.__abstractmethods__


class Small(torch.nn.Module):
    """A model with vLLM's way to take weights."""

    def __init__(self):
        super().__init__()
        self.a, self.b = (torch.nn.Parameter(torch.zeros(n).bfloat16(), requires_grad=False) for n in (6, 3))
        self.calls = 0

    def load_weights(self, items):
        self.calls += 1
        for name, tensor in items:
            getattr(self, name).copy_(tensor.reshape(-1))


def test_vllm_s_ipc_engine_takes_the_buckets_in_place(monkeypatch):
    """The engine is vLLM's; only what opens another process's GPU memory is replaced, by the bucket itself."""
    import types

    from vllm.config import WeightTransferConfig
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory, packed_tensor

    items = [("a", torch.randn(2, 3)), ("b", torch.randn(3))]
    exporter = Held(IPC)
    made = weights.publish(items, version=1, dtype="bfloat16", exporter=exporter, bucket_bytes=12)
    places = [[None] * 6 + [9, i] for i in range(2)]  # place 6 is the sender's card
    buckets = [dataclasses.replace(b, handles={"gpu-0": tuple(p)}) for b, p in zip(made.buckets, places, strict=True)]

    def opened(self, arguments):
        assert arguments[6] == 0  # now this process's own
        return exporter.flats[arguments[7]]

    monkeypatch.setattr(packed_tensor.PackedBufferImporter, "rebuild", opened)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: types.SimpleNamespace(uuid="gpu-0"))
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda *_: None)
    model, gpu = Small(), torch.device("cuda", 0)
    config = types.SimpleNamespace(parallel_config=None, model_config=None)
    assert WeightTransferConfig(backend="rlkit_ipc").backend == "rlkit_ipc"
    engine = receiving.make(IPC, config, gpu, model)
    assert isinstance(engine, WeightTransferEngineFactory._registry[receiving._in_place(IPC)]())
    before = model.a.data_ptr()
    receiving.receive(engine, buckets)
    assert model.calls == 2
    assert torch.equal(model.a, items[0][1].bfloat16().flatten())
    assert torch.equal(model.b, items[1][1].bfloat16())
    assert model.a.data_ptr() == before
