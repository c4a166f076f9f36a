"""What an operation moves and computes: the two sides of a roofline."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Cost:
    """Work of one call of an operation, whatever the back end wastes on top.

    bytes: read from and written to device memory, each operand once. flops: floating-point
    operations of the matmuls, a multiply-add being two.
    """

    bytes: int
    flops: int

    def seconds(self, bytes_per_second: float, flops_per_second: float) -> float:
        """Least time on a device of this bandwidth and this matmul rate."""
        return max(self.bytes / bytes_per_second, self.flops / flops_per_second)
