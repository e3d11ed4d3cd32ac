# SPDX-License-Identifier: Apache-2.0
"""`q2compile.gather_codes` (gather_codes.py): the same training to the last bit, and fewer bytes.

All forms, four minutes on two cores (with 4 processes HSDP, tensor and expert parallel):

    torchrun --nproc-per-node 2 tests/end_to_end/distributed/gather_codes.py FOLDER all
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.end_to_end.distributed.ranks import run as run_worker

sys.path.insert(0, str(Path(__file__).parent))

import gather_codes as worker
from expert_parallel import EXPERTS, INNER, WIDTH
from training import HIDDEN, LAYERS, VOCAB

Found = list[dict[str, Any]]  # of each rank: scenario -> Run
FORMS = ["quartet2", "recipes", "whole_blocks", "uneven_checkpointed", "uneven_kept", "changed"]
FORMS += ["attached_late", "evaluated", "fp32_columns", "not_compiled", "bare", "experts_rows"]
FORMS += ["offloaded", "not_compilable", "read_by_others", "absorbed", "hooked"]
FORMS += ["hooked_inside", "after_an_equal_model"]
IN_GRAPH = ["in_graph", "in_graph_experts"]
FOUR = ["hsdp", "two_dimensional", "expert_parallel"]
FAULTS = ["fault_policy", "fault_model"]
PAIR = LAYERS * 2 * HIDDEN * 128  # elements of the weights in blocks
# Bytes for each element: a code, a block's scale, and QuEST's mask.
BYTES = dict.fromkeys(("quartet2", "quartet2_search", "tetrajet2"), 0.5 + 1 / 16)
BYTES["nvfp4"] = 0.5 + 1 / 256
BYTES["quartet"] = 0.5 + 1 / 32 + 1 / 8
BYTES["mxfp4_2d"] = 0.5 + 1 / 1024
BYTES |= {"fp8": 1, "quartet2_fp8": 1}  # and no scale


def run(folder: Path, ranks: int, names: list[str], killed: bool = False) -> Found:
    run_worker("gather_codes.py", ranks, str(folder), ",".join(names), fails=killed)
    paths = [folder / f"found.{ranks}.rank{rank}.pt" for rank in range(ranks)]
    return [torch.load(path, weights_only=False) for path in paths]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gather_codes")


@pytest.fixture(scope="module")
def two(folder: Path) -> Found:
    return run(folder, 2, [*FORMS, *IN_GRAPH, "hidden", "killed"], killed=True)


@pytest.fixture(scope="module")
def afterwards(folder: Path, two: Found) -> Found:
    """In other processes; no rank is in step with another after the last fault."""
    return run(folder, 2, ["resumed", *FAULTS])


@pytest.fixture(scope="module")
def four(folder: Path) -> Found:
    return run(folder, 4, [*FOUR, "to_two", "fault_policy"])


def assert_same_training(found: Found, name: str) -> None:
    """Equal to the run without gather_codes: the losses on each rank, and the sums of all gradients
    and weights of each step, for as many steps as that run has."""
    plain = f"{worker.without(name)}.plain"
    for rank in found:
        assert not rank[name].error and not rank[plain].error, rank[name].error
        for what in ("losses", "digests"):
            own, other = getattr(rank[name], what), getattr(rank[plain], what)
            assert len(own) > 0 and own == other[: len(own)], what
    losses = [rank[name].losses for rank in found]
    assert losses[0] != losses[-1]  # data-parallel ranks have their own data


@pytest.mark.parametrize("name", [*FORMS, *IN_GRAPH])
def test_the_training_is_the_same(name: str, two: Found) -> None:
    assert_same_training(two, name)


@pytest.mark.parametrize("name", FOUR)
def test_the_training_is_the_same_on_four_ranks(name: str, four: Found) -> None:
    assert_same_training(four, name)


def test_bytes_on_the_wire(two: Found) -> None:
    """In each step, for the two gathers of each block, and for embedding, norms and head."""
    rest = two[0]["quartet2.plain"].bytes[0] - 2 * PAIR
    for rank in two:
        assert rank["quartet2"].bytes[0] == 2 * PAIR + rest
        assert rank["quartet2"].bytes[1:] == [BYTES["quartet2"] * PAIR + rest] * (worker.LONG - 1)
        assert rank["quartet2.plain"].bytes == [2 * PAIR + rest] * worker.LONG
    assert two[0]["quartet2"].count == 2 + 2 * LAYERS  # the eager embedding and head may be, too


def test_bytes_of_all_recipes(two: Found) -> None:
    """A compiled model under one fully_shard: each weight is gathered once in a step, the head as
    codes, too."""
    elements = dict.fromkeys(worker.RECIPES, HIDDEN * 128 / 2)
    elements["head"] = HIDDEN * VOCAB / 2
    saved = sum((2 - BYTES[worker.RECIPES[name]]) * n for name, n in elements.items())
    for rank in two:
        run, plain = rank["recipes"], rank["recipes.plain"]
        assert run.bytes == [plain.bytes[0]] + [plain.bytes[0] - saved] * (worker.STEPS - 1)
        assert run.why == dict.fromkeys(worker.RECIPES, "gathers codes")


def test_bytes_to_agree_on(two: Found) -> None:
    """Each forward after the first reduces four numbers for each weight, and one more for one that
    is gathered as codes. A run without gather_codes has no such collective."""
    weights, others = 2 * LAYERS, 2
    for rank in two:
        assert rank["quartet2"].reduced[0] == 0
        assert set(rank["quartet2"].reduced[1:]) == {20 * weights + 16 * others}
        assert set(rank["quartet2.plain"].reduced) == {0}


def test_a_killed_run_goes_on(two: Found, afterwards: Found) -> None:
    """From a distributed checkpoint, by other processes, as the run that never stopped."""
    for plain, rank in zip(two, afterwards, strict=True):
        whole, rest = plain["quartet2.plain"], rank["resumed"]
        assert not rest.error, rest.error
        assert (rest.losses, rest.digests) == (whole.losses[4:8], whole.digests[4:8])
        assert rest.bytes[-1] == plain["quartet2"].bytes[-1]


def test_all_of_a_compiled_model(two: Found) -> None:
    """Where blocks are sharded one by one, their hooks break the graph in a loop, and Dynamo skips
    the head, as without gather_codes."""
    blocks = two[0]["whole_blocks"]
    assert blocks.bytes == two[0]["quartet2"].bytes[: len(blocks.bytes)]
    assert blocks.why["head"].startswith("not seen: no compiled graph")


def test_reasons(two: Found, four: Found) -> None:
    square, changed = two[0]["evaluated"].why, two[0]["changed"].why
    values = "gathers values: a rank has 40 of its rows, and a block spans 16"
    assert square["layers.0.up"] == values and square["layers.0.down"] == "gathers codes"
    assert changed["layers.0.up"] == "gathers values: fprop is in bf16"
    assert two[0]["offloaded"].why["layers.0.up"] == "gathers codes"
    assert "reshard_after_forward is an int" in four[0]["to_two"].why["layers.0.up"]
    assert four[0]["to_two"].count == 0 and four[0]["hsdp"].count == 2 + 2 * LAYERS
    assert four[0]["two_dimensional"].why["layers.0.down"] == "gathers codes"
    for name in ("experts.up", "experts.down"):
        for run in (two[0]["experts_rows"], four[0]["expert_parallel"]):
            assert run.why[f"layers.0.{name}"] == "gathers codes"


@pytest.mark.parametrize(
    ("name", "ranks", "per"),
    [("experts_rows", 2, "quartet"), ("expert_parallel", 4, "nvfp4")],
)
def test_bytes_of_experts(name: str, ranks: int, per: str, two: Found, four: Found) -> None:
    """A rank's shards of two layers' two stacks, gathered in forward and backward."""
    run = (two if ranks == 2 else four)[0][name]
    elements = 2 * 2 * 2 * EXPERTS * INNER * WIDTH // ranks
    assert run.bytes[0] - run.bytes[-1] == (2 - BYTES[per]) * elements


def test_bytes_of_columns_and_of_tensor_parallel_parts(two: Found, four: Found) -> None:
    run = two[0]["fp32_columns"]
    assert run.bytes[0] - run.bytes[-1] == (4 - BYTES["quartet2"]) * PAIR
    run = four[0]["two_dimensional"]
    elements = 2 * LAYERS * 3 * HIDDEN * 128 // 4
    assert run.bytes[0] - run.bytes[-1] == (2 - BYTES["quartet2"]) * elements
    run = four[0]["hsdp"]
    assert run.bytes[0] - run.bytes[-1] == (2 - BYTES["quartet2"]) * PAIR


def test_codes_are_gathered_again_after_a_change(two: Found) -> None:
    """After graphs that read values, after evaluations, after shards in other tensors."""
    codes = two[0]["quartet2"].bytes[-1]
    values = two[0]["quartet2.plain"].bytes[0]
    changed = two[0]["changed"].bytes
    assert changed[9] == changed[-1] == codes and changed[10] > codes
    kept, again = two[0]["uneven_kept"].bytes, two[0]["uneven_checkpointed"].bytes
    assert again[-1] < 0.45 * two[0]["uneven.plain"].bytes[0]
    assert again[0] - again[-1] == 2 * (kept[0] - kept[-1])  # one gather in a micro-batch, not two
    assert two[0]["not_compiled"].bytes[-1] == values
    assert two[0]["attached_late"].bytes == [*[values] * 3, codes, codes]
    assert two[0]["after_an_equal_model"].bytes[-1] == codes
    run, plain = two[0]["evaluated"].bytes, two[0]["evaluated.plain"].bytes
    down = LAYERS * HIDDEN * 80  # the one that is gathered as codes
    saved = [a - b for a, b in zip(plain, run, strict=True)]
    assert saved == [0, *[(2 - BYTES["nvfp4"]) * down] * 5]  # evaluations are forwards, too


@pytest.mark.parametrize(
    ("name", "weights", "left", "per"),
    [
        ("in_graph", 2 * HIDDEN * 128 // 2, HIDDEN * 128 // 2, "quartet2"),
        ("in_graph_experts", 2 * EXPERTS * INNER * WIDTH // 2, 0, "nvfp4"),  # layers share a graph
    ],
)
def test_a_gather_in_the_graph_is_of_codes(
    name: str, weights: int, left: int, per: str, two: Found
) -> None:
    """SimpleFSDP's, by DTensors, and a functional one; stacks of experts that are cut by experts,
    and along their rows. The pass `quantize_shards` moves quantizers before them, and the report
    has the reason for the one that it leaves."""
    if name == "in_graph" and torch.__version__ < "2.12":
        pytest.skip("torch 2.11 writes a functional gather as an autograd function")
    for rank in two:
        assert rank[f"{name}.plain"].notes["bytes"] == 2 * (weights + left)
        assert rank[name].notes["bytes"] == BYTES[per] * weights + 2 * left
        assert not any("gathers" in why for why in rank[f"{name}.plain"].why.values())
        values = "gathers values: something besides quantizers reads the gathered weight"
        why = rank[name].why
        assert [m for m in why if why[m] == values] == (["layers.0.down"] if left else [])
        assert list(why.values()).count("gathers codes") == 2


def test_a_rank_that_can_t_compile_gathers_codes_as_the_others_do(two: Found) -> None:
    """With a warning for each of the two graphs, on that rank alone: one can't be compiled, one
    fails in its first call."""
    for rank, errors in zip(two, ([], ["planted)", "planted in a call)"]), strict=True):
        found, run = rank["not_compilable"].notes["warnings"], rank["not_compilable"]
        assert run.bytes == rank["quartet2"].bytes[:4]
        text = "'layers.0.up.weight' and others of its layer failed to compile or in its first "
        for message, error in zip(found, errors, strict=True):
            assert text in message and f"call (RuntimeError: {error}" in message


def test_other_readers_get_values(two: Found) -> None:
    """Those of FSDP2 alone, whole or as shards. The training goes on with codes afterwards."""
    for rank in two:
        run, plain = rank["read_by_others"], rank["read_by_others.plain"]
        assert run.notes["read"].keys() == plain.notes["read"].keys()
        for when, want in plain.notes["read"].items():
            got = run.notes["read"][when]
            same = when == "layers" or all(map(torch.equal, got, want))
            assert same and len(got) == len(want), when
        assert run.bytes[2] == run.bytes[-1] < 0.5 * run.bytes[0]


def test_eager_readers_get_values(two: Found) -> None:
    """On the rank that has a hook; all ranks gather values, besides codes, of what it may read."""
    for rank, counts in zip(two, ((2 * LAYERS, 4), (1, 0)), strict=True):
        for name, count in zip(("hooked", "hooked_inside"), counts, strict=True):
            own, plain = (rank[key].notes["read"] for key in (name, f"{name}.plain"))
            assert len(own) == len(plain) == count, name
            assert all(map(torch.equal, own, plain)), name
        run = rank["hooked"]
        layerwise, at_once = run.bytes[:6], run.bytes[6:]
        assert layerwise[3] - layerwise[2] == 2 * PAIR / LAYERS
        assert at_once[3] - at_once[2] == PAIR
        for found in (layerwise, at_once):
            assert found[4] == found[5] == found[2] < found[0]


def test_a_forward_that_names_a_weight_gets_values(two: Found) -> None:
    """And codes, which the compiled module inside multiplies."""
    for rank in two:
        first, *_, last = rank["absorbed"].bytes
        assert last - first == BYTES["quartet2"] * PAIR


def test_a_hidden_read_is_an_error(two: Found) -> None:
    """It names the weight. A torch without CUDA raises it at the end of the forward."""
    for rank in two:
        run = rank["hidden"]
        assert not run.error, run.error
        assert run.notes["error"].startswith("gather_codes: 'layers.0.up.weight' was read in the m")


def test_a_gather_by_hand_gives_values(two: Found) -> None:
    for rank in two:
        assert rank["evaluated"].notes["weight"].count_nonzero() > 0
        own, plain = (rank[key].notes["weight"] for key in ("evaluated", "evaluated.plain"))
        assert torch.equal(own, plain)


@pytest.mark.parametrize(
    ("fault", "messages"),
    [
        (
            "policy",
            [
                "the ranks disagree about 'layers.0.up.weight' and 1 more: rank 0 reads the "
                "codes nvfp4_46_pow2",
                "the ranks disagree about 'layers.0.up.weight' and 1 more: rank 1 reads values",
            ],
        ),
        ("model", ["on a model with 6 weights", "on a model with 2 weights"]),
    ],
)
def test_faults_are_errors_on_all_ranks(fault: str, messages: list[str], afterwards: Found) -> None:
    for rank, message in zip(afterwards, messages, strict=True):
        error = rank[f"fault_{fault}"].error
        assert "ConfigError: gather_codes: " in error and message in error


def test_a_replica_s_fault_is_an_error_on_all_ranks(four: Found) -> None:
    """Both ranks of the faulty replica raise it, although their shards agree."""
    for i, rank in enumerate(four):
        read = "the codes nvfp4_46_pow2" if i < 2 else "values"
        assert f"rank {i} reads {read}, another rank does not" in rank["fault_policy"].error


def test_a_model_without_fsdp_is_refused() -> None:
    import q2compile

    with pytest.raises(ValueError, match="Linear has no module under fully_shard"):
        q2compile.gather_codes(torch.nn.Linear(16, 16))
