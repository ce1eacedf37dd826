"""What the Triton kernels of a decode step have in common: when they may start, and how their programs count."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

HOPPER = 9  # the first generation on which a kernel may start before the one before it has ended
ROOM = 1 << 16

_arrivals: dict[torch.device, Tensor] = {}


def starts_early(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= HOPPER


def shared_memory(device: torch.device) -> int:
    """Bytes that a program may have on its multiprocessor."""
    if device.type != "cuda":
        return 1 << 20
    properties: Any = torch.cuda.get_device_properties(device)
    return properties.shared_memory_per_block_optin


def stages(wanted: int, size: int, memory: int) -> int:
    """Of a loop that loads `size` bytes at a time: as many as there is `shared_memory` for."""
    return max(1, min(wanted, memory // size))


def counters(device: torch.device, count: int) -> Tensor:
    """Of programs that have left their part for the last one to add up: int32, zero between two launches. All launches
    on a device share them, so all must be in one stream: two at a time would count each other's programs, for ever.

    Raises ValueError for more than there is room for: captured graphs remember the address."""
    if count > ROOM:
        raise ValueError(f"a decode step counts {count} tiles, there is room for {ROOM}: lower max_batch")
    if device not in _arrivals:
        _arrivals[device] = torch.zeros(ROOM, dtype=torch.int32, device=device)
    return _arrivals[device]
