"""What libfabric offers, asked by ctypes: this runs where the native part is not built, too.

The structures are those of rdma/fabric.h (ABI 1.3 and later, which only add fields at their ends).
"""

import ctypes
import os
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_uint32, c_uint64, c_void_p

from jaxdisagg.doctor.finding import Values

LIBRARY = "libfabric.so.1"
LIBRARY_VARIABLE = "JAXDISAGG_LIBFABRIC"  # as the engine reads it: empty is not set
API_VERSION = 1 << 16 | 17
MSG, RMA, HMEM = 1 << 1, 1 << 2, 1 << 47
CONTEXT, CONTEXT2, RX_CQ_DATA = 1 << 59, 1 << 52, 1 << 56
MR_LOCAL, MR_VIRT_ADDR, MR_ALLOCATED, MR_PROV_KEY, MR_ENDPOINT, MR_HMEM = (
    1 << 2, 1 << 4, 1 << 5, 1 << 6, 1 << 9, 1 << 10,
)  # fmt: skip
EP_RDM = 3


class _Fabric(ctypes.Structure):
    _fields_ = (
        ("fabric", c_void_p),
        ("name", c_char_p),
        ("prov_name", c_char_p),
        ("prov_version", c_uint32),
        ("api_version", c_uint32),
    )


class _Domain(ctypes.Structure):
    _fields_ = (
        ("domain", c_void_p),
        ("name", c_char_p),
        ("threading", c_int),
        ("control_progress", c_int),
        ("data_progress", c_int),
        ("resource_mgmt", c_int),
        ("av_type", c_int),
        ("mr_mode", c_int),
    )


class _Info(ctypes.Structure):
    pass


_Info._fields_ = (
    ("next", POINTER(_Info)),
    ("caps", c_uint64),
    ("mode", c_uint64),
    ("addr_format", c_uint32),
    ("src_addrlen", c_size_t),
    ("dest_addrlen", c_size_t),
    ("src_addr", c_void_p),
    ("dest_addr", c_void_p),
    ("handle", c_void_p),
    ("tx_attr", c_void_p),
    ("rx_attr", c_void_p),
    ("ep_attr", POINTER(c_int)),  # its first field is the endpoint's type
    ("domain_attr", POINTER(_Domain)),
    ("fabric_attr", POINTER(_Fabric)),
)


def ask() -> Values:
    """{"version", "providers": {name: {"domains": [...], "device_memory": bool}}} or {"error"}.

    Providers are those whose reliable endpoints take one-sided writes; the same are looked at as by
    the engine, unless FI_PROVIDER says otherwise.
    """
    os.environ.setdefault("FI_PROVIDER", "tcp,net,ofi_rxm,efa,verbs")
    for name in ("IPATH_NO_BACKTRACE", "HFI_NO_BACKTRACE"):  # see csrc/ofi_loader.h
        os.environ.setdefault(name, "1")
    try:
        library = ctypes.CDLL(os.environ.get(LIBRARY_VARIABLE) or LIBRARY)
        library.fi_version.restype = c_uint32
        library.fi_dupinfo.restype = POINTER(_Info)
        library.fi_dupinfo.argtypes = [POINTER(_Info)]
        library.fi_freeinfo.argtypes = [POINTER(_Info)]
        library.fi_freeinfo.restype = None
        library.fi_getinfo.argtypes = [
            c_uint32, c_char_p, c_char_p, c_uint64, POINTER(_Info), POINTER(POINTER(_Info)),
        ]  # fmt: skip
        number = library.fi_version()
    except (OSError, AttributeError) as error:
        return {"error": str(error)}
    providers: dict[str, Values] = {}
    for name, domain in _list(library, MSG | RMA, 0):
        entry = providers.setdefault(name, {"domains": [], "device_memory": False})
        if domain not in entry["domains"]:
            entry["domains"].append(domain)
    for name, _ in _list(library, MSG | RMA | HMEM, MR_HMEM):
        if name in providers:
            providers[name]["device_memory"] = True
    return {"version": f"{number >> 16}.{number & 0xFFFF}", "providers": providers}


def _list(library: ctypes.CDLL, caps: int, mr_mode: int) -> list[tuple[str, str]]:
    """(provider, domain) of every endpoint with these capabilities."""
    hints = library.fi_dupinfo(None)
    wish = hints.contents
    wish.caps = caps
    wish.mode = CONTEXT | CONTEXT2 | RX_CQ_DATA
    wish.ep_attr[0] = EP_RDM
    wish.domain_attr.contents.mr_mode = (
        MR_LOCAL | MR_VIRT_ADDR | MR_ALLOCATED | MR_PROV_KEY | MR_ENDPOINT | mr_mode
    )
    found = POINTER(_Info)()
    status = library.fi_getinfo(API_VERSION, None, None, 0, hints, ctypes.byref(found))
    library.fi_freeinfo(hints)
    names: list[tuple[str, str]] = []
    if status == 0:
        info = found
        while info:
            provider = info.contents.fabric_attr.contents.prov_name or b""
            domain = info.contents.domain_attr.contents.name or b""
            names.append((provider.decode(), domain.decode()))
            info = info.contents.next
        library.fi_freeinfo(found)
    return names
