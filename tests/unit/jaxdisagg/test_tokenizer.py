import json
import shutil
import threading
import time
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from jaxdisagg.tokenizer import Tokenizer, TokenizerError, TooManyTokens


@pytest.fixture
def folder(tiny_folder: Path, tmp_path: Path) -> Path:
    """A copy of the tiny folder that a test may change."""
    return Path(shutil.copytree(tiny_folder, tmp_path / "model"))


def test_encodes_merges_and_special_tokens(tiny_tokenizer):
    assert tiny_tokenizer.encode("hello") == [258, ord("o")]
    assert tiny_tokenizer.encode("<|im_start|>hi") == [259, ord("h"), ord("i")]
    assert tiny_tokenizer.vocab_size == 262


@pytest.mark.parametrize("text", ["", "hello  world\n", "é漢字 🙂🇫🇷", "\t\x00\x7f", "2024"])
def test_round_trip(tiny_tokenizer, text):
    assert tiny_tokenizer.decode(tiny_tokenizer.encode(text)) == text


def test_token_bytes_are_the_bytes_of_any_token(tiny_tokenizer):
    assert [tiny_tokenizer.token_bytes(i) for i in range(256)] == [bytes([i]) for i in range(256)]
    assert tiny_tokenizer.token_bytes(258) == b"hell"
    assert tiny_tokenizer.token_bytes(260) == b"<|im_end|>"
    assert tiny_tokenizer.token_bytes(9999) == b""


def test_decode_leaves_special_tokens_out_and_replaces_broken_characters(tiny_tokenizer):
    assert tiny_tokenizer.decode([259, 258, 260, 0xF0, 0x9F]) == "hell\ufffd"


@given(
    text=st.text(
        st.sampled_from("hel <|im_start|>é漢🙂\n") | st.characters(codec="utf-8"), max_size=60
    )
)
def test_more_tokens_than_allowed_are_refused_and_no_fewer(tiny_tokenizer, text):
    ids = tiny_tokenizer.encode(text)
    assert tiny_tokenizer.encode(text, most=len(ids)) == ids
    if ids:
        with pytest.raises(
            TooManyTokens, match=r"^\d+ (tokens$|bytes, which are at least \d+ tok)"
        ):
            tiny_tokenizer.encode(text, most=len(ids) - 1)


def test_a_length_that_tells_is_not_tokenized(tiny_tokenizer):
    text = "<|im_start|>" * 10
    assert tiny_tokenizer.encode(text, most=10) == [259] * 10
    with pytest.raises(TooManyTokens, match="121 bytes, which are at least 11 tokens"):
        tiny_tokenizer.encode(text + "a", most=10)
    with pytest.raises(TooManyTokens, match="122 bytes"):
        tiny_tokenizer.encode(text + "é", most=10)


def changed_backend(folder: Path, change) -> Tokenizer:
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    change(backend)
    return Tokenizer(backend)


def removing(backend: tokenizers.Tokenizer) -> None:
    split = pre_tokenizers.Split(Regex("[a ]+"), "removed")
    inner = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, inner])


def stripping(backend: tokenizers.Tokenizer) -> None:
    backend.add_special_tokens([AddedToken("<x>", lstrip=True, normalized=False)])


def composing(backend: tokenizers.Tokenizer) -> None:
    backend.normalizer = normalizers.NFC()


def replacing(backend: tokenizers.Tokenizer) -> None:
    backend.normalizer = normalizers.Sequence([normalizers.Replace(Regex("[a ]+"), "")])


@pytest.mark.parametrize(
    ("change", "text", "count"),
    [
        (removing, "a" * 1000, 0),
        (stripping, " " * 1000 + "<x>", 1),
        (composing, "e\u0301" * 50, 100),
        (replacing, " " * 1000, 0),
    ],
)
def test_a_text_that_loses_characters_is_not_refused_by_its_length(
    tiny_folder, change, text, count
):
    tokenizer = changed_backend(tiny_folder, change)
    assert len(tokenizer.encode(text, most=count)) == count
    if change is composing:
        with pytest.raises(TooManyTokens, match=r"^100 tokens"):
            tokenizer.encode(text, most=5)
        with pytest.raises(TooManyTokens, match="1000 bytes"):
            tokenizer.encode("a" * 1000, most=5)


def test_bytes_without_a_token_do_not_count(tiny_folder):
    settings = json.loads((tiny_folder / "tokenizer.json").read_text())
    del settings["model"]["vocab"]["Ā"]  # the byte 0
    tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(settings)))
    assert tokenizer.encode("a" + "\0" * 1000, most=1) == [97]
    with pytest.raises(TooManyTokens, match="13 bytes"):
        tokenizer.encode("\0" * 1000 + "a" * 13, most=1)


def test_truncation_and_padding_in_the_file_are_not_applied(tiny_folder):
    def change(backend: tokenizers.Tokenizer) -> None:
        backend.enable_truncation(3)
        backend.enable_padding(length=50)

    assert changed_backend(tiny_folder, change).encode("abcde") == list(b"abcde")


def test_other_threads_run_while_a_long_text_is_tokenized(smollm2_folder):
    tokenizer = Tokenizer.from_folder(smollm2_folder)
    beats, over = 0, threading.Event()

    def beat() -> None:
        nonlocal beats
        while not over.wait(0.001):
            beats += 1

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        time.sleep(0.05)
        before = beats
        with pytest.raises(TooManyTokens, match="tokens"):
            tokenizer.encode("a b" * 200_000, most=100_000)
        during = beats - before
    finally:
        over.set()
        thread.join()
    assert during > 10  # with the interpreter's lock held it would be one or two


def test_byte_fallback_vocabulary():
    vocab = {"<unk>": 0, "\u2581he": 1, "llo": 2, "<0xC3>": 3, "<0xA9>": 4}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [], byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(parts)
    assert Tokenizer(backend).decode([1, 2, 3, 4]) == " helloé"


def test_a_vocabulary_without_bytes_is_refused():
    backend = tokenizers.Tokenizer(models.WordPiece({"a": 0}, unk_token="a"))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(TokenizerError, match="decoder WordPiece is not supported"):
        Tokenizer(backend)


def test_chat_ends_with_the_opening_of_the_answer(tiny_tokenizer):
    ids = tiny_tokenizer.encode_chat([{"role": "user", "content": "hell"}])
    expected = "<|im_start|>user\nhell<|im_end|>\n<|im_start|>assistant\n"
    assert ids == tiny_tokenizer.encode(expected)
    assert ids[0] == 259


@pytest.mark.parametrize("value", [261, [261]])
def test_stop_ids_come_from_generation_config_first(folder, value):
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 1}))
    assert Tokenizer.from_folder(folder).eos_token_ids == (1,)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    assert Tokenizer.from_folder(folder).eos_token_ids == (261,)
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.6}))
    assert Tokenizer.from_folder(folder).eos_token_ids == (1,)


def test_stop_id_falls_back_to_the_named_token(tiny_tokenizer):
    assert tiny_tokenizer.eos_token_ids == (260,)


def test_missing_folder_and_files_are_named(folder):
    with pytest.raises(TokenizerError, match=r"no model folder at .*nowhere"):
        Tokenizer.from_folder(folder / "nowhere")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(TokenizerError, match=r"tokenizer\.json is missing"):
        Tokenizer.from_folder(folder)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "{", "is not a tokenizer"),
        ("tokenizer_config.json", "{", "cannot be read"),
        ("tokenizer_config.json", "[]", "holds no JSON object"),
        ("generation_config.json", '{"eos_token_id": "x"}', "is no token id"),
        ("generation_config.json", '{"eos_token_id": [true]}', "is no token id"),
        ("config.json", '{"eos_token_id": -1}', "is no token id"),
        ("chat_template.jinja", "{% if %}", "invalid chat template, line 1"),
        ("chat_template.json", "{}", r"chat_template\.json: "),
    ],
)
def test_a_damaged_file_is_named(folder, name, content, message):
    (folder / name).write_text(content)
    with pytest.raises(TokenizerError, match=message) as caught:
        Tokenizer.from_folder(folder)
    assert name in str(caught.value)


def test_a_folder_without_template_has_no_chat(folder):
    (folder / "tokenizer_config.json").unlink()
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.encode("hi") == [ord("h"), ord("i")]
    with pytest.raises(ValueError, match="no chat template"):
        tokenizer.encode_chat([{"role": "user", "content": "x"}])


def test_real_model_tokenizer(smollm2_folder):
    tokenizer = Tokenizer.from_folder(smollm2_folder)
    assert tokenizer.vocab_size == 49152
    assert tokenizer.eos_token_ids == (2,)
    ids = tokenizer.encode_chat([{"role": "user", "content": "What is the capital of France?"}])
    # From Hugging Face's tokenizer and template on the same folder.
    assert ids[:3] + ids[20:] == [
        *[1, 9690, 198],
        *[198, 1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198],
    ]
    with pytest.raises(TooManyTokens, match="243 bytes, which are at least 3 tokens"):
        tokenizer.encode("a" * 243, most=2)
    for text in ("1234 + 5", "漢字 🙂 naïve", "  two\n\nlines"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
