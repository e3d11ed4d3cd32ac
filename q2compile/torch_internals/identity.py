# SPDX-License-Identifier: Apache-2.0
"""Which tensor a tensor is, without keeping it alive."""

from __future__ import annotations

from itertools import count

from torch import Tensor

_NUMBER = "_q2_number"  # an attribute of tensors that were asked about
_numbers = count(1)


def identity_of(w: Tensor) -> tuple[int, int]:
    """Tells ``w`` from every other tensor, also from a later one that Python puts in its place.

    A number at the tensor is needed because ids are reused, and a weak reference would keep
    torch.utils.swap_tensors from working. The id is needed because copies of a tensor have its
    attributes. An int can be pickled with the tensor, and loaded with weights_only.
    """
    if _NUMBER not in vars(w):
        setattr(w, _NUMBER, next(_numbers))
    return id(w), vars(w)[_NUMBER]
