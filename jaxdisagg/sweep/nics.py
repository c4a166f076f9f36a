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
    units = _by_layer(pages.units, whole.units, layers)
    sizes = _by_layer(pages.bytes, whole.bytes, layers)
    of_one = np.divide(sizes, units, out=np.zeros(units.shape), where=units > 0)
    return NicLoad(_load(units, of_one, nics[0], 2), _load(units, of_one, nics[1], 1))


def _by_layer(of_pages: np.ndarray, of_all: np.ndarray, layers: int) -> np.ndarray:
    """[layers + 1, source tp, destination tp]: what each layer has of it, then the context."""
    return np.stack([*[of_pages // layers] * layers, of_all - of_pages])


def _load(units: np.ndarray, of_one: np.ndarray, nics: int, other: int) -> np.ndarray:
    """float64[layers + 1, tp * nics]: bytes of each NIC of a side; `other` is the other's axis."""
    ends = units.cumsum(axis=0)
    of_nics = [
        ((_dealt(ends, k, nics) - _dealt(ends - units, k, nics)) * of_one).sum(axis=other)
        for k in range(nics)
    ]
    return np.stack(of_nics, axis=-1).reshape(len(units), -1)


def _dealt(count: np.ndarray, nic: int, nics: int) -> np.ndarray:
    """How many of the first `count` units NIC `nic` gets when they are dealt from NIC 0 on."""
    return (count + nics - 1 - nic) // nics


def imbalance(loads: np.ndarray) -> float:
    """The busiest NIC over the mean of all; 1 is even."""
    return float(loads.max() / loads.mean())
