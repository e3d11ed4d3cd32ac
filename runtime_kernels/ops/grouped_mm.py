# SPDX-License-Identifier: Apache-2.0
"""q2::grouped_mm: a matrix product for each group of rows, in the operands' own precision.

    grouped_mm(a [T, K], b [E, K, N], offs [E]) -> [T, N]      rows of group e times b[e]
    grouped_mm(a [M, T], b [T, N], offs [E])    -> [E, M, N]   columns of group e times its rows

``offs``: int32 ends of the groups along T. The same as torch._grouped_mm, except that rows of no
group, from offs[E - 1] on, are zero there, and that torch.compile takes it in any dtype.
"""

import torch

from q2compile.runtime_kernels.registry import define


def fake(a, b, offs):
    if b.dim() == 3:
        return a.new_empty((a.shape[0], b.shape[2]))
    return a.new_empty((offs.shape[0], a.shape[0], b.shape[1]))


@define("grouped_mm(Tensor a, Tensor b, Tensor offs) -> Tensor", fake=fake)
def grouped_mm(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """See above. On CUDA this serves operands that are not bf16. torch reads their offsets on the
    host, once for each call."""
    out = torch._grouped_mm(a, b, offs=offs)
    if b.dim() == 3:  # torch does not write the rows of no group
        row = torch.arange(a.shape[0], device=a.device)
        out.masked_fill_((row >= offs[-1])[:, None], 0)
    return out
