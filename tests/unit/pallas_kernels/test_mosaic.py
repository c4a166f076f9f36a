"""The wrappers of Mosaic GPU: who may import it, and a cost's two sides."""

import re

from repository import REPOSITORY

from pallas_kernels.cost import Cost

PRODUCT = ("pallas_kernels", "models", "jaxdisagg", "ffi_transport", "scripts")


def test_two_modules_alone_know_pallas():
    users = {
        str(path.relative_to(REPOSITORY))
        for folder in PRODUCT
        for path in (REPOSITORY / folder).rglob("*.py")
        if re.search(r"jax\.experimental[. ]+(import )?(pallas|mosaic)|jax\._src", path.read_text())
    }
    assert users == {"pallas_kernels/mosaic.py", "pallas_kernels/mosaic_turned.py"}


def test_the_slower_side_sets_the_time():
    cost = Cost(bytes=10, flops=100)
    assert cost.seconds(bytes_per_second=5, flops_per_second=100) == 2
    assert cost.seconds(bytes_per_second=10, flops_per_second=20) == 5
