# SPDX-License-Identifier: Apache-2.0
"""The counters of the option ``seed``, to be saved and restored with a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from q2compile.config import SEEDS
from q2compile.errors import ConfigError, shown
from q2compile.runtime_kernels.ops.seed import COUNTERS, counter

_COUNTS = range(2**63)


def get_rng_state() -> dict[str, dict[int, int]]:
    """Return how many seeds were drawn under the option ``seed``: {device: {seed: count}}. With it
    in a checkpoint, `set_rng_state` continues with the random bits that would have come next.

    The call waits for the devices. The result is empty if no graph was compiled with that option.
    """
    state: dict[str, dict[int, int]] = {}
    for (key, device), of_key in list(COUNTERS.items()):
        if device.type != "meta":  # of a model that was explained without memory
            state.setdefault(str(device), {})[key] = int(of_key)
    return state


def set_rng_state(state: Mapping[str, Mapping[int, int]]) -> None:
    """Continue from what `get_rng_state` returned. Call it before or after the model is compiled.

    The state of a single CUDA device is restored on the current one, so a rank may restore what
    was saved on a GPU with another number. Counters that the state does not name start at 0.

    Raises ConfigError, a ValueError, if ``state`` is not such a mapping, or names a missing device.
    """
    try:
        wanted = {
            (_whole(key, SEEDS), _device(device)): _whole(count, _COUNTS)
            for device, of_device in state.items()
            for key, count in of_device.items()
        }
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"set_rng_state: got {shown(state)} ({error}); allowed: what get_rng_state returned"
        ) from None
    if len({device for _, device in wanted if device.type == "cuda"}) == 1:
        wanted = {(key, _current(device)): count for (key, device), count in wanted.items()}
    for device in {device for _, device in wanted}:
        try:
            torch.empty((), device=device)
        except (AssertionError, RuntimeError) as error:
            raise ConfigError(f"set_rng_state: there is no {device} here: {error}") from None
    for key, device in wanted:
        counter(key, device)
    for name, of_key in list(COUNTERS.items()):
        of_key.fill_(wanted.get(name, 0))


def _whole(value: object, allowed: range) -> int:
    """A whole number, or the text of one: JSON turns keys into texts."""
    number = int(value) if isinstance(value, str) else value
    if type(number) is not int or number not in allowed:
        raise ValueError(f"{shown(value)} is not a whole number from {allowed[0]} to {allowed[-1]}")
    return number


def _device(name: object) -> torch.device:
    device = torch.device(name) if isinstance(name, str) else name
    if not isinstance(device, torch.device) or device.type == "meta":
        raise ValueError(f"{shown(name)} is not a device with memory")
    return device


def _current(device: torch.device) -> torch.device:
    if device.type != "cuda" or not torch.cuda.is_available():
        return device
    return torch.device("cuda", torch.cuda.current_device())
