# SPDX-License-Identifier: Apache-2.0
"""Classes and tables of torch that have no public name and are used as they are."""

from torch._subclasses import FakeTensor as FakeTensor
from torch._subclasses import FakeTensorMode as FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor as AsyncCollectiveTensor
from torch.utils._dtype_abbrs import dtype_abbrs as dtype_abbrs
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
