# SPDX-License-Identifier: Apache-2.0
"""`gather_codes`: FSDP2 gathers the codes of weights, and not their values."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from q2compile.capture.module_tree import children, under, unwrapped
from q2compile.errors import ConfigError, shown
from q2compile.torch_internals import fsdp
from q2compile.weight_cache.gatherer import gatherer_of


def gather_codes(model: nn.Module) -> int:
    """Have FSDP2 all-gather the 4-bit codes of ``model``'s weights, with their block scales,
    instead of bf16 or fp32 values; return how many parameters it may do that for.

    Call it on all ranks, at the same place, because it is a collective; after
    `torch.distributed.fsdp.fully_shard`, on the model or on a part of it, before or after
    ``compile``. After the first step, the call makes torch compile all graphs again
    (`torch.compiler.reset`). A second call on the same model changes nothing.

        for layer in model.layers:
            layer.compile(backend="quartet2")
            fully_shard(layer)
        fully_shard(model)
        q2compile.gather_codes(model)

    In all recipes except ``mxfp4`` and ``bf16``, the GEMMs of a layer read Q(w), and none reads w.
    A rank quantizes its shard and sends 0.5625 bytes per element, instead of 2 in bf16 and 4 in
    fp32 (``nvfp4``: 0.504, because its blocks are 16x16; ``quartet``: 0.656, with the trust mask).
    The gathered codes are inputs of the compiled graph. Nothing is quantized twice, so losses,
    gradients and weights keep their bits: `runtime_kernels.numerics.shards` has the argument.
    Each forward of the model has two more collectives, maxima of 16 and of 4 bytes per weight, and
    one more for each further dimension of the mesh (HSDP, tensor parallel). The host waits for the
    first.

    Graphs that take codes are compiled without CUDA graphs, and the report says so. Under
    ``CPUOffloadPolicy`` the codes are computed on the GPU, from shards that are copied there twice
    in a forward, and not in the backward.

    If compiling or running the shard quantizers fails on one rank, that rank warns and runs the
    same ops in eager mode. The other ranks are not affected, and all bits stay the same.

    Parameters, optimizers, ``state_dict`` and checkpoints are those of FSDP2. After ``.to()`` or
    ``load_state_dict(assign=True)``, the next forward sets this up again.

    Stacks of experts [E, N, K], parts of DTensors (tensor and expert parallel), and shards along
    another dimension than 0 (``shard_placement_fn``) are gathered as codes, too.

    Values are gathered as before, and the report's column "why" says so,

        in the first forward, until all ranks have read the same codes (`exchange`);
        if something other than such a layer reads the weight, in the graph or by a policy;
        if the weight is tied, on one rank only, or fp16, or a DTensor whose parts differ in size;
        if shards do not hold whole blocks: with 16x16 (or 32x32) blocks, if a rank's rows are not a
            multiple of 16 (or 32); along columns, if a rank's columns are not a multiple of 16, or
            of 32 in MXFP4;
        under ``reshard_after_forward=<int>``;
        in a gather outside of the model's forward and backward, such as ``module.unshard()``.

    Other readers get values. A module that runs without its compiled graph gathers them. If the
    graphs are another backend's, all weights are gathered as values. After a forward without a
    backward, the weights that FSDP2 keeps gathered hold values. Between a forward and its backward,
    their modules show the shards. Values are gathered beside codes where a module has a hook on any
    rank, or a forward that is not compiled and names a weight inside it, also in a function that it
    names (`eager_readers`); a warning says so. Other code that is not compiled and reads a weight
    in the middle of the model's forward or backward gets a RuntimeError, from the op that reads or
    at the end of the forward. It should read in a hook, before or after the forward, or be
    compiled.

    This is a function and not an option of the backend, because options belong to one compiled part
    of a model and are first seen in the middle of a forward, after its first gathers. Ranks with
    different options could not find that out before they wait for each other.

    Raises:
        ConfigError, a ValueError: ``model`` has no module under fully_shard, or ranks have called
            it on different models. Later, in a forward: ranks take different codes of a weight. All
            ranks raise it, and none hangs.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"gather_codes: got {shown(model)}; allowed: a torch.nn.Module")
    model = unwrapped(model)
    roots = list(_roots(model, ""))
    if not roots:
        raise ConfigError(
            f"gather_codes: {type(model).__name__} has no module under fully_shard; call "
            "fully_shard on it, or on its layers, before gather_codes"
        )
    found = [gatherer_of(name, root) for name, root in roots]
    return sum(not weight.why for gatherer in found for weight in gatherer.weights)


def _roots(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """The outermost modules under fully_shard, with their names."""
    if fsdp.is_sharded(module):
        yield name, module
        return
    for part, child in children(module).items():
        yield from _roots(child, under(name, part))
