"""Weights from GPU to GPU, the engine's side: vLLM's own weight-transfer engines, fed with the learner's packed buckets.

One engine a worker and transport, made at the first sync that needs it, so that an engine needs no setting for it. What an engine is told
about a bucket differs between vLLM 0.26 and 0.30 (what both sides must agree on moved to the start); `_known` gives each what it knows.

vLLM's engines load layer by layer into new memory and copy the result back, which serves any quantised layer. Where a loaded weight is what
the layer computes with, they are told to copy in place instead: faster, and CUDA graphs and tied layers keep their memory in both cases.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

from rlkit.transfer import NCCL, DeviceBucket

if TYPE_CHECKING:
    import torch

WHOLE_BUCKETS = 1 << 62  # bytes: vLLM's NCCL consumer takes all tensors that it is told of in one broadcast


def make(transport: str, vllm_config: Any, device: torch.device, model: Any) -> Any:
    """vLLM's worker-side engine for ``"ipc"`` or ``"nccl"``. One for NCCL must `join` before it receives."""
    from vllm.config import WeightTransferConfig
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    backend = _in_place(transport) if loads_in_place(model, device) else transport
    engine = WeightTransferEngineFactory.create_engine(WeightTransferConfig(backend=backend), vllm_config, device, model)
    if transport != NCCL:
        engine.init_transfer_engine(_known(engine.init_info_cls, packed=True))
    return engine


def join(engine: Any, host: str, port: int, first: int, members: int) -> None:
    """Enter the NCCL group whose member 0 is the learner; the workers of this vLLM are its members from ``first`` on."""
    info = {"master_address": host, "master_port": port, "rank_offset": first, "world_size": members}
    wire = {"packed": True, "packed_buffer_size_bytes": WHOLE_BUCKETS, "packed_num_buffers": 1}
    engine.init_transfer_engine(_known(engine.init_info_cls, **info, **wire))


def receive(engine: Any, buckets: list[DeviceBucket]) -> None:
    """Load the buckets. Returns when they are in the model."""
    engine.start_weight_update()
    for bucket in buckets:
        engine.update_weights(update_info(engine.update_info_cls, bucket))
    engine.finish_weight_update()


def update_info(cls: type, bucket: DeviceBucket) -> dict[str, Any]:
    """What vLLM's update info ``cls`` must be told of a bucket."""
    import torch

    width = getattr(torch, bucket.dtype).itemsize
    told = {
        "names": list(bucket.names),
        "dtype_names": [bucket.dtype] * len(bucket.names),
        "shapes": [list(shape) for shape in bucket.shapes],
        "packed": True,
        "packed_buffer_size_bytes": WHOLE_BUCKETS,
        "packed_num_buffers": 1,
        "ipc_handles": dict(bucket.handles),
        "tensor_sizes": [functools.reduce(int.__mul__, shape, width) for shape in bucket.shapes],
    }
    names = _names(cls)
    return {k: v for k, v in told.items() if k in names}


def loads_in_place(model: Any, device: torch.device) -> bool:
    """Whether every layer computes with its weights as they are loaded: none is quantised, repacked or turned into another form."""
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    if device.type != "cuda":
        return False
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if method is not None and type(method) not in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod):
            return False
        if hasattr(module, "process_weights_after_loading") and type(module) is not Attention:
            return False
    return True


@functools.cache
def _in_place(transport: str) -> str:
    """Register a subclass of vLLM's engine that copies into the model's parameters; returns its name."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    if transport == NCCL:
        from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine as Base
    else:
        from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine as Base

    class InPlace(Base):  # type: ignore[misc, valid-type]
        def start_weight_update(self) -> None:
            """Nothing to prepare: `load_weights` copies into the parameters."""

        def finish_weight_update(self) -> None:
            """Close the last bucket that vLLM 0.30 keeps open."""
            importer = getattr(self, "_packed_importer", None)
            if importer is not None:
                importer.close()

    name = f"rlkit_{transport}"
    WeightTransferEngineFactory.register_engine(name, InPlace)
    return name


def _names(cls: type) -> set[str]:
    return {f.name for f in dataclasses.fields(cls)}


def _known(cls: type, **values: Any) -> Any:
    """``cls`` of those values that it has fields for."""
    names = _names(cls)
    return cls(**{k: v for k, v in values.items() if k in names})
