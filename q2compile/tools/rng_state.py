# SPDX-License-Identifier: Apache-2.0
"""The counters of the option ``seed``, to be saved and restored with a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from q2compile.errors import ConfigError, shown
from q2compile.runtime_kernels.ops.seed import counter, counters


def get_rng_state() -> dict[str, dict[int, int]]:
    """How many seeds were drawn under the option ``seed``: {device: {seed: count}}. A checkpoint
    that holds it lets `set_rng_state` go on with the random bits that would have come next.

    Waits for the devices. Empty if no graph was compiled with that option.
    """
    state: dict[str, dict[int, int]] = {}
    for (key, device), of_key in counters().items():
        state.setdefault(str(device), {})[key] = int(of_key)
    return state


def set_rng_state(state: Mapping[str, Mapping[int, int]]) -> None:
    """Go on from what `get_rng_state` returned, before or after the model is compiled.

    The state of a single CUDA device goes to the current one: a rank may restore what another saved
    on a GPU of another number. Counters that the state does not name begin again.

    Raises ConfigError, a ValueError, if it is no such state, or names a device that is missing.
    """
    try:
        wanted = {
            (int(key), torch.device(device)): int(count)
            for device, of_device in state.items()
            for key, count in of_device.items()
        }
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"set_rng_state: got {shown(state)} ({error}); allowed: what get_rng_state returned"
        ) from None
    if len({device for _, device in wanted if device.type == "cuda"}) == 1:
        wanted = {(key, _current(device)): count for (key, device), count in wanted.items()}
    for key, device in wanted:
        try:
            counter(key, device)
        except (AssertionError, RuntimeError) as error:
            raise ConfigError(f"set_rng_state: there is no {device} here: {error}") from None
    for name, of_key in counters().items():
        of_key.fill_(wanted.get(name, 0))


def _current(device: torch.device) -> torch.device:
    if device.type != "cuda" or not torch.cuda.is_available():
        return device
    return torch.device("cuda", torch.cuda.current_device())
