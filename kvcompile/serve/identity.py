"""What the bytes of a page depend on besides the tokens: the parts of the key before its first page.

Within one engine these are its plan, its scales, the weights as they are now, and the salt of whoever may share the
page, behind a secret of its own. A store outlives the engine, so it has the secret, and whatever else decides bits is
said: which weights, whose code, on what it runs, in which pieces prompts come.
"""

from __future__ import annotations

import platform
import secrets
import threading

import torch

from kvcompile.runtime.module import CachedModel
from kvcompile.serve.disk import Disk
from kvcompile.serve.pages import Key
from kvcompile.serve.prefix import root
from kvcompile.util.code_digest import code_digest


class Identity:
    """Of one engine; any thread may ask."""

    def __init__(self, module: CachedModel, chunk: int, alone: bool, disk: Disk | None):
        """
        chunk: tokens of prompts in one pass
        alone: whether all that is shared was computed in whole chunks, each in a pass of its own
        disk:  the store that pages may outlive the engine in
        """
        self._module, self._disk = module, disk
        self._pieces = f"{chunk} alone" if alone else str(chunk)
        self._secret = secrets.token_bytes(32) if disk is None else disk.secret
        saved = set(module.model.state_dict(keep_vars=True))
        named = [*module.model.named_parameters(), *module.model.named_buffers()]
        self._tensors = [tensor for name, tensor in named if name in saved and not tensor.is_inference()]
        self._lock = threading.Lock()
        self._versions: tuple[int, ...] = ()
        self._weights: tuple[str, ...] | None = None

    def root(self, salt: str) -> Key:
        """The key before the first page of texts of a salt."""
        plan = self._module.plan
        return root(self._secret, plan.digest(), plan.scales or "", *self._now(), salt)

    def _now(self) -> tuple[str, ...]:
        """Of the weights, which may change in place."""
        versions = tuple(tensor._version for tensor in self._tensors)
        with self._lock:
            if self._weights is None or versions != self._versions:
                self._versions = versions
                self._weights = (str(versions),) if self._disk is None else self._lasting()
            return self._weights

    def _lasting(self) -> tuple[str, ...]:
        """Of what is the same in another process only if this says so."""
        module, device = self._module, self._module.device
        where = platform.processor() or platform.machine()
        if device.type == "cuda":
            where = torch.cuda.get_device_name(device)
        compiled = str(module.recipe.compile) if module.recipe is not None else ""
        how = (code_digest(), torch.__version__, compiled, str(module.executor.compiled))
        return (module.weights_digest(), *how, device.type, where, self._pieces)
