"""The paged cache of a node: one donated buffer per layer, its addresses and its shard bytes.

XLA owns the buffers. Under donation their addresses stay the same; `check_addresses` proves it
after each dispatch, since a registered address that moved means that writes go astray (R19).
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxdisagg.mesh import is_gpu, rank_devices
from models.interface import CacheSpec


@dataclass(frozen=True)
class Shard:
    """One device's part of one buffer.

    `rank` is the mesh position, `ordinal` the number by which XLA's FFI calls name the device,
    `device` the CUDA ordinal of the GPU that it lies in, None for host memory.
    """

    rank: int
    ordinal: int
    layer: int
    address: int
    nbytes: int
    device: int | None = None


def _allocate(shape: tuple[int, ...], dtype: str, sharding: NamedSharding) -> jax.Array:
    try:
        return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=sharding)()
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(f"pages: a cache buffer of shape {shape} cannot be had: {error}") from None


def _ordinal(device: jax.Device) -> int:
    """XLA's own number of a device: a CPU's counts through all processes of a node, with gaps."""
    return device.id if device.platform == "cpu" else device.local_hardware_id


def cuda_device(device: jax.Device) -> int | None:
    """The CUDA ordinal of a device, None for a CPU."""
    return device.local_hardware_id if is_gpu(device) else None


def _pointers(array: jax.Array) -> dict[int, tuple[int, int]]:
    """Device id -> (address, bytes) of the device's shard."""
    return {
        shard.device.id: (shard.data.unsafe_buffer_pointer(), shard.data.nbytes)
        for shard in array.addressable_shards
    }


class PagedCache:
    """Per-layer arrays of `dp * pages` pages, and beside them a buffer of context rows.

    The context buffer [dp * context_rows, D] holds the hidden state of the last prefilled token of
    each request, a copy on every tp rank; row 0 of each dp rank is scratch. It counts as the layer
    after the last of `layers`.
    """

    def __init__(
        self,
        spec: CacheSpec,
        mesh: Mesh,
        *,
        pages: int,
        page_size: int,
        context_rows: int,
        hidden_size: int,
    ) -> None:
        dp = mesh.shape["dp"]
        self.spec = spec
        self.mesh = mesh
        self.pages = pages
        self.page_size = page_size
        self.context_rows = context_rows
        sharding = NamedSharding(mesh, spec.partition)
        shape = spec.shape(dp * pages, page_size)
        self.layers = tuple(_allocate(shape, spec.dtype, sharding) for _ in range(spec.num_layers))
        self.context = _allocate(
            (dp * context_rows, hidden_size), spec.dtype, NamedSharding(mesh, PartitionSpec("dp"))
        )
        self._registered: list[dict[int, tuple[int, int]]] | None = None

    @property
    def page_bytes(self) -> int:
        """Bytes of one page on one device."""
        return self.shards()[0].nbytes // self.pages

    @property
    def context_bytes(self) -> int:
        """Bytes of one context row."""
        return self.context.nbytes // self.context.shape[0]

    def _buffers(self) -> tuple[jax.Array, ...]:
        return (*self.layers, self.context)

    def shards(self) -> list[Shard]:
        """Every shard of every layer, the context buffer last, on this process's devices.

        Rank-major; of a node of several processes, other ranks are other processes' business.
        """
        pointers = [_pointers(array) for array in self._buffers()]
        return [
            Shard(rank, _ordinal(device), layer, *pointers[layer][device.id], cuda_device(device))
            for rank, device in enumerate(rank_devices(self.mesh))
            if device.id in pointers[0]
            for layer in range(len(pointers))
        ]

    def freeze_addresses(self) -> None:
        """Remember the present addresses as the registered ones."""
        self._registered = [_pointers(array) for array in self._buffers()]

    def check_addresses(self) -> str | None:
        """None, or which buffer is no longer where it was registered."""
        if self._registered is None:
            return None
        for layer, (array, registered) in enumerate(
            zip(self._buffers(), self._registered, strict=True)
        ):
            if _pointers(array) != registered:
                return (
                    f"the cache buffer of layer {layer} moved: {registered} -> {_pointers(array)}"
                )
        return None

    def read_pages(self, rank: int, layer: int, pages: np.ndarray) -> np.ndarray:
        """A copy of pages (or context rows) of one device, for tests and tools.

        [n, K/kv, 2, Z, H], of a latent cache [n, Z, R+C], of the context buffer [n, D]. Only while
        no step is in flight: it reads the live buffer without keeping a view of it.
        """
        array = self._buffers()[layer]
        device = rank_devices(self.mesh)[rank]
        for shard in array.addressable_shards:
            if shard.device == device:
                return np.array(shard.data[jnp.asarray(pages.astype(np.int32))])
        raise ValueError(f"rank={rank} is not addressable from this process")
