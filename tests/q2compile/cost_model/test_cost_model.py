# SPDX-License-Identifier: Apache-2.0
"""The cost model by hand-made sums, the policy "auto", and the report's columns."""

import re

import pytest
import sympy
import torch
from torch import nn
from torch._dynamo.utils import counters

import q2compile
from q2compile.capture.module_names import Names
from q2compile.cost_model import devices
from q2compile.cost_model.devices import ASSUMPTIONS, DEVICES, H200
from q2compile.cost_model.layer import HOPPER, Layer
from q2compile.cost_model.predict import predict
from q2compile.cost_model.prices import bf16_steps, recipe_steps
from q2compile.cost_model.ranges import over_bf16
from q2compile.cost_model.step import DISPATCHED, FUSED, TORCH, Step
from q2compile.recipes.policy import Policy
from q2compile.recipes.resolve import resolve
from q2compile.rewrite import decide
from q2compile.rewrite.decide import why_left
from q2compile.rewrite.rewrite_graph import rewrite
from tests.support.page_data import data_of

B200, RTX5090 = DEVICES
QUARTET2 = resolve("quartet2")
ALL = ("fprop", "dgrad", "wgrad")
T, N, K = 1024, 512, 256


def test_bytes_and_flops_of_quartet2_by_hand():
    """x [1024, 256], w [512, 256], dy [1024, 512]; bits per element. x is quantized where it is
    computed. A code with its share of a
    scale has 4.5 bits, fp32 block scales written and read 4 more, bf16 16. The two operands of dy
    take 2 * 8.5."""
    x, w, dy = T * K, N * K, T * N
    forward = 8.5 * x + (16 + 8.5) * w + (4.5 * x + 4.5 * w + 16 * dy)
    dgrad = (16 + 17) * dy + (4.5 + 8.5) * w + (4.5 * dy + 4.5 * w + 16 * x)
    wgrad = (4.5 + 8.5) * x + (4.5 * dy + 4.5 * x + 16 * w)
    prediction = predict(QUARTET2, (T, N, K))
    assert predict(QUARTET2, (T, N, K)) is prediction, "equal layers are predicted once"
    assert prediction.bytes == (forward + dgrad + wgrad) / 8
    assert prediction.flops == 3 * 2 * T * N * K
    bf16 = bf16_steps(Layer(T, N, K), ALL)
    assert [s.bits for s in bf16] == 3 * [16 * (x + w + dy)]


OTHER = {
    # Recipe: bits per element of (x, w, dy), and of quantizers and GEMMs. x is rotated for wgrad in
    # the forward, so it is in memory; one read gives both operands of x and of dy. The scales of
    # w's 16x16 blocks are found in one kernel and its codes in a second one. They have fp32 scales
    # of 64 / 256 bits, are transposed for dgrad, which writes a scale for each row, and are
    # expanded 16 times for fprop's GEMM.
    "nvfp4": (
        16 + 2 * 8.5 + 2 * 4.5 + 16,
        (16 + 16 + 4 + 8 / 256 + 64 / 256)
        + (4 + 8 / 256 + 8 * 17 / 256)
        + (4 + 8 / 256 + 4.5)
        + 4.5
        + 16,
        16 + 2 * 8.5 + 2 * 4.5 + 16,
    ),
    # blocks of 32, no second level; QuEST writes a bit of mask, which the GEMMs of dx and dw read.
    "quartet": (
        (16 + 5.25) + 4.25 + (4.25 + 4.25) + 4.25 + 16 + 1,
        (16 + 5.25) + 4.25 + (4.25 + 4.25) + 4.25 + 16 + 1,
        16 + (16 + 2 * 4.25) + 2 * 4.25,
    ),
    # forward in bf16; w and x are rounded from high precision in backward
    "mxfp4": (
        16 + (16 + 4.25) + 4.25 + 16,
        16 + (16 + 4.25) + 4.25 + 16,
        16 + (16 + 2 * 4.25) + 2 * 4.25,
    ),
}


@pytest.mark.parametrize("recipe", OTHER)
def test_bytes_of_other_recipes_by_hand(recipe):
    x, w, dy = OTHER[recipe]
    expected = (x * T * K + w * N * K + dy * T * N) / 8
    assert predict(resolve(recipe), (T, N, K)).bytes == expected


@pytest.mark.parametrize("other", [{"capability": HOPPER}, {"grouped": True}])
def test_a_mask_that_no_epilogue_reads_takes_a_kernel(other):
    """In dgrad and wgrad the kernel reads the product and the mask, and writes the result."""
    steps = recipe_steps(resolve("quartet"), Layer(T, N, K, **other), ALL)
    alone = [s.bits for s in steps if s.what == "mask and rotate back"]
    assert alone == [33 * T * K, 33 * N * K]
    by_gemm = recipe_steps(resolve("quartet"), Layer(T, N, K), ALL)
    assert not any(s.what == "mask and rotate back" for s in by_gemm)


def test_an_exact_global_scale_reads_twice():
    """w, dy along each dimension by the same op, and x where it does not come from a producer: the
    amax is found first. MS-EDEN finds its own from the scales."""
    exact = resolve("tetrajet2", global_scale="exact")
    pow2 = resolve("tetrajet2")

    def bits(recipe, what):
        steps = recipe_steps(recipe, Layer(T, N, K), ALL)
        (step,) = [s for s in steps if s.what == what]
        return step.bits + step.bits_before

    assert bits(pow2, "quantize w") == (16 + 8.5) * N * K
    assert bits(exact, "quantize w") == (16 + 16 + 4.5) * N * K
    assert bits(exact, "quantize x") == 4.5 * T * K  # fused; its amax comes with the producer


def test_the_product_of_exact_global_scales_takes_a_launch():
    """Unless a quantizer of that GEMM computes it, in the launch that finds its global scale."""

    def launches(global_scale):
        steps = recipe_steps(resolve("quartet2", global_scale=global_scale), Layer(T, N, K), ALL)
        return {s.what: s.launches for s in steps if s.what in ALL}

    assert launches("pow2") == {"fprop": 1, "dgrad": 1, "wgrad": 1}
    assert launches("exact") == {"fprop": 2, "dgrad": 1, "wgrad": 1}


def test_a_symbolic_size_gives_expressions_that_agree_with_numbers():
    t = sympy.Symbol("t", positive=True, integer=True)
    steps = recipe_steps(QUARTET2, Layer(t, N, K, x_users=3), ALL)
    flops, bytes_ = sum(s.flops for s in steps), sum(s.bits / s.shared_by for s in steps) / 8
    number = predict(QUARTET2, (T, N, K), x_users=3)
    assert (flops.subs(t, T), bytes_.subs(t, T)) == (number.flops, number.bytes)


def test_time_of_the_host():
    """In the middle: 10.98 us for a call of two launches, 5.47 for each more, 7.86 for an op of
    torch's. The ends are a quarter below and above."""
    us = 1e-6

    def host(**how):
        seconds = Step("", 0, **how).host_seconds
        assert [seconds.low, seconds.high] == pytest.approx(
            [0.75 * seconds.middle, 1.25 * seconds.middle]
        )
        return seconds.middle

    assert host(launches=2) == pytest.approx(10.98 * us)
    assert host(launches=1) == pytest.approx(5.51 * us)
    assert host(launches=3, shared_by=2) == pytest.approx(16.45 / 2 * us)
    assert host(launches=2, by=FUSED) == pytest.approx(10.98 * us)
    assert host(launches=0, by=FUSED) == 0
    assert host(by=TORCH) == pytest.approx(7.86 * us)
    assert host(launches=3, by=DISPATCHED) == pytest.approx((16.49 + 2 * 5.47) * us)


def test_a_layer_takes_as_long_as_its_gpu_or_its_host():
    small, large = predict(QUARTET2, (T, N, K)), predict(QUARTET2, (16384, 8192, 8192))
    graphs = predict(QUARTET2, (T, N, K), cuda_graphs=True)
    assert small.times(B200) == (small.bf16_host_seconds["b200"], small.host_seconds["b200"])
    assert large.times(B200) == (large.bf16_seconds["b200"], large.seconds["b200"])
    assert graphs.times(B200) == (small.bf16_seconds["b200"], small.seconds["b200"])
    assert small.bf16_host_seconds["b200"].middle == pytest.approx(3 * 7.86e-6)


def test_who_launches_decides_whether_the_host_counts():
    assert predicted_of(mode="reduce-overhead") == predicted_of(
        inductor={"triton.cudagraphs": True}
    )
    assert predicted_of()["microseconds"] > predicted_of(mode="reduce-overhead")["microseconds"]


def predicted_of(**options):
    return rows_of(net(), tokens(64), **options)[0].predicted["b200"]


def test_a_bias_costs_what_bf16_s_does():
    """For recipes in which no quantizer sums dy, such as with an exact global scale. The bias
    gradient is then a separate sum over dy in both, and both GEMMs add the bias."""
    exact = resolve("tetrajet2", global_scale="exact")
    plain, biased = predict(exact, (T, N, K)), predict(exact, (T, N, K), bias=True)
    assert biased.bytes - plain.bytes == 2 * T * N
    more = [
        getattr(biased, name)["b200"] - getattr(plain, name)["b200"]
        for name in ("seconds", "bf16_seconds")
    ]
    for end in ("low", "high"):
        own, bf16 = (getattr(one, end) for one in more)
        assert own == pytest.approx(bf16) and own > 0
    assert predict(QUARTET2, (T, N, K), ["fprop"], bias=True).bytes == (
        predict(QUARTET2, (T, N, K), ["fprop"]).bytes
    )


def test_a_bias_costs_next_to_nothing_where_the_quantizer_sums():
    """Four bytes are written and read for 128 elements, and there is no further launch."""
    plain, biased = predict(QUARTET2, (T, N, K)), predict(QUARTET2, (T, N, K), bias=True)
    assert biased.bytes - plain.bytes == T * N / 16
    assert biased.host_seconds == plain.host_seconds
    more = biased.seconds["b200"] - plain.seconds["b200"]
    bf16s = biased.bf16_seconds["b200"] - plain.bf16_seconds["b200"]
    assert 0 <= more.low < bf16s.low / 4 and 0 <= more.high < bf16s.high / 4


def test_emulated_gemms_are_bf16s():
    """On an H200: the backward's quantizers write bf16, the forward's codes are dequantized."""
    layer = Layer(T, N, K, capability=HOPPER)
    found = {s.what: s for s in recipe_steps(QUARTET2, layer, ALL)}
    x, w, dy = T * K, N * K, T * N
    assert found["dequantize x"].bits == (4.5 + 16) * x
    assert found["dequantize x"].launches == found["dequantize w"].launches == 1
    of_nvfp4 = {s.what: s for s in recipe_steps(resolve("nvfp4"), layer, ALL)}
    assert of_nvfp4["dequantize w"].bits == (4 + 8 / 256 + 16) * w
    assert of_nvfp4["transpose w"].bits > 8 * w
    assert found["quantize dy rowwise and columnwise"].bits == (16 + 2 * 20) * dy
    assert found["requantize x"].bits == (4.5 + 20) * x
    plain = {s.what: s for s in bf16_steps(layer, ALL)}
    assert all(found[name] == plain[name] for name in ALL)
    # A global scale that is no power of two: GEMM results are written in fp32, and the next op
    # reads fp32.
    exact = resolve("tetrajet2", global_scale="exact")
    (product,) = [s for s in recipe_steps(exact, layer, ALL) if s.what == "dgrad"]
    assert product.bits + product.bits_before == plain["dgrad"].bits + 2 * 16 * T * K
    assert product.launches == 1 and w == N * K


def test_gemms_of_mxfp4_are_fp8s_on_a_hopper():
    """Their operands are made e4m3 by two launches, the first of which reads scales."""
    layer = Layer(T, N, K, capability=HOPPER)
    found = {s.what: s for s in recipe_steps(resolve("mxfp4"), layer, ALL)}
    product, elements = found["dgrad"], found["e4m3 dy"]
    assert (product.kind, product.launches) == ("fp8", 1)
    assert product.bits == 8 * (T * N + N * K) + 16 * T * K
    assert elements.bits == (4.25 + 8) * T * N and elements.launches == 2
    assert elements.bits_before == 0.25 * T * N
    assert found["fprop"].kind == "bf16"


@pytest.mark.parametrize("capability, kind", [(8, "bf16"), (HOPPER, "grouped fp8"), (10, "bf16")])
def test_experts_in_fp8_have_torchs_grouped_product_on_a_hopper(capability, kind):
    """Elsewhere operands are dequantized for BF16's."""
    layer = Layer(T, N, K, experts=4, grouped=True, capability=capability)
    found = {s.what: s.kind for s in recipe_steps(resolve("fp8"), layer, ALL)}
    assert [found[name] for name in ALL] == [kind] * 3
    assert ("dequantize dy" in found) == (kind == "bf16")
    over_bf16 = H200.gemms["grouped fp8"].reached.middle / H200.gemms["bf16"].reached.middle
    assert over_bf16 == pytest.approx(2.66 / 1.99, abs=0.095)  # half of its range


def speeds(*shape, recipe=QUARTET2, **options):
    prediction = predict(recipe, shape, **options)
    return [prediction.speed(device) for device in DEVICES]


def test_what_makes_it_faster():
    """More rows, a larger layer, an x that others quantize, too."""
    for device in range(2):
        by_rows = [speeds(t, 4096, 4096)[device] for t in (64, 1024, 4096, 16384, 65536)]
        by_width = [speeds(8192, n, n)[device] for n in (64, 256, 1024, 4096, 16384)]
        by_users = [speeds(16384, 1024, 4096, x_users=n)[device] for n in (1, 2, 3)]
        for series in (by_rows, by_width, by_users):
            assert series == sorted(series) and series[0] < series[-1]


def test_a_linear_of_4096_gains_what_these_rates_allow():
    """The authors of Quartet II report 4.2 times BF16's speed on an RTX 5090 and up to 2.5 on a
    B200 for the layers of a 22B model, by GEMMs of their own."""

    def times(*shape):
        return [predict(QUARTET2, shape).over_bf16(device).text() for device in DEVICES]

    assert times(8192, 4096, 4096) == ["0.40-0.67", "0.18-0.39"]
    assert times(16384, 24576, 6144) == ["0.31-0.50", "0.16-0.34"]
    # The largest ratio of the rates of FP4 and BF16.
    assert max(speeds(2**20, 2**15, 2**15)) < 0.81 * 1676 / (0.88 * 209.5)


def test_fewer_gemms_cost_less():
    """In inference only fprop runs; a frozen weight has no wgrad."""
    whole, frozen, forward = (
        predict(QUARTET2, (T, N, K), gemms) for gemms in (ALL, ALL[:2], ALL[:1])
    )
    assert whole.flops == 3 * forward.flops and frozen.flops == 2 * forward.flops
    assert whole.bytes > frozen.bytes > forward.bytes


def test_how_often_a_weight_is_quantized():
    """Not cached, and recomputed for the backward twice: 24.5 bits per element."""
    none, once, twice = (predict(QUARTET2, (T, N, K), w_quantized=n) for n in (0, 1, 2))
    assert twice.bytes - once.bytes == 24.5 * N * K / 8
    # Codes that come from another graph have plain scales, which the GEMM's op swizzles.
    assert once.bytes - none.bytes == (24.5 - 1) * N * K / 8
    rows = {
        option: rows_of(net(), tokens(), **{option: True})[1].bytes
        for option in ("strict", "cache_weights", "recompute_weights")
    }
    assert rows["strict"] - rows["cache_weights"] == int(23.5 * 8192 * 8192 / 8)
    assert rows["recompute_weights"] - rows["strict"] == int(24.5 * 8192 * 8192 / 8)


def test_experts_have_a_weight_each():
    """Tokens and FLOPs are those of one expert. Each weight is quantized, requantized and
    multiplied twice, and its gradient written. One expert takes as long as a dense layer."""
    dense, one, eight = (predict(QUARTET2, (*e, T, N, K)) for e in ((), (1,), (8,)))
    assert (one.bytes, one.flops) == (dense.bytes, dense.flops)
    assert all(one.seconds[device.column] == dense.seconds[device.column] for device in DEVICES)
    w = N * K * ((16 + 8.5) + 4.5 + (4.5 + 8.5) + 4.5 + 16) / 8
    assert eight.bytes - one.bytes == 7 * w and eight.flops == one.flops


def test_which_mixtures_gain_by_fp4():
    """64 narrow experts of 512 tokens each have twice as many weight elements to quantize as token
    elements. On a B200 this takes longer than FP4 saves. 8 wide ones of 8192 tokens gain
    everywhere."""
    b200, rtx5090 = DEVICES
    narrow, wide = ((64, 32768, 1536, 2048), (8, 65536, 4096, 14336))
    narrow, wide = (predict(QUARTET2, shape) for shape in (narrow, wide))
    assert narrow.speed(b200) < 0.9 < 1.5 < narrow.speed(rtx5090)
    assert wide.speed(b200) > 2 and wide.speed(rtx5090) > 3
    assert why_left(narrow, None, b200).startswith("auto: predicted to take")
    assert why_left(wide, None, b200) == ""


def test_an_x_that_lies_in_memory_is_read():
    """Inputs of the graph and matmuls' results are in memory. A quantizer fuses with silu."""

    class Mlp(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down, self.head = (nn.Linear(256, 256, bias=False) for _ in range(3))

        def forward(self, x):
            return self.head(self.down(torch.nn.functional.silu(self.up(x))).view(-1, 256))

    recipe = "quartet2_search"  # whose quantizer of x is fused on a B200, too
    rows = rows_of(Mlp(), torch.empty(T, 256, requires_grad=True), recipe=recipe)
    read, fused = (
        predict(resolve(recipe), (T, 256, 256), x_fuses=fuses) for fuses in (False, True)
    )
    assert [row.bytes for row in rows] == [int(p.bytes) for p in (read, fused, read)]
    assert read.bytes - fused.bytes == 2 * T * 256


def test_nothing_is_said_without_rows():
    assert predict(QUARTET2, (0, N, K)) is None


class Net(nn.Module):
    """Small, large, and small: in BF16 the middle is nearly all of the work."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(64, 8192, bias=False)
        self.middle = nn.Linear(8192, 8192, bias=False)
        self.head = nn.Linear(8192, 64, bias=False)

    def forward(self, x):
        return self.head(self.middle(self.up(x)))


def rows_of(model, x, **options):
    """The rows of a model too large to run here: its weights are one number each, and its graph is
    rewritten and not compiled."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(torch.ones(()).expand(module.weight.shape))
    rows = []

    def backend(gm, example_inputs):
        rows.extend(rewrite(gm, q2compile.Config(**options), Names.of_graph(gm)))
        return lambda *args: (torch.zeros(()),)

    torch._dynamo.reset()
    torch.compile(model, backend=backend)(x)
    return rows


def net():
    with torch.device("meta"):
        return Net()


def tokens(count=8192):
    return torch.ones(()).expand(count, 64)


def test_auto_takes_the_large_and_leaves_the_small():
    rows = rows_of(net(), tokens(), policy={"*": "auto"})
    up, middle, _ = rows
    assert [r.taken for r in rows] == [False, True, False]
    assert (middle.recipe, middle.pattern, middle.fprop) == ("quartet2", "*", QUARTET2.texts()[0])
    assert (up.recipe, up.fprop, up.wanted) == ("bf16", "bf16", False)
    speed = up.predicted["b200"]["speed"]
    times = r"auto: predicted to take ([\d.-]+) times BF16's time \([\d.-]+ in FP8\) on B200"
    said = re.fullmatch(times, up.why)
    own = over_bf16([up.predicted["b200"]])
    said_ends = [float(end) for end in said[1].split("-")]
    assert said_ends == pytest.approx([own.low, own.high], abs=0.01) and speed < 1
    assert middle.predicted["b200"]["speed"] > 1.5


@pytest.mark.parametrize(
    ("recipe", "gpu", "recipes"),
    [
        ("nvfp4", None, ["bf16", "nvfp4", "bf16"]),
        ("nvfp4", "H100", ["bf16", "nvfp4", "bf16"]),  # for FP4 a B200 decides
        ("fp8", "H100", ["bf16", "fp8", "bf16"]),
        ("quartet2", "RTX 5090", ["bf16", "quartet2", "bf16"]),
    ],
)
def test_which_gpu_decides(monkeypatch, recipe, gpu, recipes):
    monkeypatch.setattr(devices, "present_device", lambda: gpu and devices.data_sheet(gpu))
    rows = rows_of(net(), tokens(), recipe=recipe, policy={"*": "auto"})
    assert [r.recipe for r in rows] == recipes


def test_auto_takes_fp8_where_it_is_faster(monkeypatch):
    monkeypatch.setattr(devices, "present_device", lambda: devices.H100)
    monkeypatch.setattr(decide, "deciding_device", lambda **_: devices.H100)
    rows = rows_of(net(), tokens(), recipe="nvfp4", policy={"*": "auto"})
    assert [(r.recipe, r.fprop, r.taken) for r in rows[1:]] == [
        ("fp8", "fp8 @ fp8", True),
        ("bf16", "bf16", False),
    ]


def test_auto_takes_the_default_recipe_and_a_later_pattern_wins():
    policy = {"*": "auto", "up": "quartet2"}
    rows = rows_of(net(), tokens(), recipe="nvfp4", policy=policy)
    assert [r.recipe for r in rows] == ["quartet2", "nvfp4", "bf16"]


def test_a_dynamic_size_is_decided_by_its_hint():
    x = tokens()
    torch._dynamo.mark_dynamic(x, 0)
    up, middle, _ = rows_of(net(), x, policy={"*": "auto"})
    symbol = str(up.shape[0])
    assert up.why.endswith(f"on B200 for {symbol} = 8192, the size it was compiled with")
    assert middle.taken and symbol in middle.bytes
    assert sympy.sympify(middle.flops) == 3 * 2 * sympy.Symbol(symbol) * 8192 * 8192


def test_deciding_adds_no_guard_on_a_size():
    torch._dynamo.reset()
    options = {"inner": "eager", "policy": {"*": "auto"}}
    compiled = torch.compile(nn.Linear(64, 64), backend="quartet2", options=options, dynamic=True)
    compiled(torch.randn(2, 64))
    before = counters["stats"]["unique_graphs"]
    for count in (3, 8, 33):
        compiled(torch.randn(count, 64))
    assert counters["stats"]["unique_graphs"] == before


def test_without_gradients_only_fprop_is_predicted():
    with torch.no_grad():
        rows = rows_of(net(), tokens())
    assert rows[1].flops == 2 * 8192**3


def test_linears_that_share_an_input_share_its_quantizer():
    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(256, 256, bias=False) for _ in range(3))

        def forward(self, x):
            return self.q(x) + self.k(x) + self.v(x)

    rows = rows_of(Heads(), torch.empty(T, 256, requires_grad=True))
    alone, shared = (predict(QUARTET2, (T, 256, 256), x_users=n, x_fuses=False) for n in (1, 3))
    assert {row.bytes for row in rows} == {int(shared.bytes)} and shared.bytes < alone.bytes


def test_the_report_shows_predictions_and_what_they_stand_on(tmp_path):
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(64, 32, bias=False), nn.Linear(32, 48, bias=False))
    report = q2compile.explain(model, torch.randn(16, 64), options={"inner": "eager"})
    text = str(report).splitlines()
    assert text[0].split()[-3:] == ["b200", "rtx5090", "why"]
    times = [over_bf16([r.predicted[d.column]]).text() for r in report.rows for d in DEVICES]
    assert [word for line in text[2:4] for word in line.split()[-2:]] == times
    assert text[-1] == f"note: {ASSUMPTIONS}"
    of = "predicted time of the GEMMs taken and their quantizers (not of a step), divided by "
    assert text[-2].startswith(f"note: {of}BF16's: ")
    data = data_of(report.to_html(tmp_path / "report.html"))
    assert [d["column"] for d in data["devices"]] == [d.column for d in DEVICES]
    assert data["assumptions"] == ASSUMPTIONS
    for number in (
        "9000 TFLOP/s FP4 (40%-58% reached), 2250 BF16 (60%-67%), 8 TB/s",
        "1676 TFLOP/s FP4 (45%-81% reached), 209.5 BF16 (88%-113%), 1.792 TB/s",
    ):
        assert number in ASSUMPTIONS


def test_wrong_uses_of_auto():
    with pytest.raises(ValueError, match="name the recipe here, and give policy"):
        q2compile.Config(recipe="auto")
    with pytest.raises(ValueError, match="auto"):
        q2compile.Config(policy={"*": {"fprop": "auto"}})
    assert not Policy.build("bf16", {"*": "auto"}, "pow2").resolve("a")[0].quantizes
