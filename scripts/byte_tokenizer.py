"""Write a tokenizer without training one: a token per byte, and the marks of a conversation."""

import json
from collections.abc import Iterator
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def write_tokenizer(folder: Path, vocab: int) -> None:
    """Write a byte-level tokenizer with a chat template: token b is byte b, then the special ones.

    Raises ValueError when the vocabulary is too small for it.
    """
    needed = 256 + len(SPECIAL_TOKENS)
    if vocab < needed:
        raise ValueError(
            f"vocab: {vocab} is too small for a tokenizer of bytes (at least {needed})"
        )
    folder.mkdir(parents=True, exist_ok=True)
    alphabet = dict(sorted(_byte_characters()))
    backend = tokenizers.Tokenizer(models.BPE({c: b for b, c in alphabet.items()}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken(s, special=True, normalized=False) for s in SPECIAL_TOKENS]
    )
    backend.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def _byte_characters() -> Iterator[tuple[int, str]]:
    """(byte, its character): printable ones stand for themselves, the rest for U+0100 on."""
    others = 0
    for byte in range(256):
        if 0x21 <= byte < 0x7F or 0xA1 <= byte < 0xAD or byte >= 0xAE:
            yield byte, chr(byte)
        else:
            yield byte, chr(0x100 + others)
            others += 1
