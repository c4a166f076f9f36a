"""Rows sorted by group, each group times its own matrix: the matmuls of experts."""

from pallas_kernels.grouped_matmul.api import grouped_matmul
from pallas_kernels.grouped_matmul.mosaic_gpu import supports

__all__ = ["grouped_matmul", "supports"]
