"""Wire messages: round trips, bounds, damaged bytes, and the list of incompatibilities."""

import dataclasses
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxdisagg.cache_layout import CacheLayout
from jaxdisagg.hello import (
    PROTOCOL_VERSION,
    ContextBuffers,
    MemberHello,
    NodeHello,
    Region,
    compatibility,
)
from jaxdisagg.messages import (
    Busy,
    Cancel,
    CancelAck,
    Failed,
    MessageError,
    Prefill,
    Telemetry,
    decode,
    decode_greeting,
    decode_hello,
    encode,
    pack,
    unpack,
)
from jaxdisagg.page_spans import pages_for

LAYOUT = CacheLayout("gqa", layers=3, kv_heads=4, head_dim=64, page_size=16, itemsize=4, tp=2, dp=2)
PAGES = 40


def hello(role="decode", layout=LAYOUT, **changes) -> NodeHello:
    shard = Region(b"k" * 24, PAGES * layout.shard_bytes)
    fields = {
        "role": role,
        "node": f"{role}-0",
        "epoch": 2**64 - 1,
        "model": "qwen3:1234",
        "dtype": "float32",
        "layout": layout,
        "num_pages": PAGES,
        "max_model_len": 512,
        "regions": ((shard,) * layout.layers,) * (layout.tp * layout.dp),
        "contexts": (ContextBuffers(Region(b"c", 4096 * 8), 4096, 8),) * layout.devices,
    }
    return NodeHello(**{**fields, **changes})


def prefill(length=33, **changes) -> Prefill:
    fields = {
        "request": "r/1",
        "slot": 77,
        "expected": (12,),
        "tokens": pack(range(length)),
        "pages": pack(range(1, 1 + pages_for(length, LAYOUT.page_size))),
        "dp_rank": 1,
        "seed": 9,
        "deadline_ms": 30_000,
        "context": 3,
    }
    return Prefill(**{**fields, **changes})


SAMPLES = [
    hello(processes=("10.0.0.1:5", "10.0.0.2:5")),
    MemberHello("decode-0", 2**64 - 1, 1),
    prefill(),
    Busy("r/1", "32 requests wait"),
    Failed("r/1", "deadline", "12.0 s passed"),
    Cancel("r/1"),
    CancelAck("r/1"),
    Telemetry("r/1", 0.1, 0.2, 1 << 20),
]

ids = st.text(min_size=1, max_size=30)
uint32s = st.lists(st.integers(0, 2**32 - 1), max_size=40).map(pack)
seconds = st.floats(0, 1e6)
counts = st.integers(0, 1 << 62)
messages = st.one_of(
    st.builds(
        Prefill,
        request=ids,
        slot=st.integers(0, 2**20 - 1),
        expected=st.lists(counts, min_size=1, max_size=4).map(tuple),
        tokens=uint32s.filter(lambda b: len(b) >= 8),
        pages=uint32s,
        dp_rank=counts,
        seed=st.integers(0, 2**32 - 1),
        deadline_ms=counts,
        context=st.none() | counts,
    ),
    st.builds(Busy, ids, st.text()),
    st.builds(Failed, ids, st.text(), st.text()),
    st.builds(Cancel, ids),
    st.builds(CancelAck, ids),
    st.builds(Telemetry, ids, seconds, seconds, counts),
    st.builds(MemberHello, ids, st.integers(0, 2**64 - 1), st.integers(1, 4095)),
    st.builds(hello, epoch=st.integers(0, 2**64 - 1), node=ids, model=st.text()),
)


@given(messages)
def test_round_trip(message):
    again = decode(encode(message))
    assert again == message
    assert type(again) is type(message)


@pytest.mark.parametrize("message", SAMPLES, ids=lambda m: type(m).__name__)
def test_every_kind_refuses_truncation_and_trailing_bytes(message):
    data = encode(message)
    for end in range(len(data)):
        with pytest.raises(MessageError):
            decode(data[:end])
    with pytest.raises(MessageError, match="trailing"):
        decode(data + b"\xc0")


@settings(max_examples=400)
@given(st.binary(max_size=200))
def test_random_bytes_are_a_message_error(data):
    for body in (data, bytes([PROTOCOL_VERSION]) + data):
        with pytest.raises(MessageError):
            decode(body)


@settings(max_examples=600)
@given(st.sampled_from(SAMPLES), st.data())
def test_damaged_bytes_give_a_valid_message_or_a_message_error(message, data):
    raw = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        damaged = decode(raw)
    except MessageError:
        return
    assert decode(encode(damaged)) == damaged  # it kept to its bounds


def test_deep_nesting_is_a_message_error():
    before_the_tag = b"\x82\xa1a" + b"\x91" * 100_000 + b"\xc0\xa4type\xa6cancel"
    for body in (b"\x91" * 100_000, before_the_tag):
        with pytest.raises(MessageError):
            decode(bytes([PROTOCOL_VERSION]) + body)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"slot": 1 << 20}, "slot"),
        ({"slot": -1}, "slot"),
        ({"slot": "7"}, "slot"),
        ({"expected": []}, "expected"),
        ({"tokens": b"\0" * 7}, "tokens"),
        ({"tokens": b"\0" * 4}, "at least 2"),
        ({"pages": b"\0" * 3}, "pages"),
        ({"request": ""}, "request"),
        ({"request": "r" * 129}, "request"),
        ({"seed": 1 << 32}, "seed"),
        ({"deadline_ms": -1}, "deadline_ms"),
        ({"surprise": 1}, "surprise"),
        ({"type": "nonsense"}, "nonsense"),
    ],
)
def test_a_field_out_of_bounds_is_named(change, text):
    fields = {**msgspec.to_builtins(prefill(), builtin_types=(bytes,)), **change}
    raw = bytes([PROTOCOL_VERSION]) + msgspec.msgpack.encode(fields)
    with pytest.raises(MessageError, match=text):
        decode(raw)


def test_a_layout_that_cannot_exist_is_refused_in_a_hello():
    fields = msgspec.to_builtins(hello(), builtin_types=(bytes,))
    fields["layout"]["tp"] = 3
    raw = bytes([PROTOCOL_VERSION]) + msgspec.msgpack.encode(fields)
    with pytest.raises(MessageError, match="tp: 3"):
        decode(raw)


def test_a_latent_layout_of_a_billion_ranks_is_refused_before_anything_is_planned():
    layout = CacheLayout("mla", layers=3, kv_heads=1, head_dim=64, page_size=16, itemsize=4, tp=1)
    fields = msgspec.to_builtins(hello(layout=layout), builtin_types=(bytes,))
    fields |= {"regions": [], "contexts": []}
    fields["layout"]["tp"] = 10**9
    raw = bytes([PROTOCOL_VERSION]) + msgspec.msgpack.encode(fields)
    with pytest.raises(MessageError, match="tp: 1000000000"):
        decode(raw)


def test_another_protocol_version_names_both():
    raw = bytes([PROTOCOL_VERSION + 1]) + encode(prefill())[1:]
    expected = f"{PROTOCOL_VERSION} here, {PROTOCOL_VERSION + 1} at the peer"
    with pytest.raises(MessageError, match=expected):
        decode(raw)


def test_decode_hello_wants_a_hello():
    assert decode_hello(encode(hello())) == hello()
    with pytest.raises(MessageError, match="Cancel where a HELLO"):
        decode_hello(encode(Cancel("r")))


def test_a_long_prompt_costs_four_bytes_a_token_and_its_pages():
    length = 128 * 1024
    tokens = np.random.default_rng(0).integers(0, 150_000, length)
    pages = pages_for(length, 16)
    message = prefill(tokens=pack(tokens), pages=pack(range(pages)))
    assert len(encode(message)) < 4 * (length + pages) + 256
    again = decode(encode(message))
    assert isinstance(again, Prefill)
    assert again.prompt_length == length
    np.testing.assert_array_equal(again.token_ids(), tokens)
    np.testing.assert_array_equal(again.page_ids(), np.arange(pages))


def test_packing_is_little_endian_and_bounded():
    assert pack([1, 0xDEADBEEF]).hex() == "01000000efbeadde"
    assert unpack(pack([])).size == 0
    for bad in ([-1], [2**32], [0.5]):
        with pytest.raises(ValueError, match="ids"):
            pack(bad)
    with pytest.raises(ValueError, match="7 bytes"):
        unpack(b"1234567")
    with pytest.raises(ValueError, match="no token id"):
        prefill(tokens=pack([1, 2**31])).token_ids()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, None),
        ({"tokens": pack(range(513))}, "max_model_len"),
        ({"tokens": pack(range(34))}, "pages: 2, a prompt of 34 tokens fills 3"),
        ({"tokens": pack([*range(32), 4_000_000_000])}, "4000000000 is no token id"),
        ({"tokens": pack([*range(32), 2**31 - 1])}, None),
        ({"pages": pack([1, 2, 3])}, "pages: 3, a prompt of 33 tokens fills 2"),
        ({"pages": pack([1, PAGES])}, f"page {PAGES}, the node announced {PAGES}"),
        ({"pages": pack([4, 4])}, "twice"),
        ({"dp_rank": 2}, "dp=2"),
        ({"context": 8}, "buffer 8, the node announced 8"),
        ({"context": None}, None),
    ],
)
def test_a_prefill_is_checked_against_the_hello(changes, text):
    problem = prefill(**changes).problem(hello())
    assert (problem is None) if text is None else (text in (problem or ""))


def test_a_context_nobody_announced_is_a_problem():
    assert "announced none" in (prefill().problem(hello(contexts=())) or "")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"epoch": 2**64}, "epoch"),
        ({"regions": ()}, None),
        ({"regions": ((Region(b"", 1),) * 3,)}, "regions: 1 devices, the layout has 4"),
        ({"regions": ((Region(b"", 1),) * 2,) * 4}, "2 layers of device 0"),
        ({"regions": ((Region(b"", 1),) * 3,) * 4}, "layer 0 has 1 bytes"),
        ({"processes": ("a:1", "b:1", "c:1")}, "processes: 3, must share the layout's 4 devices"),
        ({"processes": ("a:1", "a:1")}, "processes: an address is listed twice"),
        ({"contexts": (ContextBuffers(Region(b"", 10), 11, 1),) * 4}, "cannot hold"),
        (
            {"contexts": (ContextBuffers(Region(b"", 11), 11, 1),) * 2},
            "contexts: 2 devices, the layout has 4",
        ),
    ],
)
def test_a_hello_that_contradicts_itself_is_refused(changes, text):
    if text is None:
        hello(**changes)
        return
    with pytest.raises(ValueError, match=text):
        hello(**changes)


def replace(**changes) -> NodeHello:
    layout = dataclasses.replace(LAYOUT, **changes)
    return hello("prefill", layout)


def with_mtp(layout: CacheLayout) -> NodeHello:
    """A prefill node of the same model, with the MTP module's cache layer behind the others."""
    more = dataclasses.replace(layout, layers=layout.layers + 1)
    return hello("prefill", more, mtp=True)


def test_a_members_hello_is_no_nodes():
    member = MemberHello("decode-0", 7, 1)
    assert decode_greeting(encode(member)) == member
    assert decode_greeting(encode(hello())) == hello()
    with pytest.raises(MessageError, match="process 1 of decode-0 answers here"):
        decode_hello(encode(member))
    with pytest.raises(MessageError, match="Cancel where a HELLO was expected"):
        decode_greeting(encode(Cancel("r")))


@pytest.mark.parametrize("process", [0, -1, 4096])
def test_a_member_is_no_leader_and_one_of_the_devices_at_most(process):
    raw = bytes([PROTOCOL_VERSION]) + msgspec.msgpack.encode(
        {"type": "member", "node": "n", "epoch": 1, "process": process}
    )
    with pytest.raises(MessageError, match="process"):
        decode(raw)


def test_equal_nodes_are_compatible_and_dp_is_free():
    assert compatibility(hello(), hello("prefill")) == []
    assert compatibility(hello(), replace(dp=1)) == []
    assert compatibility(replace(dp=4), hello()) == []


@pytest.mark.parametrize(
    ("theirs", "begins", "values"),
    [
        (hello("prefill", protocol=1), "protocol version:", ("3", "1")),
        (hello("prefill", model="other"), "model:", ("qwen3:1234", "other")),
        (hello("prefill", dtype="bfloat16"), "dtype:", ("float32", "bfloat16")),
        (replace(page_size=4099), "page_size:", ("16", "4099")),
        (replace(layers=4), "layers:", ("3", "4")),
        (with_mtp(LAYOUT), "mtp:", ("off", "on")),
        (replace(kv_heads=8), "kv heads:", ("4", "8")),
        (replace(head_dim=128), "head dim:", ("64", "128")),
        (replace(itemsize=2), "itemsize:", ("4", "2")),
        (hello(), "role:", ("decode",)),
        (hello("prefill", contexts=()), "context bytes:", ("4096", "no buffers")),
    ],
)
def test_one_mismatch_is_one_line_with_the_field_and_both_values(theirs, begins, values):
    problems = compatibility(hello(), theirs)
    assert len(problems) == 1
    assert problems[0].startswith(begins)
    assert all(value in problems[0] for value in values)


def test_heads_are_compatible_with_any_tp_that_fits_them():
    for tp in (1, 4, 8):
        assert compatibility(hello(), replace(tp=tp)) == []


def test_page_sizes_may_differ():
    for page_size in (1, 24, 64, 1024):
        assert compatibility(hello(), replace(page_size=page_size)) == []


def test_a_latent_cache_is_compatible_with_any_tp():
    mla = CacheLayout("mla", 3, 1, 576, 16, 4, tp=2, dp=2)
    for tp in (1, 2, 8):
        other = hello("prefill", dataclasses.replace(mla, tp=tp, dp=1))
        assert compatibility(hello(layout=mla), other) == []


def test_the_smallest_count_of_context_buffers_of_a_dp_rank_is_the_limit():
    few = ContextBuffers(Region(b"c", 4096 * 3), 4096, 3)
    many = ContextBuffers(Region(b"c", 4096 * 8), 4096, 8)
    for ordinal, problem in ((0, False), (1, False), (2, True), (3, True)):
        contexts = tuple(few if i == ordinal else many for i in range(4))
        found = prefill(dp_rank=1, context=3).problem(hello(contexts=contexts))
        assert (found == "context: buffer 3, the node announced 3") == problem, ordinal


def test_every_mismatch_is_reported():
    layout = dataclasses.replace(LAYOUT, head_dim=32, page_size=4099, tp=4)
    other = hello("prefill", layout, dtype="bfloat16", model="x")
    names = [line.split(":")[0] for line in compatibility(hello(), other)]
    assert names == ["model", "dtype", "head dim", "page_size"]


def test_a_layout_of_another_kind_is_reported():
    mla = CacheLayout("mla", 3, 1, 576, 16, 4, tp=2, dp=2)
    names = [line.split(":")[0] for line in compatibility(hello(), hello("prefill", mla))]
    assert names == ["kind", "kv heads", "head dim"]


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf"), "0.1"])
def test_times_are_finite_numbers(value):
    fields = {**msgspec.to_builtins(SAMPLES[-1]), "prefill_s": value}
    raw = bytes([PROTOCOL_VERSION]) + msgspec.msgpack.encode(fields)
    with pytest.raises(MessageError, match="prefill_s"):
        decode(raw)


@pytest.mark.parametrize("message", SAMPLES, ids=lambda m: type(m).__name__)
def test_the_protocol_document_lists_every_field(message):
    document = (Path(__file__).resolve().parents[3] / "docs/protocol.md").read_text()
    config = type(message).__struct_config__
    rows = [r for r in document.splitlines() if r.startswith(f"| `{config.tag}` |")]
    assert len(rows) == 1
    missing = [f for f in type(message).__struct_fields__ if f not in rows[0]]
    assert not missing
    if isinstance(message, NodeHello):
        assert all(f.name in rows[0] for f in dataclasses.fields(CacheLayout))


near_prefills = st.builds(
    prefill,
    tokens=st.lists(
        st.sampled_from([0, 5, 2**31 - 1, 2**31, 2**32 - 1]), min_size=2, max_size=20
    ).map(pack),
    pages=st.lists(st.sampled_from([0, 1, PAGES - 1, PAGES, 2**32 - 1]), max_size=3).map(pack),
    dp_rank=st.sampled_from([0, 1, 2, 1 << 62]),
    context=st.sampled_from([None, 0, 7, 8, 1 << 62]),
)


@settings(max_examples=400)
@given(near_prefills)
def test_a_prefill_without_a_problem_can_be_served(message):
    node = hello(max_model_len=18)
    tokens, pages = unpack(message.tokens), message.page_ids()
    sound = (
        len(tokens) <= 18
        and tokens.max() < 2**31
        and sorted(set(pages)) == sorted(pages)
        and len(pages) == (1 if len(tokens) <= 17 else 2)
        and all(page < PAGES for page in pages)
        and message.dp_rank < 2
        and (message.context is None or message.context < 8)
    )
    assert (message.problem(node) is None) == sound
    if sound:
        assert message.token_ids().tolist() == tokens.tolist()
