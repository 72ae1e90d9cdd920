"""A rank's DeepSpeed engine after a forward or backward pass that stopped half-way, as when memory ran out: usable again, nothing applied.

DeepSpeed keeps notes while a backward pass runs (which gradients are in a bucket, which parameters were reduced or gathered, how deep it
is in autograd) and clears them at its end, which did not come. They are cleared here, in this one place.
"""

from __future__ import annotations

import gc
from typing import Any

import torch

from rlkit.zero.engine import MOMENTS, Engine


def after_error(engine: Engine) -> None:
    """Forget accumulated gradients and all that the interrupted pass left, and free its memory.

    Collective in nothing: with several ranks the others may be waiting for this one, and have to be ended.
    """
    optimizer: Any = engine.ds.optimizer
    for parameter in engine.policy.parameters():
        parameter.grad = None
    engine.discard()
    hooks = getattr(optimizer, "_backward_hook_state", None)
    if hooks is not None:
        while hooks.backward_active_depth > 0:
            hooks.exit_backward()
        hooks.remaining_grad_acc_hooks = 0
        hooks.reset_for_new_step()
    for bucket in getattr(optimizer, "ipg_buckets", {}).values():
        (bucket.clear_params if hasattr(bucket, "clear_params") else bucket.clear)()
    reduced = getattr(optimizer, "params_already_reduced", None)
    if reduced is not None:
        for key in list(reduced) if isinstance(reduced, dict) else range(len(reduced)):
            reduced[key] = False
    for state in engine.ds.basic_optimizer.state.values():
        if not all(name in state for name in MOMENTS):
            state.clear()  # memory ran out while they were made; the next step makes them
    if hasattr(optimizer, "parameter_offload"):  # ZeRO-3: give gathered parameters back; a half-recorded order of modules is worth nothing
        optimizer.parameter_offload.release_backward_leftovers()
        optimizer.parameter_offload.partition_all_parameters()
        coordinator = optimizer.parameter_offload.get_param_coordinator()
        if not coordinator.is_invalid_trace():
            coordinator._invalidate_trace()
    gc.collect()  # the traceback's frames held activations
    if engine.cuda:
        torch.cuda.empty_cache()
