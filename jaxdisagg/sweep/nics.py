"""Which NIC carries what: the page-writes between two devices, dealt to the NICs of either.

What a device with M NICs writes to one with N is cut into whole units evenly over the M and, on
their own, over the N, one more going to each in turn: the transfer engine deals them so (M22).
"""

from dataclasses import dataclass

import numpy as np

from jaxdisagg.transfer_plan import Traffic


@dataclass(frozen=True)
class NicLoad:
    """Bytes of each NIC of the request's dp rank, by layer; the last row is the context.

    `source` float64[layers + 1, tp * NICs] of the prefill node, device-major, `destination`
    likewise of the decode node. Units of different length between two ranks count as their mean.
    """

    source: np.ndarray
    destination: np.ndarray

    @property
    def both(self) -> np.ndarray:
        """float64[layers + 1, NICs of both sides]."""
        return np.concatenate([self.source, self.destination], axis=1)


def nic_load(pages: Traffic, whole: Traffic, layers: int, nics: tuple[int, int]) -> NicLoad:
    """Deal a request: `pages` is its traffic without the context, `whole` with it.

    `nics` are the NICs of a prefill and of a decode device.
    """
    units, sizes = (
        np.stack([*[of_pages // layers] * layers, of_all - of_pages])  # [layers + 1, S, D]
        for of_pages, of_all in ((pages.units, whole.units), (pages.bytes, whole.bytes))
    )
    of_one = np.divide(sizes, units, out=np.zeros(units.shape), where=units > 0)
    ends = units.cumsum(axis=0)
    source, destination = (
        np.stack(
            [
                ((_dealt(ends, k, of_side) - _dealt(ends - units, k, of_side)) * of_one).sum(axis)
                for k in range(of_side)
            ],
            axis=-1,
        ).reshape(layers + 1, -1)
        for axis, of_side in ((2, nics[0]), (1, nics[1]))
    )
    return NicLoad(source, destination)


def _dealt(count: np.ndarray, nic: int, nics: int) -> np.ndarray:
    """How many of the first `count` units NIC `nic` gets when they are dealt from NIC 0 on."""
    return (count + nics - 1 - nic) // nics


def imbalance(loads: np.ndarray) -> float:
    """The busiest NIC over the mean of all; 1 is even."""
    return float(loads.max() / loads.mean())
