"""One process of a node that only loads: `loading_member.py PROCESS COORDINATOR FOLDER...`.

Of a node of tp 2 in two processes. For each folder it prints a line of JSON: what loading took, and
of each parameter its shard here, as where it begins and ends in each dimension and a digest.
"""

import hashlib
import json
import os
import sys
from pathlib import Path

from jaxdisagg.config import MeshConfig, NodeConfig
from jaxdisagg.process_setup import set_host_devices

MESH = MeshConfig(tp=2, processes=2)
SECONDS = 60.0


def digest(array) -> str:
    """Of the bytes of a NumPy array."""
    return hashlib.sha256(array.tobytes()).hexdigest()


def main(process: int, coordinator: str, folders: list[Path]) -> None:
    """Load each folder once."""
    set_host_devices(1)
    import numpy as np

    from jaxdisagg.group.start import initialize
    from jaxdisagg.mesh import make_mesh, node_devices
    from models.checkpoint import load_measured, open_checkpoint
    from models.registry import load_config
    from models.sharding import DEFAULT_RULES

    group = "127.0.0.1:1" if process else None
    node = NodeConfig(role="mixed", model=folders[0], mesh=MESH, process=process, group=group)
    initialize(coordinator, node, SECONDS)
    for folder in folders:
        _, config = load_config(folder)
        devices = node_devices(MESH.devices, MESH.processes)
        mesh = make_mesh(tp=MESH.tp, dp=1, kv_heads=config.num_kv_heads, devices=devices)
        params, stats = load_measured(open_checkpoint(folder, config, mesh, DEFAULT_RULES))
        shards = {}
        for name, array in params.items():
            (shard,) = array.addressable_shards
            index = [part.indices(n)[:2] for part, n in zip(shard.index, array.shape, strict=True)]
            shards[name] = [index, digest(np.asarray(shard.data))]
        found = {
            "device_bytes": stats.device_bytes,
            "host_peak": stats.host_peak,
            "largest_tensor": stats.largest_tensor,
            "shards": shards,
        }
        print(json.dumps(found), flush=True)
    sys.stdin.read()  # process 0 coordinates: it must not end before the other


if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = ""
    main(int(sys.argv[1]), sys.argv[2], [Path(folder) for folder in sys.argv[3:]])
