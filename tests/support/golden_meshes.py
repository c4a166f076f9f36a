"""The meshes on which goldens are compared, as (tp, dp, ep), and which of them a model fits."""

from typing import Any

Mesh = tuple[int, int, int]

# Every product on 1, 2, 4 and 8 devices; ep is 1, dp, tp or all.
MESHES: list[Mesh] = [
    (tp, devices // tp, ep)
    for devices in (1, 2, 4, 8)
    for tp in (1, 2, 4, 8)
    if tp <= devices
    for ep in sorted({1, tp, devices // tp, devices})
]
EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts")


def fits(config: dict[str, Any], mesh: Mesh) -> bool:
    """Whether the sizes of a golden model divide; one without experts has no use for ep above 1."""
    tp, _, ep = mesh
    experts = next((config[name] for name in EXPERTS if name in config), 1)
    kv_heads = 1 if "kv_lora_rank" in config else config["num_key_value_heads"]
    kv = min(tp, kv_heads)
    sizes = [(config["num_attention_heads"], tp), (kv_heads, kv), (tp, kv), (experts, ep)]
    return not any(size % parts for size, parts in sizes)


def label(name: str, mesh: Mesh) -> str:
    """How a test's id and a table name them."""
    return "{}-tp{}-dp{}-ep{}".format(name, *mesh)
