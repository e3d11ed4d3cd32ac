# SPDX-License-Identifier: Apache-2.0
"""`gather_codes`: FSDP2 gathers the codes of weights, and not their values."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from q2compile.capture.module_tree import children, under, unwrapped
from q2compile.errors import ConfigError
from q2compile.torch_internals import fsdp
from q2compile.weight_cache.gatherer import gatherer_of


def gather_codes(model: nn.Module) -> int:
    """Have FSDP2 all-gather the 4-bit codes of ``model``'s weights, with their block scales,
    instead of bf16 or fp32 values; return how many parameters it may do that for.

    Call it on all ranks, after `torch.distributed.fsdp.fully_shard`, on the model or on part of it;
    before or after ``compile``. A call after the first step has torch compile all its graphs again
    (`torch.compiler.reset`). A second call on the same model changes nothing.

        for layer in model.layers:
            layer.compile(backend="quartet2")
            fully_shard(layer)
        fully_shard(model)
        q2compile.gather_codes(model)

    Under all recipes but ``mxfp4`` and ``bf16`` the GEMMs of a layer read Q(w), and none reads w. A
    rank quantizes its shard and sends 0.5625 bytes for each element, where bf16 takes 2 and fp32 4
    (``nvfp4``: 0.504, its blocks are 16x16; ``quartet``: 0.656, with the trust mask). The gathered
    codes are inputs of the compiled graph. Nothing is quantized twice, so losses, gradients and
    weights keep their bits: `q2compile.weight_cache.shard_codes` has the argument. Each forward of
    the model has two more collectives, maxima of 1 and of 16 bytes for each weight, of which the
    host waits for the first; and two more for each further dimension of the mesh (HSDP, tensor
    parallel).

    Graphs that take codes are compiled without CUDA graphs, and the report says so. Under
    ``CPUOffloadPolicy`` the codes are made on the GPU, of shards that are copied there twice
    in a forward, and not in the backward.

    A rank on which the graphs that quantize shards fail, to compile or in their first call, warns
    and runs the same ops without a compiler. The other ranks notice nothing, and bits stay.

    Parameters, optimizers, ``state_dict`` and checkpoints stay those of FSDP2. After ``.to()`` or
    ``load_state_dict(assign=True)`` the next forward attaches again.

    Stacks of experts [E, N, K], parts of DTensors (tensor and expert parallel), and shards along
    another dimension than 0 (``shard_placement_fn``) are gathered as codes, too.

    Values are gathered as before, and the report's column "why" says so,

        in the first two forwards, until all ranks have read the same codes (`exchange`);
        of a weight that something besides such a layer reads, in the graph or by a policy;
        of a weight that is tied, on one rank alone, or fp16, or a DTensor whose parts differ in
            size;
        of one whose shards do not hold whole blocks: with 16x16 (or 32x32) blocks, where a rank's
            rows are no multiple of 16 (or 32); along columns, where a rank's are no multiple of
            16, or of 32 in MXFP4;
        under ``reshard_after_forward=<int>``;
        in a gather outside of the model's forward and backward, such as ``module.unshard()``.

    Other readers get values. A module that runs without its compiled graph gathers them; with
    graphs of another backend all weights are gathered as values, too; after a forward that no
    backward follows the weights that FSDP2 keeps gathered hold values, and between a forward and
    its backward their modules show the shards. Values are gathered besides codes where a module
    has a hook, on any rank, or a forward that is not compiled and names a weight inside it
    (`eager_readers`); a warning says so. Other code that is not compiled and reads a weight in the
    middle of the model's forward or backward gets a RuntimeError, from the op that reads or at the
    end of the forward: it should read in a hook, before the forward or after it, or be compiled.

    This is a function, and no option of the backend: options belong to one compiled part of a model
    and are first seen in the middle of a forward, after its first gathers. Ranks with different
    options could not find that out before they wait for each other.

    Raises:
        ConfigError, a ValueError: ``model`` has no module under fully_shard; later, in a forward: a
            rank has not called gather_codes, or on another model; ranks take different codes of a
            weight. All ranks raise it, none hangs.
    """
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
