# SPDX-License-Identifier: Apache-2.0
"""The warnings of one kind among those that a test caught."""

import warnings
from collections.abc import Iterable


def texts(caught: Iterable[warnings.WarningMessage], kind: type[Warning]) -> list[str]:
    """Texts of those of this kind, in order. torch warns, too: of what it finds deprecated in its
    own modules, once a process, so in whichever test comes first."""
    return [str(w.message) for w in caught if issubclass(w.category, kind)]
