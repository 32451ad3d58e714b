"""What makes thousands of tiny models quick in one process."""

from __future__ import annotations

import gc

import torch
import torch._dynamo.config


def quick() -> None:
    torch.set_num_threads(1)
    torch._dynamo.config.fake_tensor_cache_enabled = False
    gc.set_threshold(100_000, 50, 100)
