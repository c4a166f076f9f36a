"""How kernels are launched, which interpret mode does not show. Needs the CUDA plugin."""

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdisagg.gpu_aot.chips import H200, devices
from jaxdisagg.gpu_aot.dumps import dumping
from pallas_kernels import mosaic


def test_the_first_axis_of_a_grid_varies_fastest(tmp_path: Path):
    def body(x: Any, out: Any, tile: Any, ready: Any) -> None:
        mosaic.load(x, tile, ready)
        mosaic.wait(ready)
        mosaic.store(tile, out.at[lax.axis_index("slow"), lax.axis_index("fast")])
        mosaic.drain_stores()

    launched = mosaic.launch(
        body,
        [jax.ShapeDtypeStruct((5, 3, 64, 64), jnp.bfloat16)],
        grid={"fast": 3, "slow": 5},
        scratch=[mosaic.shared_tile((64, 64), jnp.bfloat16), mosaic.barriers(1)],
        name="copies",
    )
    sharding = NamedSharding(Mesh(np.array(devices(H200, 1)), ("x",)), P())
    operand = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16, sharding=sharding)
    with dumping(tmp_path):
        jax.jit(launched).lower(operand).compile()
    (lowered,) = tmp_path.glob("copies_*.before_layout_inference.txt")
    sizes = re.search(r"gpu\.launch .*blocks\(.*?\) in \((.*?)\)", lowered.read_text())
    assert sizes is not None
    # CUDA's x, y, z: devices start the blocks along x first.
    assert re.findall(r"%c(\d+)", sizes[1]) == ["3", "5", "1"]
