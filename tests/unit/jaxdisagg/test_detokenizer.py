import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jaxdisagg.detokenizer import Detokenizer
from jaxdisagg.tokenizer import Tokenizer

# Letters that make stop strings overlap, and characters of 2, 3 and 4 bytes.
TEXTS = st.text(alphabet="abé漢🙂", max_size=12)


def pieces(tokenizer: Tokenizer, tokens: list[int], stop: list[str] = ()) -> list[str]:
    """What each push returned, then what finish returned; pushes end when stopped."""
    detokenizer = Detokenizer(tokenizer, stop)
    out = []
    for token in tokens:
        out.append(detokenizer.push(token))
        if detokenizer.stopped:
            break
    return [*out, detokenizer.finish()]


@pytest.mark.parametrize("text", ["🙂", "漢", "é", "👩‍👩‍👧"])
def test_a_character_split_over_tokens_arrives_whole(tiny_tokenizer, text):
    tokens = list(text.encode())
    out = pieces(tiny_tokenizer, tokens)
    assert "".join(out) == text
    assert [piece for piece in out if piece] == list(text)


def test_invalid_bytes_do_not_hold_text_back(tiny_tokenizer):
    assert pieces(tiny_tokenizer, [0xFF, ord("a"), 0xE6, ord("b")]) == [
        "\ufffd",
        "a",
        "",
        "\ufffdb",
        "",
    ]


def test_an_incomplete_character_is_flushed_at_the_end_only(tiny_tokenizer):
    assert pieces(tiny_tokenizer, [ord("a"), 0xF0, 0x9F]) == ["a", "", "", "\ufffd"]


def test_special_tokens_are_no_text(tiny_tokenizer):
    assert pieces(tiny_tokenizer, [259, ord("a"), 260]) == ["", "a", "", ""]


def test_a_stop_string_over_token_borders(tiny_tokenizer):
    tokens = tiny_tokenizer.encode("ok hello!")
    assert tokens[3:] == [258, ord("o"), ord("!")]
    assert pieces(tiny_tokenizer, tokens, ["ello"]) == ["o", "k", " ", "h", "", ""]


def test_a_stop_string_inside_one_token(tiny_tokenizer):
    detokenizer = Detokenizer(tiny_tokenizer, ["el"])
    assert detokenizer.push(258) == "h"
    assert detokenizer.stopped
    with pytest.raises(ValueError, match="after the end"):
        detokenizer.push(258)


def test_a_prefix_that_turns_out_not_to_be_a_stop_is_released(tiny_tokenizer):
    assert pieces(tiny_tokenizer, list(b"aab!"), ["abc"]) == ["", "a", "", "ab!", ""]


def test_a_held_prefix_is_flushed_at_the_end(tiny_tokenizer):
    assert pieces(tiny_tokenizer, list(b"xab"), ["abc"]) == ["x", "", "", "ab"]


def test_a_stop_string_of_several_bytes(tiny_tokenizer):
    assert "".join(pieces(tiny_tokenizer, list("a漢字b".encode()), ["字"])) == "a漢"


def test_the_stop_that_is_complete_first_wins(tiny_tokenizer):
    assert "".join(pieces(tiny_tokenizer, list(b"xabcd"), ["abcd", "bc"])) == "xa"


def test_decoded_counts_held_text(tiny_tokenizer):
    detokenizer = Detokenizer(tiny_tokenizer, ["bc"])
    detokenizer.push(ord("a"))
    detokenizer.push(ord("b"))
    assert (detokenizer.emitted, detokenizer.decoded) == (1, 2)


def test_an_empty_stop_string_is_refused(tiny_tokenizer):
    with pytest.raises(ValueError, match="empty"):
        Detokenizer(tiny_tokenizer, ["a", ""])


def expected_text(text: str, stops: list[str]) -> str:
    ends = [(text.index(s) + len(s), text.index(s)) for s in stops if s in text]
    return text[: min(ends)[1]] if ends else text


@given(text=TEXTS, stops=st.lists(TEXTS.filter(bool), max_size=4))
@example(text="aab", stops=["ab"])
def test_text_depends_on_the_tokens_not_on_their_borders(tiny_tokenizer, text, stops):
    by_bytes = pieces(tiny_tokenizer, list(text.encode()), stops)
    assert "".join(by_bytes) == expected_text(text, stops)
    assert "\ufffd" not in "".join(by_bytes)


@given(tokens=st.lists(st.integers(0, 255), max_size=24))
def test_joined_pieces_equal_the_whole_decode(tiny_tokenizer, tokens):
    assert "".join(pieces(tiny_tokenizer, tokens)) == tiny_tokenizer.decode(tokens)
