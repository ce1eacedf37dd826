"""What our compiled kernels share: how they are compiled, matrix products of torch's own BLAS, exponentials.

numba's cache of a module that imports these does not notice a change here: touch the importing files, too.
"""

from __future__ import annotations

import math

import numpy as np
from llvmlite import ir  # pyright: ignore[reportMissingImports]
from numba import njit, types  # pyright: ignore[reportMissingImports]
from numba.extending import intrinsic  # pyright: ignore[reportMissingImports]

ONE = np.float32(1)
ZERO = np.float32(0)
LOG2_E = np.float32(1 / math.log(2))
LOWEST = np.float32(-126)  # the exponent of the smallest normal number
HIGHEST = np.float32(126)  # an exponent of which 2^y is far from infinite
# 2^f = sum of (f ln 2)^n / n!, to 1e-7 for f within half of 0
TERMS = tuple(np.float32(math.log(2) ** n / math.factorial(n)) for n in range(7))

FAST = {"nsz", "contract", "reassoc", "arcp"}

# Inlined into whoever calls it. Else a process that compiles and one that finds compiled code may run different copies
# of one function, each optimised for another caller, which sum in different orders: a resumed run would not repeat its
# bits.
compiled = njit(nogil=True, cache=True, forceinline=True, error_model="numpy", fastmath=FAST)


@intrinsic
def _call(typingctx, function, arguments):  # pyright: ignore[reportUnusedParameter]
    """Calls the function at an address with thirteen pointers: numba caches no code that knows a function of ctypes."""

    def code(context, builder, signature, values):  # pyright: ignore[reportUnusedParameter]
        word = ir.IntType(64)
        kind = ir.FunctionType(ir.VoidType(), [word] * 13)
        pointers = [builder.extract_value(values[1], i) for i in range(13)]
        builder.call(builder.inttoptr(values[0], kind.as_pointer()), pointers)
        return context.get_dummy_value()

    return types.void(types.int64, types.UniTuple(types.int64, 13)), code


@intrinsic
def _bits_as_float(typingctx, bits):  # pyright: ignore[reportUnusedParameter]
    """An int32 read as the float32 of the same bits, in a register, so that loops around it become vectors."""

    def code(context, builder, signature, values):  # pyright: ignore[reportUnusedParameter]
        return builder.bitcast(values[0], ir.FloatType())

    return types.float32(types.int32), code


@njit(nogil=True, cache=True, error_model="numpy")  # computes nothing itself
def product(sgemm, sizes, x, w, out, factors):
    """out = factors[0] * x @ w + factors[1] * out with sizes = (rows, columns, inner).

    x, w, out: (address, numbers from one row to the next, whether it lies transposed; of `out` the first two). BLAS
    counts columns first, so that for it `w` is the left factor.
    """
    letters = np.empty(2, np.uint8)
    letters[0], letters[1] = 84 if w[2] else 78, 84 if x[2] else 78  # T, N
    numbers = np.empty(6, np.int64)  # their lower halves, for a BLAS that counts in 32 bits
    numbers[0], numbers[1], numbers[2] = sizes[1], sizes[0], sizes[2]
    numbers[3], numbers[4], numbers[5] = w[1], x[1], out[1]
    scales = np.empty(2, np.float32)
    scales[0], scales[1] = factors[0], factors[1]
    letter, number, scale = letters.ctypes.data, numbers.ctypes.data, scales.ctypes.data
    _call(  # type: ignore[call-arg]  (numba passes the typing context)
        sgemm,
        (
            letter, letter + 1, number, number + 8, number + 16,
            scale, w[0], number + 24, x[0], number + 32, scale + 4, out[0], number + 40,
        ),
    )  # fmt: skip


@njit(inline="always", error_model="numpy", fastmath=FAST)
def exp2(y):
    """2^y for y <= 127; what is below 2^-126 becomes that, NaN stays. Loops around it are done eight at a time."""
    y = LOWEST if y < LOWEST else y  # max(LOWEST, NaN) would be LOWEST
    whole = np.rint(y)
    f = y - whole
    power = _bits_as_float((np.int32(whole) + np.int32(127)) << np.int32(23))  # type: ignore[call-arg]
    return power * (
        TERMS[0] + f * (TERMS[1] + f * (TERMS[2] + f * (TERMS[3] + f * (TERMS[4] + f * (TERMS[5] + f * TERMS[6])))))
    )
