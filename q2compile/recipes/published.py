# SPDX-License-Identifier: Apache-2.0
"""Every recipe, on one screen (`recipe` has what they are made of)."""

from __future__ import annotations

from q2compile.recipes.recipe import BF16, Recipe

PAPERS = {
    "quartet2": "Quartet II, arXiv 2601.22813",
    "quartet2_search": "Quartet II, with scale search (ours)",
    "nvfp4": "NVIDIA, arXiv 2509.25149",
    "quartet": "Quartet, arXiv 2505.14669",
    "mxfp4": '"Training LLMs with MXFP4", arXiv 2502.20586',
    "mxfp4_2d": "MXFP4 with 32x32 blocks for weights, arXiv 2610.00053",
    "tetrajet2": "TetraJet-v2, as Quartet II compares it",
    "fp8": "FP8, e4m3 with a scale per tensor, arXiv 2209.05433",
    "quartet2_fp8": "Quartet II with an FP8 forward (ours)",
    "bf16": "nothing is rewritten",
}

# One screen: every recipe. Schemes are written by their paper names, with a global scale from amax;
# the option global_scale="pow2" (the default) selects their "_pow2" rows. Q is quantization along
# the contraction, H the rotation with the signs of this step, M a trust mask.
_EDEN = "rht128>nvfp4_ms_eden"
_SR64 = "rht64>mxfp4_sr"
RECIPES = {
    r.name: r
    for r in [
        # Quartet II (arXiv 2601.22813 v2, section 5 and figure 3).
        #   y  = Q46(x) Q46(w)ᵀ
        #   dx = Qeden(dy H) Qeden(Q46(w)ᵀ H)ᵀ       RHT-128 along N
        #   dw = Qeden(dyᵀ H) Qeden(Q46(x)ᵀ H)ᵀ      RHT-128 along T
        Recipe.parse(
            "quartet2",
            fprop="nvfp4_46 @ nvfp4_46",
            dgrad=f"{_EDEN} @ requantize>{_EDEN}",
            wgrad=f"{_EDEN} @ requantize>{_EDEN}",
        ),
        # Ours: quartet2 with the best of five scales per block in fprop, instead of two in 4/6. Its
        # gap is a tenth smaller (examples/pretraining/BRANCHED.md).
        #   y  = Qsearch(x) Qsearch(w)ᵀ
        #   dx, dw                                   as quartet2, from these codes
        Recipe.parse(
            "quartet2_search",
            fprop="nvfp4_search @ nvfp4_search",
            dgrad=f"{_EDEN} @ requantize>{_EDEN}",
            wgrad=f"{_EDEN} @ requantize>{_EDEN}",
        ),
        # NVIDIA, "Pretraining LLMs with NVFP4" (arXiv 2509.25149, section 4), with signs per step
        # and SR that never clips (Quartet II, section 3.1). NVIDIA's library itself: transform
        # "rht16_fixed", scheme "nvfp4_sr_clip".
        #   y  = Q(x) Q16x16(w)ᵀ
        #   dx = Qsr(dy) Q16x16(w)                   the same codes of w
        #   dw = Qsr(dyᵀ H) Q(xᵀ H)ᵀ                 RHT-16 along T; x quantized in the forward
        Recipe.parse(
            "nvfp4",
            fprop="nvfp4 @ nvfp4_16x16",
            dgrad="nvfp4_sr @ reuse>nvfp4_16x16",
            wgrad="rht16>nvfp4_sr @ forward>rht16>nvfp4",
        ),
        # Quartet (arXiv 2505.14669 v4, section 4.4 and algorithm 1). The 3/4 of RTN 3/4 comes back
        # in the operands' global scale, 4/3 each, so alpha is 16/9.
        #   y  = Qq(x H) Qq(w H)ᵀ                    H32 without signs along K, QuEST
        #   dx = (Mx ∘ (Q34(dy H) Q34(Qq(wH)ᵀ H)ᵀ)) H⁻¹      RHT-32 along N
        #   dw = (Mw ∘ (Q34(dyᵀ H) Q34(Qq(xH)ᵀ H)ᵀ)) H⁻¹     RHT-32 along T
        Recipe.parse(
            "quartet",
            fprop="h32>mxfp4_quest @ h32>mxfp4_quest",
            dgrad="rht32>mxfp4_rtn34 @ requantize>rht32>mxfp4_rtn34",
            wgrad="rht32>mxfp4_rtn34 @ requantize>rht32>mxfp4_rtn34",
        ),
        # "Training LLMs with MXFP4" (arXiv 2502.20586).
        #   y  = x wᵀ
        #   dx = Qsr34(dy H) Qsr34(wᵀ H)ᵀ            RHT-64 along N
        #   dw = Qsr34(dyᵀ H) Qsr34(xᵀ H)ᵀ           RHT-64 along T
        Recipe.parse("mxfp4", BF16, f"{_SR64} @ {_SR64}", f"{_SR64} @ {_SR64}"),
        # MXFP4 with 32x32 blocks for weights (arXiv 2610.00053). Scales are rounded up. Not stated
        # where this was written from, and chosen here: x for wgrad is quantized in the forward,
        # from high precision, as nvfp4's is; dy's columns and x are rounded to nearest; "fixed" is
        # without signs. Other signs: transform "rht32" (per step) or "rht32_fixed".
        #   y  = Q(x) Q32x32(w)ᵀ
        #   dx = Qsr(dy) Q32x32(w)                   the same codes of w
        #   dw = Q(dyᵀ H) Q(xᵀ H)ᵀ                   H32 without signs along T
        Recipe.parse(
            "mxfp4_2d",
            fprop="mxfp4_rceil @ mxfp4_rceil_32x32",
            dgrad="mxfp4_rceil_sr @ reuse>mxfp4_rceil_32x32",
            wgrad="h32>mxfp4_rceil @ forward>h32>mxfp4_rceil",
        ),
        # TetraJet-v2, as Quartet II compares it (section 2): SR where quartet2 has MS-EDEN, RTN
        # where it has 4/6.
        #   y  = Q(x) Q(w)ᵀ
        #   dx = Qsr(dy H) Qsr(Q(w)ᵀ H)ᵀ             RHT-128 along N
        #   dw = Qsr(dyᵀ H) Qsr(Q(x)ᵀ H)ᵀ            RHT-128 along T
        Recipe.parse(
            "tetrajet2",
            fprop="nvfp4 @ nvfp4",
            dgrad="rht128>nvfp4_sr @ requantize>rht128>nvfp4_sr",
            wgrad="rht128>nvfp4_sr @ requantize>rht128>nvfp4_sr",
        ),
        # FP8 (arXiv 2209.05433) in all three GEMMs: e4m3, round to nearest, one power-of-two scale
        # for each tensor, which serves rowwise and columnwise.
        #   y  = Q8(x) Q8(w)ᵀ
        #   dx = Q8(dy) Q8(w)                        the same codes of w
        #   dw = Q8(dy)ᵀ Q8(x)                       the same codes of dy and x
        Recipe.parse("fp8", "fp8 @ fp8", "fp8 @ reuse>fp8", "fp8 @ reuse>fp8"),
        # Ours: quartet2 with FP8 in fprop, because fprop causes most of quartet2's error.
        #   y  = Q8(x) Q8(w)ᵀ
        #   dx, dw                                   as quartet2, from these codes
        Recipe.parse(
            "quartet2_fp8",
            fprop="fp8 @ fp8",
            dgrad=f"{_EDEN} @ requantize>{_EDEN}",
            wgrad=f"{_EDEN} @ requantize>{_EDEN}",
        ),
        # The switch off: bit-identical to plain Inductor, because nothing is rewritten.
        Recipe.parse("bf16", BF16, BF16, BF16),
    ]
}
