# SPDX-License-Identifier: Apache-2.0
"""FSDP1, torch's FullyShardedDataParallel: what it leaves of a model's parameters.

While a module runs, FSDP1 puts plain views of a flat parameter where the parameters were. Between
two runs a parameter is a shard in one dimension. So neither names nor shapes of layers that are not
running can be told, and q2compile leaves such layers alone and says so.
"""

from __future__ import annotations

from torch import Tensor

UNSUPPORTED = "FullyShardedDataParallel (FSDP1) is not supported while fully_shard (FSDP2) is"
_FLATTENED = "_fsdp_flattened"  # FSDP1 sets it on parameters and on the flat parameter


def is_flattened(t: Tensor) -> bool:
    """Whether ``t`` is a parameter that FSDP1 has flattened, or the flat one, or its view."""
    return hasattr(t, _FLATTENED) or hasattr(t._base, _FLATTENED)
