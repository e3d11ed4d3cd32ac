# SPDX-License-Identifier: Apache-2.0
"""DDP, FSDP2, tensor, sequence and pipeline parallel: gloo ranks against one process.

The workers in this folder train the same small model on the same batches from the same weights.
These tests compare their results, which must agree as follows:

- Codes are made block by block, so a rank's codes are one process's codes wherever its shards end
  between blocks. The first loss, before any random rounding, differs by fp32 sums alone.
- Later losses differ by the random bits, by as much as other random bits do in one process.
- Ranks that compute the same tensor must get the same bits.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.end_to_end.distributed.ranks import run as run_worker

WORKERS = Path(__file__).parent
sys.path.insert(0, str(WORKERS))

from tensor_parallel import FP8  # noqa: E402
from training import INNER, LAYERS, STEPS, UNEVEN, Result, new_model, train  # noqa: E402

# Relative. fp32 sums of up to 128 terms in another order: 128 * 2**-24 at most.
FP32_SUMS = 8e-6
# bf16 activations of about 1 in a loss of about 5: 2**-9 for each of the roundings on the way.
BF16_ACTIVATIONS = 1e-3
ROUNDING_SEEDS = range(8)
PROJECTIONS = ["gate", "up", "down"]
BLOCKS = [f"layers.{i}.{name}" for i in range(LAYERS) for name in PROJECTIONS]

Ranks = list[Result]


def run(worker: str, ranks: int, folder: Path) -> dict[str, Ranks]:
    """Scenario -> the result of each rank."""
    run_worker(worker, ranks, str(folder))
    found: dict[str, Ranks] = {}
    for rank in range(ranks):
        for path in sorted(folder.glob(f"*.rank{rank}.pt")):
            name = path.name.partition(".")[0]
            found.setdefault(name, []).append(torch.load(path, weights_only=False))
    return found


@pytest.fixture(scope="module")
def data_parallel(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ranks]:
    return run("data_parallel.py", 2, tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def tensor_parallel(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ranks]:
    return run("tensor_parallel.py", 2, tmp_path_factory.mktemp("tensor"))


@pytest.fixture(scope="module")
def two_dimensional(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ranks]:
    return run("tensor_parallel.py", 4, tmp_path_factory.mktemp("two_dimensional"))


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return run("pipeline.py", 2, tmp_path_factory.mktemp("pipeline"))["pipeline"]


class OneProcess:
    """The same training in this process, with every seed of the random bits; each is run once.
    recipe None: not compiled."""

    def __init__(self) -> None:
        self.results: dict[str, list[Result]] = {}

    def __call__(
        self,
        recipe: str | None = "quartet2",
        policy: Mapping[str, Any] | None = None,
        inner: int = INNER,
        layers: int = LAYERS,
        autocast: bool = False,
    ) -> list[Result]:
        key = f"{recipe} {policy} {inner} {layers} {autocast}"
        if key not in self.results:
            call: Any = (model := new_model(inner, layers))
            if recipe is not None:
                options = {"inner": "eager", "recipe": recipe, "policy": policy or {}}
                call = torch.compile(model, backend="quartet2", options=options)
            self.results[key] = []
            for rounding_seed in ROUNDING_SEEDS if recipe is not None else [0]:
                model.load_state_dict(new_model(inner, layers).state_dict())
                self.results[key].append(
                    train(model, call, rounding_seed=rounding_seed, autocast=autocast)
                )
        return self.results[key]


@pytest.fixture(scope="module")
def one_process() -> OneProcess:
    torch._dynamo.reset()
    return OneProcess()


def assert_trains_alike(
    ranks: Sequence[Result],
    single: list[Result],
    plain: Result,
    first_loss: float = FP32_SUMS,
) -> None:
    """One process and several ranks agree, up to sums and random bits.

    single: one process with the same recipe and other random bits; plain: in high precision.
    """
    for result in ranks:
        assert not result.error, result.error
    losses = next(r.losses for r in ranks if r.losses)
    assert losses[0] == pytest.approx(single[0].losses[0], rel=first_loss)
    for step in range(1, STEPS):
        others = [r.losses[step] for r in single]
        # 5 sigma of a sigma estimated from 8: one in two thousand by Student's t.
        budget = 5 * statistics.stdev(others) + first_loss * others[0]
        assert abs(losses[step] - statistics.mean(others)) < budget, step
    gradients = {name: g for r in ranks for name, g in r.gradients.items()}
    assert gradients.keys() == plain.gradients.keys()
    for name, gradient in gradients.items():
        # 1.5 times the worst of 8 draws. A sum that is missing or added twice gives 1.
        worst = max(relative_error(r.gradients[name], plain.gradients[name]) for r in single)
        found = relative_error(gradient, plain.gradients[name])
        assert found < 1.5 * worst + 10 * first_loss, name


def relative_error(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


def taken(result: Result) -> list[str]:
    return [row["module"] for row in result.rows if row["taken"]]


def assert_equal_on_all_ranks(ranks: Ranks, names: Iterable[str]) -> None:
    for name in names:
        for other in ranks[1:]:
            assert torch.equal(ranks[0].parameters[name], other.parameters[name]), name


# In tensor parallel, what both ranks compute.
REPLICATED = ["embed.weight", "norm.weight", "head.weight"]
REPLICATED += ["layers.0.norm.weight", "layers.0.down.bias"]

# The worker's, with a policy that a graph shared by the layers could not keep.
TOLD_APART = {"layers.1.*": {"recipe": "quartet2", "wgrad": "bf16"}, "head": "bf16"}


@pytest.mark.parametrize("scenario", ["ddp_around_the_compiled_model", "ddp_in_buckets", "fsdp"])
def test_data_parallel(
    scenario: str, data_parallel: dict[str, Ranks], one_process: OneProcess
) -> None:
    ranks = data_parallel[scenario]
    assert_trains_alike(ranks, one_process(policy=TOLD_APART), one_process(None)[0])
    assert taken(ranks[0]) == taken(ranks[1]) == BLOCKS
    wgrads = {row["module"]: row["wgrad"] for row in ranks[0].rows if row["taken"]}
    assert {name for name, wgrad in wgrads.items() if wgrad == "bf16"} == set(BLOCKS[3:])


@pytest.mark.parametrize("scenario", ["ddp_around_the_compiled_model", "ddp_in_buckets"])
def test_replicas_stay_equal_though_their_random_bits_differ(
    scenario: str, data_parallel: dict[str, Ranks]
) -> None:
    ranks = data_parallel[scenario]
    assert_equal_on_all_ranks(ranks, ranks[0].parameters)


def test_ddp_and_fsdp_give_the_same_gradients(data_parallel: dict[str, Ranks]) -> None:
    """The same graph, once compiled for each, on the same parts with the same random bits."""
    ddp, fsdp = data_parallel["ddp_around_the_compiled_model"][0], data_parallel["fsdp"][0]
    for name, gradient in ddp.gradients.items():
        assert relative_error(fsdp.gradients[name], gradient) < FP32_SUMS, name


def test_fsdp_blocks_share_a_graph(
    data_parallel: dict[str, Ranks], one_process: OneProcess
) -> None:
    """FSDP's hooks around the blocks break the graph; names stay those of the whole model."""
    ranks = data_parallel["fsdp_blocks"]
    policy = {"*.down": "bf16", "head": "bf16"}
    assert_trains_alike(ranks, one_process(policy=policy), one_process(None)[0])
    assert taken(ranks[0]) == ["layers.0.gate", "layers.0.up"]
    (note,) = [note for note in ranks[0].notes if note.startswith("the graph compiled for")]
    assert note.endswith("layers.1.gate, layers.1.up, layers.1.down")
    (head,) = [row for row in ranks[0].rows if row["module"] == "head"]
    assert not head["taken"] and head["why"].startswith("not seen")
    refused = data_parallel["fsdp_blocks_told_apart"][0].error
    assert "'layers.0.gate' and 'layers.1.gate' different recipes" in refused


def test_fsdp_mixed_precision_with_compiled_blocks(
    data_parallel: dict[str, Ranks], one_process: OneProcess
) -> None:
    ranks = data_parallel["fsdp_compiled_blocks"]
    policy = {"*.down": "bf16", "head": "bf16"}
    plain = one_process(None)[0]
    assert_trains_alike(ranks, one_process(policy=policy), plain, BF16_ACTIVATIONS)
    assert {row["dtype"] for row in ranks[0].rows if row["taken"]} == {"bfloat16"}
    # The second block is still sharded, and fp32, when the first one's graph is made.
    (note,) = [note for note in ranks[0].notes if note.startswith("the graph compiled for")]
    assert note.endswith("layers.1.gate, layers.1.up, layers.1.down")
    assert [row["module"] for row in ranks[0].rows if row["why"].startswith("not seen")] == ["head"]


def test_activation_checkpointing_changes_nothing(data_parallel: dict[str, Ranks]) -> None:
    """The recomputed forward rounds the same way, and the names are the user's."""
    for plain, checkpointed in zip(
        data_parallel["fsdp_compiled_blocks"],
        data_parallel["fsdp_checkpointed_blocks"],
        strict=True,
    ):
        assert not checkpointed.error, checkpointed.error
        assert checkpointed.losses == plain.losses
        assert taken(checkpointed) == taken(plain) == ["layers.0.gate", "layers.0.up"]
        assert checkpointed.notes == plain.notes


@pytest.mark.parametrize(
    ("scenario", "how", "tolerance"),
    [
        ("tensor", {}, FP32_SUMS),
        ("tensor_autocast_seed", {"autocast": True}, BF16_ACTIVATIONS),
        ("sequence", {}, FP32_SUMS),
        ("fp8", FP8, BF16_ACTIVATIONS),  # its forward rounds to nearest: no spread of random bits
    ],
)
def test_tensor_parallel(
    scenario: str,
    how: dict[str, Any],
    tolerance: float,
    tensor_parallel: dict[str, Ranks],
    one_process: OneProcess,
) -> None:
    ranks = tensor_parallel[scenario]
    single = one_process(layers=1, **how)
    assert_trains_alike(ranks, single, one_process(None, layers=1)[0], tolerance)
    assert taken(ranks[0]) == taken(ranks[1]) == [*BLOCKS[:3], "head"]


@pytest.mark.parametrize("scenario", ["tensor", "tensor_autocast_seed", "fp8"])
def test_redundant_compute_draws_the_same_random_bits(
    scenario: str, tensor_parallel: dict[str, Ranks]
) -> None:
    """Trap: both ranks compute the quantized head; other random bits would let its copies drift.
    With the option seed the ranks' generators have different seeds."""
    ranks = tensor_parallel[scenario]
    assert_equal_on_all_ranks(ranks, REPLICATED)
    cut = "layers.0.up.weight"
    assert not torch.equal(ranks[0].parameters[cut], ranks[1].parameters[cut])


def test_without_the_option_seed_other_generators_let_copies_drift(
    tensor_parallel: dict[str, Ranks],
) -> None:
    drifted = [rank.drifted["head.weight"] for rank in tensor_parallel["tensor"]]
    assert relative_error(drifted[0], drifted[1]) > 1e-4


def test_uneven_shards(tensor_parallel: dict[str, Ranks], one_process: OneProcess) -> None:
    """Row-wise shards do not end between one process's blocks, so even the first loss is rounded
    differently: it can't agree to a hundredth of the change by quantizing."""
    ranks = tensor_parallel["uneven"]
    single = one_process(inner=UNEVEN, layers=1)
    plain = one_process(None, inner=UNEVEN, layers=1)[0]
    assert_trains_alike(ranks, single, plain, first_loss=BF16_ACTIVATIONS)
    shapes = {row["module"]: row["shape"] for row in ranks[0].rows}
    assert shapes["layers.0.up"] == [128, 66, 64] and shapes["layers.0.down"] == [128, 64, 66]


def test_tensor_parallel_without_gradients(
    tensor_parallel: dict[str, Ranks], one_process: OneProcess
) -> None:
    for result in tensor_parallel["without_gradients"]:
        assert not result.error, result.error
        expected = one_process(layers=1)[0].losses[0]
        assert result.losses == pytest.approx([expected, expected], rel=FP32_SUMS)


@pytest.mark.skipif(torch.__version__ < "2.12", reason="torch 2.11 gets the gradient right")
def test_an_async_input_is_refused(tensor_parallel: dict[str, Ranks]) -> None:
    """Trap: torch loses the gradient of a collective that a compiled block is handed unwaited."""
    for result in tensor_parallel["embedding_outside"]:
        assert "ConfigError: an input of the compiled code, [4, 16, 64]," in result.error
        assert "y.clone()" in result.error


def test_the_way_out_of_an_async_input(
    tensor_parallel: dict[str, Ranks], one_process: OneProcess
) -> None:
    ranks = tensor_parallel["embedding_outside_waited_for"]
    assert_trains_alike(ranks, one_process(policy={"head": "bf16"}), one_process(None)[0])


def test_fsdp_around_tensor_parallel(
    two_dimensional: dict[str, Ranks], one_process: OneProcess
) -> None:
    ranks = two_dimensional["two_dimensional"]
    assert_trains_alike(ranks, one_process(policy={"head": "bf16"}), one_process(None)[0])
    assert taken(ranks[0]) == BLOCKS[:3]


@pytest.mark.parametrize(
    ("group", "quantized", "plain"),
    [
        ("data_parallel", "ddp_around_the_compiled_model", "ddp_not_compiled"),
        ("data_parallel", "fsdp", "fsdp_not_compiled"),
        ("data_parallel", "fsdp_compiled_blocks", "fsdp_blocks_not_compiled"),
        ("data_parallel", "fsdp_checkpointed_blocks", "fsdp_blocks_not_compiled"),
        ("tensor_parallel", "tensor", "tensor_not_compiled"),
        ("tensor_parallel", "sequence", "sequence_bf16"),
        ("two_dimensional", "two_dimensional", "two_dimensional_not_compiled"),
    ],
)
def test_no_collective_more_than_in_bf16(
    group: str, quantized: str, plain: str, request: pytest.FixtureRequest
) -> None:
    """Counted by the process groups of each rank, in one training step. Compiled sequence parallel
    has one collective less than the model without compilation, also in bf16."""
    scenarios: dict[str, Ranks] = request.getfixturevalue(group)
    for one, other in zip(scenarios[quantized], scenarios[plain], strict=True):
        assert one.collectives == other.collectives != {}


def test_pipeline(pipeline: Ranks, one_process: OneProcess) -> None:
    """Two stages, two micro-batches: the gradient of a mean of halves."""
    assert_trains_alike(pipeline, one_process(policy={"head": "bf16"}), one_process(None)[0])
    # torch 2.11 runs a stage once more under no_grad to learn its shapes, with a graph of its own.
    # Each matmul counts once.
    stages = [list(dict.fromkeys(taken(result))) for result in pipeline]
    assert stages == [BLOCKS[:3], BLOCKS[3:]]
