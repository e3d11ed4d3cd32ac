"""q2::pad_groups: groups of rows, each moved to where a group of more rows begins.

    pad_groups(x [T, C], offs [E], padded_offs [E], rows) -> [rows, C]

``offs`` are the ends of the groups of x, int32 and ascending: group e is x's rows from offs[e - 1]
to offs[e]. In the result it begins at padded_offs[e - 1]; the rows between two groups
and after the last are zero. Rows of x from offs[E - 1] on belong to no group and are dropped.

With padded groups of whole blocks and chunks, no block and no rotation along T mixes the rows of
two groups. ``rows`` is given, and no size is read from ``offs``: nothing waits for the device.
"""

from q2compile.runtime_kernels.registry import define


def fake(x, offs, padded_offs, rows):
    return x.new_empty((rows, x.shape[1]))


define("pad_groups(Tensor x, Tensor offs, Tensor padded_offs, SymInt rows) -> Tensor", fake=fake)
