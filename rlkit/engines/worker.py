"""What rlkit adds to vLLM's worker: taking new weights, and reading back what it computes with.

On the CPU vLLM repacks the weights of linear layers for its matrix kernels and frees the originals, so there is nothing to compare with
after loading. The proof is a product with the identity: row k of ``linear(eye(K))`` is column k of the weight, exactly, since every other
term is a zero. It shows what the layer computes with, and it found that vLLM 0.30 leaves a tied output layer packed from the old weights
after a reload; `_repack` packs it again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rlkit import transfer
from rlkit.checksum import checksum_each, checksums
from rlkit.engines import receiving
from rlkit.errors import SyncError
from rlkit.memory import Meter

if TYPE_CHECKING:
    import torch


class WeightWorker:
    """Mixed into vLLM's worker by ``worker_extension_cls``."""

    model_runner: Any
    _rlkit_tables: dict[str, int]

    def rlkit_load(self, items: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load whole tensors under their Hugging Face names, in place."""
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.vllm_config):  # type: ignore[attr-defined]
            self.reload_weights(weights_iterator=iter(items))  # type: ignore[attr-defined]
            _repack(self.model_runner.get_model())

    def rlkit_receive(self, transport: str, buckets: list[transfer.DeviceBucket]) -> None:
        """Load tensors from the ranks' GPUs; by NCCL only after `rlkit_link`.

        Raises:
            SyncError: no rank's card is this worker's, or there is no NCCL group.
        """
        import torch
        from vllm.config import set_current_vllm_config

        made = self._rlkit_engines()
        if transport == transfer.NCCL and transport not in made:
            raise SyncError("This engine has not joined an NCCL group with the learner.")
        if transport == transfer.IPC and (mine := self.rlkit_gpu()) not in buckets[0].handles:
            raise SyncError(f"No rank shares GPU {mine} with this engine, so CUDA IPC cannot bring its weights.")
        with set_current_vllm_config(self.vllm_config), torch.no_grad():  # type: ignore[attr-defined]
            if transport not in made:
                made[transport] = self._rlkit_engine(transport)
            receiving.receive(made[transport], buckets)

    def rlkit_link(self, host: str, port: int, first: int, members: int) -> None:
        """Join the NCCL group of rank 0 and the engines; this engine's workers are its members from ``first`` on."""
        engine = self._rlkit_engine(transfer.NCCL)
        receiving.join(engine, host, port, first, members)
        self._rlkit_engines()[transfer.NCCL] = engine

    def rlkit_gpu(self) -> str:
        """The uuid of this worker's card."""
        return transfer.gpu_uuid(self.device)  # type: ignore[attr-defined]

    def rlkit_remember(self) -> None:
        """Note what the model's tables (rotary cosines and sines) are, so that a sync can tell when it spoilt them."""
        self._rlkit_tables = tables(self.model_runner.get_model())

    def _rlkit_engines(self) -> dict[str, Any]:
        if not hasattr(self, "_rlkit_made"):
            self._rlkit_made: dict[str, Any] = {}
        return self._rlkit_made

    def _rlkit_engine(self, transport: str) -> Any:
        return receiving.make(transport, self.vllm_config, self.device, self.model_runner.get_model())  # type: ignore[attr-defined]

    def rlkit_weight_bytes(self) -> int:
        """Bytes of this worker's parameters, each storage once."""
        parameters = self.model_runner.get_model().parameters()
        return sum({p.untyped_storage()._cdata: p.untyped_storage().nbytes() for p in parameters}.values())

    def rlkit_meter(self, begin: bool) -> dict[str, float]:
        """This worker's memory since the last call with ``begin``; see `rlkit.memory.Meter`."""
        meter = Meter("cuda")
        if begin:
            meter.begin()
        return meter.end()

    def rlkit_held(self, shapes: Mapping[str, tuple[int, ...]], dtype: str) -> list[tuple[str, str, int]]:
        """(Hugging Face name, module, checksum) of all weights that this worker computes with.

        Raises:
            SyncError: a table of the model is no longer what it was when the model was loaded.
        """
        import torch

        kind = getattr(torch, dtype)
        with torch.no_grad():
            model = self.model_runner.get_model()
            found = list(checksum_each((name, where, tensor.to(kind)) for name, where, tensor in held(model, shapes)))
            spoilt = [name for name, value in tables(model).items() if self._rlkit_tables.get(name) != value]
        if spoilt:
            raise SyncError(f"Loading weights changed {', '.join(spoilt[:4])} in the engine, which no weight belongs to: start it anew.")
        return found

    def rlkit_apply(self, pickled: bytes) -> Any:
        """``fn(model)`` for a function pickled by value, which one of a notebook's cell must be."""
        import cloudpickle

        fn: Callable[[Any], Any] = cloudpickle.loads(pickled)
        return fn(self.model_runner.get_model())


def tables(model: Any) -> dict[str, int]:
    """name -> checksum of each table that the model computes with and no weight leads to: the rotary caches."""
    found = [(n, b) for n, b in model.named_buffers() if n.endswith("cos_sin_cache") and b.is_floating_point()]
    return checksums(found)


def held(model: Any, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, str, torch.Tensor]]:
    """(Hugging Face name, module, tensor) of every weight, fused ones taken apart; ``shapes`` are those of the whole tensors.

    A weight of the model that none of the names leads to comes under its own name, so that the caller sees it was not sent.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    parts = {part: (fused, list(names)) for fused, names in getattr(model, "packed_modules_mapping", {}).items() for part in names}
    covered: set[int] = set()
    last = ""  # the last fused module, and its tensors that were read back: its parts come one after the other
    read: dict[str, list[tuple[str, torch.Tensor]]] = {}
    embeddings: dict[int, str] = {}
    lookup = _lookup_only(model)
    for name, shape in shapes.items():
        path, _, leaf = _vllm_name(model, name).rpartition(".")
        if path in modules and leaf in modules[path]._parameters:
            module = modules[path]
            covered.add(id(module._parameters[leaf]))
            for where, tensor in _values(path, module, leaf, shape, packed=module is not lookup):
                yield name, where, tensor
            if leaf == "weight":
                embeddings[id(module._parameters[leaf])] = name
            continue
        target = _fused(path, parts, modules)
        if target is None:
            continue  # the caller reports it as not taken
        fused_path, siblings, part = target
        module = modules[fused_path]
        if leaf not in module._parameters:
            continue
        rows = [shapes[name.replace(f".{part}.", f".{s}.")][0] for s in siblings]
        at = siblings.index(part)
        covered.add(id(module._parameters[leaf]))
        if last != fused_path:
            last, read = fused_path, {}
        if leaf not in read:
            read[leaf] = list(_values(fused_path, module, leaf, (sum(rows), *shape[1:]), rows=rows))
        for where, tensor in read[leaf]:
            yield name, where, tensor.split(rows)[at]
    for path, module in modules.items():
        for leaf, parameter in module._parameters.items():
            if parameter is None or not hasattr(parameter, "shape"):
                continue
            tied = embeddings.get(id(parameter))
            if id(parameter) not in covered:
                yield f"{path}.{leaf}", path, parameter
            elif tied is not None and leaf == "weight" and _vllm_name(model, tied) != f"{path}.weight":
                for where, tensor in _values(path, module, leaf, shapes[tied], packed=module is not lookup):
                    yield tied, where, tensor


def _lookup_only(model: Any) -> Any | None:
    """The input embedding when another module is the output layer: vLLM packs it for products that it never makes."""
    head = getattr(model, "lm_head", None)
    tables = [m for m in model.modules() if hasattr(m, "cpu_linear") and hasattr(m, "num_embeddings") and m is not head]
    return tables[0] if head is not None and len(tables) == 1 else None


def _values(
    path: str, module: Any, leaf: str, shape: tuple[int, ...], *, rows: list[int] | None = None, packed: bool = True
) -> Iterator[tuple[str, torch.Tensor]]:
    """What ``module`` computes with as its ``leaf``, whole, by every way it is used; ``rows`` are those of the layers fused in it.

    With tensor parallelism every worker must ask for the same values in the same order: each one is gathered from all of them.
    """
    parameter = module._parameters[leaf]
    packed = packed and leaf == "weight" and hasattr(module, "cpu_linear") and len(shape) == 2
    found = [(path, parameter)] if parameter.numel() > 0 else []
    if packed:
        found.append((f"{path}, packed", _unpack(module, shape)))
    if not found:
        raise SyncError(f"{path}.{leaf} is empty in the engine.")
    for where, local in found:
        whole = _whole(module, leaf, local, rows or [shape[0]])
        if whole.shape[1:] != tuple(shape[1:]) or whole.shape[0] < shape[0]:
            raise SyncError(f"{path}.{leaf} is {tuple(whole.shape)} in the engine and {tuple(shape)} in the learner.")
        yield where, whole[: shape[0]]  # a vocabulary is padded


def _whole(module: Any, leaf: str, local: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """The whole tensor of which every tensor-parallel worker holds a part; ``local`` itself when there is one worker."""
    import torch

    workers = getattr(module, "tp_size", 1)
    if workers == 1:
        return local
    from vllm.distributed import tensor_model_parallel_all_gather

    if getattr(module, "input_size_per_partition", 0) != getattr(module, "input_size", 0):  # split by columns; its bias is not split
        return tensor_model_parallel_all_gather(local.contiguous(), 1) if leaf == "weight" else local
    blocks = tensor_model_parallel_all_gather(local.contiguous(), 0).chunk(workers)
    if hasattr(module, "num_embeddings"):
        return torch.cat(blocks)
    copies = [1] * len(rows)  # key and value heads are repeated where there are fewer of them than workers
    if hasattr(module, "num_kv_head_replicas"):
        copies = [1, *[module.num_kv_head_replicas] * (len(rows) - 1)]
    sizes = [n * c // workers for n, c in zip(rows, copies, strict=True)]
    pieces = [block.split(sizes) for block in blocks]
    return torch.cat([torch.cat([p[i] for p in pieces[:: copies[i]]]) for i in range(len(rows))])


def _unpack(module: Any, shape: tuple[int, ...]) -> torch.Tensor:
    """(rows, columns) of this worker's part of the weight, as ``module.cpu_linear`` multiplies with it, by blocks of 256 columns."""
    import torch

    kind = getattr(module, "params_dtype", None) or module.weight.dtype
    columns = getattr(module, "input_size_per_partition", shape[1])
    out = []
    for start in range(0, columns, 256):
        x = torch.zeros(min(256, columns - start), columns, dtype=kind)
        x[torch.arange(len(x)), start + torch.arange(len(x))] = 1
        out.append(module.cpu_linear(x, module.weight, None))
    return torch.cat(out).t().contiguous()


def _repack(model: Any) -> None:
    """Pack again what shares its weight with another layer and so was not told that it changed."""
    lookup = _lookup_only(model)
    for module in model.modules():
        if hasattr(module, "cpu_linear") and module.weight.numel() > 0 and module is not lookup:
            module.quant_method.process_weights_after_loading(module)


def _fused(path: str, parts: Mapping[str, tuple[str, list[str]]], modules: Mapping[str, Any]) -> tuple[str, list[str], str] | None:
    """(fused module's path, its parts in order, this part) for the path of a module that vLLM fused with others."""
    pieces = path.split(".")
    for i, piece in enumerate(pieces):
        if piece in parts:
            fused, siblings = parts[piece]
            there = ".".join([*pieces[:i], fused, *pieces[i + 1 :]])
            if there in modules:
                return there, siblings, piece
    return None


def _vllm_name(model: Any, name: str) -> str:
    """The model's name for a Hugging Face name, but for the fusing of layers, which `_fused` undoes."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    if mapper is None:
        return name
    if hasattr(mapper, "orig_to_new_stacked"):  # names the fused layer in place of its parts
        mapper = dataclasses.replace(mapper, orig_to_new_stacked={})
    mapped = mapper._map_name(name)
    return name if mapped is None else mapped
