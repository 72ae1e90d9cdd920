"""One rank's DeepSpeed engine: built from a `TrainSpec`, with the same few verbs for every ZeRO stage.

DeepSpeed partitions, reduces, clips and steps. What differs between its optimizers and is not covered by its public functions (where
the fp32 weights and the accumulated gradients lie) is kept in this one file.
"""

from __future__ import annotations

import logging
import math
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from rlkit.config import TrainSpec
from rlkit.errors import ModelError
from rlkit.models import load_causal_lm
from rlkit.zero import attention, ds_config, kernels, memory
from rlkit.zero.ds_config import chunk_of
from rlkit.zero.layout import Inputs
from rlkit.zero.policy import Policy, no_dropout, register_external

MOMENTS = ("exp_avg", "exp_avg_sq")
GATHER_ELEMENTS = 1 << 26  # elements gathered at once when whole parameters are read


def join(rank: int, world: int, address: tuple[str, int] | str, cuda: bool, timeout_s: float) -> None:
    """Join the ranks' process group: NCCL on GPUs, gloo on CPU. ``address`` is rank 0's (host, port), or a file when all share a node."""
    from datetime import timedelta

    if isinstance(address, str):
        store: Any = dist.FileStore(address, world)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    else:
        store = dist.TCPStore(address[0], address[1], world, is_master=rank == 0, timeout=timedelta(seconds=timeout_s))
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=timeout_s))


class Engine:
    """The policy under DeepSpeed. All methods that say *collective* must be called by every rank."""

    def __init__(self, path: str, spec: TrainSpec) -> None:
        self.spec = spec
        self.stage = spec.zero_stage
        self.world = dist.get_world_size()
        self.cuda = spec.gpus_per_rank > 0
        self.device = torch.device("cuda", 0) if self.cuda else torch.device("cpu")
        self.norm = 0.0  # of the gradient of the last step, before clipping
        self._skipped = False
        low = ds_config.precision(spec) == "bfloat16" and self.stage > 0
        model = load_causal_lm(path, torch.bfloat16 if low else torch.float32, spec.trust_remote_code)
        self.lora = spec.lora_rank > 0
        if self.lora:
            _add_lora(model, spec)
        no_dropout(model)
        self.facts = {"kernels": kernels.choose(spec)}  # how the model is run, for the learner's info
        self.varlen = self._choose_packing(model)
        kernels.apply(model, self.facts["kernels"])
        recompute = self._choose_checkpointing(model)
        if recompute:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            if self.lora:
                model.enable_input_require_grads()
        self.policy = Policy(model, chunk_of(spec.logits_chunk, model.config.get_text_config().vocab_size, self.cuda))
        self.policy.train(recompute)
        self.ds = self._initialize()
        if self.stage == 3:
            register_external(self.policy)
        elif self.stage == 0:
            self.ds.basic_optimizer.register_step_pre_hook(self._clip)

    def _choose_packing(self, model: Any) -> bool:
        """Whether micro-batches are one row without padding, and the attention for that."""
        wanted = ds_config.packing_of(self.spec)
        reason = attention.obstacle(model) if wanted == "varlen" else None
        self.facts["packing"] = "padded" if reason else wanted
        if reason:
            self.facts["packing_reason"] = f"padded because {reason}"
        elif wanted == "varlen":
            attention.use(model, self.cuda)
        return self.facts["packing"] == "varlen"

    def _choose_checkpointing(self, model: Any) -> bool:
        """What ``gradient_checkpointing`` says; None asks the free memory of the GPU, and all ranks do what one of them needs."""
        recompute, reason = bool(self.spec.gradient_checkpointing), "as set"
        if self.spec.gradient_checkpointing is None:
            reason = "off: not on a GPU"
            if self.cuda:
                params = sum(p.numel() for p in model.parameters())
                trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
                free, _ = torch.cuda.mem_get_info(self.device)
                config = model.config.get_text_config()
                recompute, reason = memory.checkpointing_needed(config, self.spec, params, trained, self.facts["kernels"], free)
                flag = torch.tensor([float(recompute)])
                dist.all_reduce(flag, dist.ReduceOp.MAX)
                recompute = bool(flag.item())
        self.facts |= {"gradient_checkpointing": "on" if recompute else "off", "gradient_checkpointing_reason": reason}
        return recompute

    def _initialize(self) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import deepspeed
        deepspeed.utils.logger.setLevel(logging.WARNING)
        # DeepSpeed calls torch.distributed functions that torch is renaming, a warning a call.
        warnings.filterwarnings("ignore", message=r"`torch\.distributed\..*` is deprecated", category=FutureWarning)
        if not self.cuda:
            # DeepSpeed would compile a C++ all-reduce at start (minutes when not cached); gloo does the same work.
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed("nccl" if self.cuda else "gloo", verbose=False)
        trained = [p for p in self.policy.parameters() if p.requires_grad]
        config = ds_config.make(self.spec, sum(p.numel() for p in trained), max(p.numel() for p in trained))
        engine, *_ = deepspeed.initialize(model=self.policy, model_parameters=trained, config=config)
        return engine

    @property
    def model(self) -> nn.Module:
        return self.policy.model

    def __call__(self, inputs: Inputs, temperature: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
        """``(logprobs (M,), entropy (M,))`` of `Policy`. Collective under ZeRO-3."""
        logprobs, entropy = self.ds(*inputs.to(self.device), temperature)
        return logprobs, entropy

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradient of ``loss`` to what is accumulated. Collective. DeepSpeed averages over ranks; here losses of ranks add up."""
        self.ds.backward(loss * self.world)

    def step(self, lr: float) -> bool:
        """Reduce, clip and apply the accumulated gradient; False when it was not finite and nothing was applied. Collective."""
        for group in self.ds.optimizer.param_groups:
            group["lr"] = lr
        self._skipped = False
        self.ds.step()
        if self.stage > 0:
            self.norm = float(self.ds.get_global_grad_norm())
            self._skipped = not self.ds.was_step_applied()
        return not self._skipped and math.isfinite(self.norm)

    def _clip(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """ZeRO-0: measure and clip the reduced gradient just before the optimizer takes it, as the other stages do inside DeepSpeed."""
        parameters = [p for _, p in self.trainable() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        self.norm = float(norm)
        if not math.isfinite(self.norm):
            self._skipped = True
            for p in parameters:
                p.grad = None  # torch's optimizers leave such parameters as they are
        elif self.spec.max_grad_norm > 0:
            torch.nn.utils.clip_grads_with_norm_(parameters, self.spec.max_grad_norm, norm)

    def discard(self) -> None:
        """Forget the accumulated gradients, as if the backward passes since the last step had not happened."""
        optimizer = self.ds.optimizer
        if self.stage == 0:
            self.ds.zero_grad()
            return
        optimizer.zero_grad()
        if hasattr(optimizer, "averaged_gradients") and self.stage < 3:
            optimizer.micro_step_id = -1
            optimizer._release_preflattened_grad_buffers()
            for group in range(len(optimizer.bit16_groups)):
                optimizer.averaged_gradients[group] = None
                optimizer.all_grad_tensors[group] = None
            if optimizer.cpu_offload:
                optimizer.reset_cpu_buffers()
                optimizer._offload_accumulated_param_ids = set()
        elif self.stage == 3:
            optimizer._offload_boundary_param_ids = set()

    # ---- whole parameters

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        """Trained parameters with their names in the model, tied ones once."""
        return [(n, p) for n, p in self.model.named_parameters() if p.requires_grad]

    @contextmanager
    def whole(self, parameters: Sequence[nn.Parameter], write: bool = False) -> Iterator[None]:
        """Inside, the parameters are whole on every rank. With ``write``, rank 0's changes are kept. Collective under ZeRO-3."""
        if self.stage < 3 or not parameters:
            yield
            return
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(parameters), modifier_rank=0 if write else None):
            yield

    def read(self, parameter: nn.Parameter, state: str | None = None) -> torch.Tensor:
        """A trained parameter in fp32, or one of its Adam moments, whole, on CPU. Collective."""
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        if self.stage == 0:
            source = parameter if state is None else self.ds.basic_optimizer.state[parameter][state]
            return source.detach().float().cpu()
        full = safe_get_full_fp32_param(parameter) if state is None else safe_get_full_optimizer_state(parameter, state)
        if full is None:
            raise ModelError(f"DeepSpeed has no {state or 'fp32 value'} for a trained parameter of shape {tuple(parameter.shape)}.")
        return full.detach().float().cpu().view(shape_of(parameter))

    def write(self, parameter: nn.Parameter, value: torch.Tensor, state: str | None = None) -> None:
        """Set what `read` reads, on every rank, from the whole ``value``. Collective under ZeRO-3."""
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

        value = value.to(self.device)
        if state is not None:
            if self.stage == 0:
                self.ds.basic_optimizer.state[parameter][state].copy_(value)
            else:
                safe_set_full_optimizer_state(parameter, value, state)
            return
        with self.whole([parameter], write=True), torch.no_grad():
            parameter.data.copy_(value)
        if self.stage > 0:
            safe_set_full_fp32_param(parameter, value)

    def has_moments(self) -> bool:
        """Whether Adam's states exist: they are made by the first step."""
        return any("exp_avg" in state for state in self.ds.basic_optimizer.state.values())

    def make_moments(self, steps: int) -> None:
        """Make Adam's states as zeros, as after ``steps`` steps, so that `write` can fill them."""
        optimizer = self.ds.basic_optimizer
        for flat in self.master():
            # The fused optimizer keeps its count of steps beside the parameters.
            step = torch.tensor(float(steps), device=flat.device)
            optimizer.state[flat] = {"step": step} | {name: torch.zeros_like(flat) for name in MOMENTS}
        if hasattr(self.ds.optimizer, "_lazy_init_hp_params_optimizer_state"):
            self.ds.optimizer._lazy_init_hp_params_optimizer_state()

    def clear_moments(self) -> None:
        """Back to before the first step."""
        self.ds.basic_optimizer.state.clear()
        if hasattr(self.ds.optimizer, "_hp_optimizer_states_linked"):
            self.ds.optimizer._hp_optimizer_states_linked = False

    def master(self) -> list[torch.Tensor]:
        """What the optimizer steps on: this rank's flat fp32 partitions, or with ZeRO-0 the parameters themselves."""
        optimizer = self.ds.optimizer
        for name in ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat", "fp32_groups_flat_partition"):
            if hasattr(optimizer, name):
                return list(getattr(optimizer, name))
        return [p for _, p in self.trainable()]


def shape_of(parameter: nn.Parameter) -> torch.Size:
    return getattr(parameter, "ds_shape", parameter.shape)


def _add_lora(model: nn.Module, spec: TrainSpec) -> None:
    """Put PEFT's LoRA layers into ``model``, fp32, and freeze the rest."""
    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(r=spec.lora_rank, lora_alpha=spec.lora_alpha, target_modules=list(spec.lora_targets), lora_dropout=0.0)
    for p in model.parameters():
        p.requires_grad_(False)
    try:
        inject_adapter_in_model(config, model)
    except ValueError as error:
        raise ModelError(
            f"LoRA cannot be added at {', '.join(spec.lora_targets)}: {error} Set lora_targets to layers that the model has."
        ) from error
