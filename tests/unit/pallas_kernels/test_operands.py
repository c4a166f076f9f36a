"""What every operation refuses before a back end sees it, by the operand's name."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.dispatch import check_factor, operand
from pallas_kernels.gqa_decode import gqa_decode
from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.mla_decode import mla_decode
from pallas_kernels.mla_prefill import mla_prefill
from pallas_kernels.paged_prefill import paged_prefill

TABLE = np.array([[1, 2], [3, 0]], np.int32)
LENGTHS = np.array([3, 16], np.int32)
TOKENS = {"rows": np.array([0, 0, 1], np.int32), "positions": np.array([0, 1, 9], np.int32)}


def numbers(*shape):
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


# Each operation with its operands by name, all of numpy; pages of 8 tokens.
OPS = {
    "gqa_decode": (
        lambda backend, **given: gqa_decode(**given, scale=0.5, backend=backend),
        {"q": numbers(2, 4, 16), "cache": numbers(4, 2, 2, 8, 16)}
        | {"page_table": TABLE, "lengths": LENGTHS},
    ),
    "mla_decode": (
        lambda backend, **given: mla_decode(**given, scale=0.5, latent=16, backend=backend),
        {"q": numbers(2, 4, 24), "cache": numbers(4, 8, 24)}
        | {"page_table": TABLE, "lengths": LENGTHS},
    ),
    "paged_prefill": (
        lambda backend, **given: paged_prefill(**given, scale=0.5, backend=backend),
        {"q": numbers(3, 4, 16), "cache": numbers(4, 2, 2, 8, 16), **TOKENS, "page_table": TABLE},
    ),
    "mla_prefill": (
        lambda backend, **given: mla_prefill(**given, scale=0.5, backend=backend),
        {"q": numbers(3, 4, 20), "cache": numbers(4, 8, 24), **TOKENS, "page_table": TABLE}
        | {"w_uk": numbers(4, 12, 16), "w_uv": numbers(4, 10, 16)},
    ),
    "grouped_matmul": (
        lambda backend, w, **given: grouped_matmul(weights=[w, w], **given, backend=backend),
        {"x": numbers(5, 8), "w": numbers(2, 8, 4), "sizes": np.array([2, 3], np.int32)},
    ),
}
DECODE = ("gqa_decode", "mla_decode")
INDICES = ("page_table", "lengths", "rows", "positions", "sizes")
OPERANDS = [(op, name) for op, (_, given) in OPS.items() for name in given]
BACKENDS = ("auto", "reference", "xla", "mosaic_interpret")


def refuses(op, name, value, match, backend="auto"):
    call, given = OPS[op]
    shown = r"weights\[0\]" if name == "w" else name
    with pytest.raises(ValueError, match=f"^{shown}: {match}"):
        call(backend, **given | {name: value})


@pytest.mark.parametrize("op", OPS)
def test_numpy_arrays_are_taken_as_jax_arrays(op):
    call, given = OPS[op]
    for backend in ("reference", "xla"):
        ours = call(backend, **given)
        want = call(backend, **{name: jnp.asarray(value) for name, value in given.items()})
        assert isinstance(ours, jax.Array)
        np.testing.assert_array_equal(ours, want)


@pytest.mark.parametrize(("op", "name"), OPERANDS)
def test_dtypes_that_mean_something_else_are_refused(op, name):
    value = jnp.asarray(OPS[op][1][name])
    if name in INDICES:
        for dtype in ("float32", "bfloat16", "bool", "int8", "uint32"):
            refuses(op, name, value.astype(dtype), f"{dtype} is not int32$")
        return
    allowed = "bfloat16 or float16 or float32"
    if name == "cache" and op in DECODE:
        allowed += " or uint8"
    for dtype in ("int8", "int32", "float8_e4m3fn", "float8_e5m2", "bool", "complex64"):
        refuses(op, name, value.astype(dtype), f"{dtype} is not {allowed}$")
    if name != "cache" or op not in DECODE:
        refuses(op, name, value.astype("uint8"), f"uint8 is not {allowed}$")


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_cache_is_checked_for_every_back_end(backend):
    for op in ("paged_prefill", "mla_prefill"):
        cache = jnp.zeros(OPS[op][1]["cache"].shape, "uint8")
        refuses(op, "cache", cache, "uint8 is not bfloat16", backend)


@pytest.mark.parametrize(("op", "name"), OPERANDS)
def test_an_axis_of_length_zero_is_refused(op, name):
    value = OPS[op][1][name]
    for axis in range(value.ndim):
        empty = np.take(value, [], axis)
        refuses(op, name, empty, r"\(.*\b0\b.*\) has an axis of length 0")


@pytest.mark.parametrize("op", [op for op in OPS if op != "grouped_matmul"])
def test_a_scale_must_be_known_and_finite(op):
    arrays = OPS[op][1]
    latent = {"latent": 16} if op == "mla_decode" else {}

    def call(scale):
        return globals()[op](**arrays, scale=scale, **latent)

    with pytest.raises(ValueError, match=r"^scale: .* is not a finite number"):
        jax.jit(call)(0.5)
    for scale in (float("nan"), float("inf"), "0.5", None, np.array([0.5])):
        with pytest.raises(ValueError, match=r"^scale: .* is not a finite number"):
            call(scale)
    np.testing.assert_array_equal(call(np.float32(0.5)), call(0.5))


def test_operands_of_a_program_are_taken_as_they_are():
    x = jnp.ones((2, 3), jnp.bfloat16)
    assert operand("x", x) is x
    assert not jax.make_jaxpr(lambda x: operand("x", x))(x).eqns
    check_factor("scale", 1)


def test_a_scale_of_the_cache_may_be_of_numpy():
    _, given = OPS["gqa_decode"]
    cache = jnp.asarray(given["cache"], "float8_e4m3fn").view(jnp.uint8)

    def call(cache_scale: Any) -> jax.Array:
        arrays: dict[str, Any] = given | {"cache": cache}
        return gqa_decode(**arrays, scale=0.5, cache_scale=cache_scale)

    ours = call(np.full((2, 2), 0.5, np.float32))
    np.testing.assert_array_equal(ours, call(jnp.full((2, 2), 0.5)))
