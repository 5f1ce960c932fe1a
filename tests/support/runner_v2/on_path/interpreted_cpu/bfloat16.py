# SPDX-License-Identifier: Apache-2.0
"""Triton's interpreter holds a bfloat16 as the 16 bits of a uint16, and calculates with these as if they were a number.

Here operands are widened to float32 first and the outcome is rounded back, half to even, as the hardware does. That
covers dots and operations on one or two bfloat16 operands; fma and reductions in bfloat16 are not covered.
Remove when: Triton's interpreter widens bfloat16 itself.
"""

from typing import Any

import numpy as np


def widened(bits: Any) -> Any:
    """The float32 numbers of bfloat16 bits. Shapes: any, uint16 to float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def rounded(numbers: Any) -> Any:
    """The bits of the nearest bfloat16, ties to even; NaN stays NaN. Shapes: any, numbers to uint16."""
    bits = np.ascontiguousarray(numbers, dtype=np.float32).view(np.uint32)
    nearest = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(numbers), np.uint16(0x7FC0), nearest)


def calculate_in_float32(interpreter: Any) -> None:
    """Let `triton.runtime.interpreter` calculate with bfloat16 numbers."""
    import triton.language as tl

    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    dot, binary, unary = builder.create_dot, builder.binary_op, builder.unary_op

    def holds_bits(operand: Any) -> bool:
        return bool(operand.dtype.scalar == tl.bfloat16 and operand.data.dtype == np.uint16)

    def wide(operand: Any) -> Any:
        return handle(widened(operand.data), tl.float32) if holds_bits(operand) else operand

    def narrow(outcome: Any) -> Any:
        is_comparison = outcome.data.dtype == np.bool_
        return handle(outcome.data if is_comparison else rounded(outcome.data), tl.bfloat16)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, wide(a), wide(b), *rest)

    def binary_op(self: Any, left: Any, right: Any, op: Any) -> Any:
        if holds_bits(left) and holds_bits(right):
            return narrow(binary(self, wide(left), wide(right), op))
        return binary(self, left, right, op)

    def unary_op(self: Any, operand: Any, op: Any) -> Any:
        return narrow(unary(self, wide(operand), op)) if holds_bits(operand) else unary(self, operand, op)

    builder.create_dot, builder.binary_op, builder.unary_op = create_dot, binary_op, unary_op
