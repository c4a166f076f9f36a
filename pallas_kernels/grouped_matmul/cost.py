"""What a grouped matmul moves and computes."""

from pallas_kernels.cost import Cost


def cost(
    rows: int, depth: int, width: int, *, groups: int, matrices: int = 1, itemsize: int = 2
) -> Cost:
    """Of rows in all groups together, `groups` of which have any and are read once."""
    elements = rows * (depth + width) + groups * matrices * depth * width
    return Cost(bytes=elements * itemsize, flops=2 * rows * depth * width * matrices)
