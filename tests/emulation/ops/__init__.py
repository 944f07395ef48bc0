"""Values of ttnn's operations, one file a family; importing this registers them all."""

from tests.emulation.ops import attention, convolution, elementwise, matmul, movement, normalization

__all__ = ["attention", "convolution", "elementwise", "matmul", "movement", "normalization"]
