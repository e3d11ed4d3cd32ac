# SPDX-License-Identifier: Apache-2.0
"""The table of quantization schemes: the format and the rounding of an operand, as data.

A quantized tensor of logical shape [M, K] has the values

    value[m, k] = e2m1(code[m, k]) * scale[block of (m, k)] * global_scale

with 4-bit e2m1 codes, one 8-bit scale for each block, and one fp32 scalar. Blocks are along the
last dimension, which the GEMM contracts. There are three formats:

    nvfp4   blocks of 16 (or 16x16), e4m3 scales, fp32 global scale
    mxfp4   blocks of 32 (or 32x32), e8m0 (power of two) scales, global scale 1 (4/3 where codes
            shrink by 3/4)
    fp8     8-bit e4m3 codes, no block scales, a power of two as global scale:
            value[m, k] = e4m3(code[m, k]) * global_scale

Sources:
    NVFP4           "Pretraining LLMs with NVFP4" (arXiv 2509.25149), appendix B; 16x16: section 4.3
    SR, 16/17       Quartet II (2601.22813 v2), section 3.1
    4/6             "Four over Six" (2512.02010); in the forward alone: Quartet II, section 4.2
    MS-EDEN         Quartet II, section 3.3 and algorithm 1
    QuEST, RTN 3/4  Quartet (2505.14669 v4), section 4.3 and algorithm 1 (appendix A.1)
    SR 3/4          "Training LLMs with MXFP4" (2502.20586)
    rceil           "Recipes for Pre-training LLMs with MXFP8" (2506.08027), section 3.1; torchao
                    has the name; 32x32: arXiv 2610.00053
    scale search    no paper's: ours
    fp8             "FP8 Formats for Deep Learning" (2209.05433); the power of two is ours
"""

import difflib
from dataclasses import dataclass, replace
from functools import cache

import torch

E2M1_MAX = 6.0
E4M3_MAX = 448.0

# SR puts a block's maximum at 16/17 of 6: an e4m3 scale rounded to nearest is at most 1/17 too
# small, so nothing clips. Quartet II, section 3.1.
SR_HEADROOM = 16 / 17
# MS-EDEN's clipping point, Quartet II, section 3.3: 6 * (16/17) / 0.93 = 6.072, the value that
# minimizes the error on N(0,1).
MS_EDEN_CLIP = E2M1_MAX * SR_HEADROOM / 0.93


# The values that the code of rounding knows; any other would be rounded to nearest, or as nvfp4.
_VALUES = {
    "format": ("nvfp4", "mxfp4", "fp8"),
    "rounding": ("rtn", "sr", "ms_eden", "quest"),
    "global_scale": ("exact", "pow2", "pow2_of_amax", "none"),
}


@dataclass(frozen=True)
class Scheme:
    """How one operand is rounded. Instances live in SCHEMES; the ops take the name."""

    name: str
    format: str  # "nvfp4" | "mxfp4" | "fp8"
    rounding: str  # "rtn" | "sr" | "ms_eden" | "quest"
    block: tuple[
        int, int
    ]  # rows and columns that share a scale: (1, 16), (16, 16), (1, 32), (32, 32). fp8 has no block
    # scales; its contraction is padded to this width, which FP8 GEMMs need.
    # "exact": from the tensor's amax, known before the codes (ms_eden: from the corrected scales).
    # "pow2": a power of two found after the codes; code * scale * 2^k is then exact in bf16.
    # "pow2_of_amax": the smallest power of two that maps the tensor's amax into the codes' range.
    # "none": mxfp4 has no second level.
    global_scale: str
    vmax: float = E2M1_MAX  # where a block's maximum lands on the e2m1 grid
    cap: float = E4M3_MAX  # where the largest block scale lands on the e4m3 grid, at most
    # Several scales are tried for each block. The one with the smallest squared error is kept, the
    # first of them in a tie. 4/6 tries blkmax/vmax and 1.5 * blkmax/vmax.
    selects: bool = False
    # Scale search: these are tried instead, in e4m3 steps from the scale for blkmax/vmax.
    steps: tuple[int, ...] = ()
    shrink: float = (
        1.0  # mxfp4: codes are rounded from shrink * x / scale, and global_scale is 1 / shrink
    )
    rceil: bool = False  # mxfp4: scales are rounded up, so that no code clips (mxfp4.py)
    swizzled: bool = False  # scales are in the order of Blackwell's tensor cores (swizzle.py)
    # bf16 [M, Kp] instead of codes, and no scales, for BF16 GEMMs: code * scale, times a global
    # scale that is a power of two (which is then given as 1).
    dequantized: bool = False

    def __post_init__(self) -> None:
        for name, known in _VALUES.items():
            if (value := getattr(self, name)) not in known:
                raise ValueError(
                    f"scheme {self.name!r}: no code implements {name}={value!r}; allowed: "
                    f"{', '.join(known)}. A new value needs a rule in runtime_kernels/numerics/ "
                    "and words in `q2compile recipes`."
                )

    @property
    def stochastic(self) -> bool:
        """Whether it draws random bits, so needs a seed."""
        return self.rounding in ("sr", "ms_eden")

    @property
    def takes_amax(self) -> bool:
        """Whether the op needs the tensor's amax. MS-EDEN does not: its global scale follows from
        the corrected block scales."""
        exact = self.global_scale == "exact" and self.rounding != "ms_eden"
        return exact or self.global_scale == "pow2_of_amax"

    @property
    def has_pow2_scale(self) -> bool:
        """Whether the global scale is a power of two, so that code * scale * global_scale is exact
        in bf16."""
        power = self.global_scale in ("pow2", "pow2_of_amax")
        return power or (self.global_scale == "none" and self.shrink == 1.0)

    @property
    def masked(self) -> bool:
        """Whether it has a trust mask, which the backward applies (q2::quantize with mask=True)."""
        return self.rounding == "quest"

    @property
    def width(self) -> int:
        """Elements along the contraction that share one scale."""
        return self.block[1]

    @property
    def is_tensorwise(self) -> bool:
        """Whether the tensor shares one scale, so that its codes can be transposed and reused."""
        return self.format == "fp8"

    @property
    def is_transposable(self) -> bool:
        """Whether its scales serve rowwise and columnwise: square blocks, or one scale."""
        return self.is_tensorwise or self.block[0] == self.block[1]

    @property
    def has_block_scales(self) -> bool:
        return not (self.is_tensorwise or self.dequantized)

    @property
    def codes_dtype(self) -> torch.dtype:
        """The dtype of the tensor that holds codes: pairs of e2m1, e4m3, or dequantized values."""
        if self.dequantized:
            return torch.bfloat16
        return torch.float8_e4m3fn if self.is_tensorwise else torch.uint8

    @property
    def code_max(self) -> float:
        """The largest value of a code."""
        return E4M3_MAX if self.is_tensorwise else E2M1_MAX

    def scale_width(self, codes: torch.Tensor) -> int:
        """Elements of a row [..., n] of codes that share one scale."""
        return codes.shape[-1] if self.is_tensorwise else self.width

    @property
    def packed(self) -> int:
        """Codes in one element of the tensor that holds them: 2 of e2m1, else 1."""
        return 2 if self.codes_dtype == torch.uint8 else 1

    @property
    def form(self) -> str:
        """SWIZZLED, DEQUANTIZED or nothing: the end of the name."""
        return SWIZZLED * self.swizzled or DEQUANTIZED * self.dequantized

    def with_form(self, form: str) -> "Scheme":
        """The same scheme in another form, or without one.

        Raises:
            ValueError: SWIZZLED, but its blocks span rows, or it has no block scales.
        """
        return get_scheme(self.name.removesuffix(self.form) + form)


def _nvfp4() -> list[Scheme]:
    rtn = Scheme("nvfp4", "nvfp4", "rtn", (1, 16), "exact")
    # 1.5 * 448 is not an e4m3 value, so the scale of the second 4/6 candidate needs the cap of
    # 256.
    selected = replace(rtn, selects=True, cap=256.0)
    stochastic = replace(rtn, rounding="sr", vmax=E2M1_MAX * SR_HEADROOM)
    exact = [
        rtn,
        replace(selected, name="nvfp4_46"),
        # A step is 1/8 to 1/16 of a scale; 4 and 5 steps are about 4/6's second candidate.
        replace(selected, name="nvfp4_search", steps=(0, 1, -1, 4, 5)),
        replace(rtn, name="nvfp4_16x16", block=(16, 16)),
        replace(selected, name="nvfp4_16x16_46", block=(16, 16)),
        replace(stochastic, name="nvfp4_sr"),
        # NVIDIA's library: the maximum goes to 6, and clips where the e4m3 scale was rounded down.
        replace(stochastic, name="nvfp4_sr_clip", vmax=E2M1_MAX),
        # Biased, since the draw with the smaller error is kept (Quartet II, section 4.2): for
        # forward or for study.
        replace(stochastic, name="nvfp4_sr_46", selects=True, cap=256.0),
        replace(rtn, name="nvfp4_ms_eden", rounding="ms_eden", vmax=MS_EDEN_CLIP, cap=256.0),
    ]
    # The same with a power of two as global scale. Their 4/6 may use all of e4m3, since both
    # candidates exist before the global scale does.
    return exact + [
        replace(
            s,
            name=f"{s.name}_pow2",
            global_scale="pow2",
            cap=E4M3_MAX if s.selects else s.cap,
        )
        for s in exact
    ]


def _mxfp4() -> list[Scheme]:
    rtn = Scheme("mxfp4_rtn", "mxfp4", "rtn", (1, 32), "none")
    rceil = replace(rtn, name="mxfp4_rceil", rceil=True)
    return [
        rtn,
        replace(rtn, name="mxfp4_rtn34", shrink=0.75),
        replace(rtn, name="mxfp4_sr", rounding="sr", shrink=0.75),
        replace(rtn, name="mxfp4_quest", rounding="quest"),
        rceil,
        replace(rceil, name="mxfp4_rceil_sr", rounding="sr"),
        replace(rceil, name="mxfp4_rceil_32x32", block=(32, 32)),
    ]


_FP8 = Scheme("fp8", "fp8", "rtn", (1, 16), "pow2_of_amax", vmax=E4M3_MAX)

SCHEMES: dict[str, Scheme] = {s.name: s for s in [*_nvfp4(), *_mxfp4(), _FP8]}


# Suffixes of a scheme's name, for operands that only GEMMs read: the form that those read.
# Requantizations read swizzled scales, too. Only schemes whose blocks have one row can have them.
SWIZZLED, DEQUANTIZED = "@32x4x4", "@bf16"


@cache
def _as_read(name: str, suffix: str) -> Scheme:
    swizzled, dequantized = suffix == SWIZZLED, suffix == DEQUANTIZED
    return replace(SCHEMES[name], name=name + suffix, swizzled=swizzled, dequantized=dequantized)


def get_scheme(name: str) -> Scheme:
    """The scheme of that name, with SWIZZLED, DEQUANTIZED or nothing at its end.

    Raises:
        ValueError: no such scheme; the message names the nearest one and all of them.
    """
    if name in SCHEMES:
        return SCHEMES[name]
    for suffix in (SWIZZLED, DEQUANTIZED):
        plain = SCHEMES.get(name.removesuffix(suffix)) if name.endswith(suffix) else None
        swizzles = plain is not None and plain.block[0] == 1 and plain.has_block_scales
        if plain is not None and (suffix == DEQUANTIZED or swizzles):
            return _as_read(plain.name, suffix)
    raise unknown_scheme(name)


def unknown_scheme(name: str) -> ValueError:
    """The error for a name that is not in SCHEMES."""
    near = difflib.get_close_matches(name, SCHEMES, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return ValueError(
        f"unknown quantization scheme {name!r}.{hint} Known schemes: {', '.join(SCHEMES)}."
    )
