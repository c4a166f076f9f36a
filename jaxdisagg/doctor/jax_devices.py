"""The devices that jax finds, and why they are no GPUs."""

import os

from jaxdisagg.doctor.finding import Finding, Values, problem
from jaxdisagg.gpu_setup import BACK_END_ERRORS, cuda_plugins, first_platform, why_no_devices

SUBJECT = "jax"


def probe() -> Values:
    """jax's devices by kind, and its CUDA back ends."""
    found: Values = {"plugins": cuda_plugins(), "platforms": os.environ.get("JAX_PLATFORMS", "")}
    import jax

    try:
        devices = jax.devices()
    except BACK_END_ERRORS as error:
        return found | {"error": why_no_devices(error)}
    kinds: dict[str, int] = {}
    for device in devices:
        kinds[device.device_kind] = kinds.get(device.device_kind, 0) + 1
    return found | {"platform": devices[0].platform, "devices": kinds}


def findings(values: Values) -> list[Finding]:
    """Judge what `probe` found."""
    if failed := problem(SUBJECT, "devices", values, needed=True):
        return failed
    plugins = ", ".join(values["plugins"])
    if "error" in values:
        return [Finding(SUBJECT, "devices", "none", "missing", values["error"])]
    kinds = ", ".join(f"{count} x {kind}" for kind, count in values["devices"].items())
    devices = Finding(SUBJECT, "devices", kinds)
    if values["platform"] != "cpu":
        return [devices, Finding(SUBJECT, "CUDA back end", plugins or values["platform"])]
    if not plugins:
        why = "jax is for CPUs alone; for GPUs install jaxdisagg[cuda13] or jaxdisagg[cuda12]"
    elif values["platforms"] and first_platform() == "cpu":
        why = f"JAX_PLATFORMS={values['platforms']} chooses the CPU"
    else:
        why = values.get("said") or "it found no GPU"
    return [devices, Finding(SUBJECT, "CUDA back end", plugins or "-", "absent", why)]
