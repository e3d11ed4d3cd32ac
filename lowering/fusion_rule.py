"""When a rotating quantiser computes its operand itself: what that saves against what it adds.

Unfused there are two kernels, the producer's and the quantiser's, fused there is one. Each takes
the longer of two times: to issue its instructions, and to move its bytes. So an element costs, in
bytes that the memory could move meanwhile, with i instructions in a byte's time, R bytes read by
the producer, P instructions of it and Q of the quantiser, W bytes written:

    unfused   max(P / i, R' + 2) + max(Q / i, 2 + W)
    fused     max((P + Q) / i, R + W)

for an operand of 2 bytes. R' is R / 2: gradients come in pairs (a gated MLP's, q and k), whose
producers Inductor makes one kernel with one read; where that is not so, more is saved than this
says.
Fused must win by a tenth, since nobody has measured it yet (examples/benchmarks/fusion.py does).

i is from data sheets, but for the H200's, which is measured (examples/benchmarks/instructions.py);
Q from machine code for sm_90a (KERNEL_LOG.md there), P from tests/lowering/test_fusion_counts.py.
"""

from __future__ import annotations

from q2compile.runtime_kernels.cuda.quantize.producer import Producer
from q2compile.runtime_kernels.cuda.quantize.producer_source import bytes_read, instructions
from q2compile.runtime_kernels.cuda.quantize.rule import Rule
from q2compile.runtime_kernels.numerics.schemes import Scheme

# By major compute capability; where no other is known, the GPU to whom bytes are cheapest.
_INSTRUCTIONS_A_BYTE = {8: 8.0, 9: 5.9, 10: 3.3, 12: 22.0}
_CHEAPEST = min(_INSTRUCTIONS_A_BYTE.values())
MARGIN = 0.9
# Q, of one direction and of two.
_QUANTISER = {"ms_eden": (26.0, 49.0), "sr": (38.5, 77.5), "rtn": (17.0, 35.0)}
_WIDENING = 6.0  # instructions a direction
_WRITTEN, _WRITTEN_WIDENED = 0.75, 2.25  # bytes an element and direction


def why_not(producer: Producer, spec: Scheme, directions: int, capability: int) -> str | None:
    """None when computing the operand in the quantiser is expected to pay, otherwise the reason in
    words. capability: the major compute capability of the GPU."""
    if Rule.of(spec) == Rule.EXACT:
        return f"{spec.name} has an exact global scale and would compute the operand twice"
    ratio = expected(producer, spec, directions, capability)
    if ratio <= MARGIN:
        return None
    return (
        f"{bytes_read(producer):.1f} bytes and {instructions(producer):.0f} instructions an "
        f"element are expected to take {ratio:.2f} of the time of two kernels, more than {MARGIN}"
    )


def expected(producer: Producer, spec: Scheme, directions: int, capability: int) -> float:
    """The time of the fused kernel over that of the two."""
    rate = _INSTRUCTIONS_A_BYTE.get(capability, _CHEAPEST)
    size, read, made = producer.dtype.itemsize, bytes_read(producer), instructions(producer)
    rounded = _QUANTISER.get(spec.rounding, _QUANTISER["sr"])[directions - 1]
    rounded += _WIDENING * directions * spec.widened
    written = directions * (_WRITTEN_WIDENED if spec.widened else _WRITTEN)
    unfused = max(made / rate, read / 2 + size) + max(rounded / rate, size + written)
    fused = max((made + rounded) / rate, read + written)
    return fused / unfused
