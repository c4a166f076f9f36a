"""A model folder's tokenizer: text to ids, ids to bytes, and the stop ids."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from jaxdisagg.chat_template import ChatTemplate, load_template

BYTE_FALLBACK_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenizerError(ValueError):
    """A model folder whose tokenizer cannot be used; the message names the file."""


class TooManyTokens(ValueError):
    """A text that has more tokens than were allowed; the message says how many it has."""


class Tokenizer:
    """Encodes text, gives the bytes of a token, renders chats.

    A token stands for a fixed string of bytes, which need not be whole UTF-8 characters:
    `token_bytes` is what an incremental detokenizer joins. Holds for byte-level vocabularies
    and for those with byte fallback; others are refused.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_token_ids: Sequence[int] = (),
        template: ChatTemplate | None = None,
    ) -> None:
        self._backend = backend
        self._chars = _byte_chars()
        self.eos_token_ids = tuple(eos_token_ids)
        self.template = template
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        added = backend.get_added_tokens_decoder()
        self._added = {i: token.content.encode() for i, token in added.items()}
        self._special = frozenset(i for i, token in added.items() if token.special)
        # What a file says of truncation would silently shorten prompts.
        backend.no_truncation()
        backend.no_padding()
        settings = json.loads(backend.to_str())
        kinds = [part["type"] for part in _parts(settings, "decoder", "decoders")]
        self._bytes_per_token = _bytes_per_token(backend, settings)
        self._composes = settings["normalizer"] is not None
        vocabulary = backend.get_vocab(with_added_tokens=False)
        self._without_token = bytes(b for c, b in self._chars.items() if c not in vocabulary)
        if "ByteLevel" in kinds:
            self._to_bytes = self._byte_level
        elif "ByteFallback" in kinds:
            self._to_bytes = _byte_fallback
        else:
            raise TokenizerError(
                f"tokenizer.json: decoder {' + '.join(kinds) or 'none'} is not supported, "
                "only ByteLevel and ByteFallback are"
            )

    @classmethod
    def from_folder(cls, folder: Path) -> "Tokenizer":
        """Load tokenizer.json and what lies beside it: the chat template and the stop ids.

        Raises TokenizerError naming the file that is missing or cannot be read.
        """
        if not folder.is_dir():
            raise TokenizerError(f"no model folder at {folder}")
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise TokenizerError(f"{path} is missing: the tokenizer is read from it")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the bindings raise bare Exception
            raise TokenizerError(f"{path} is not a tokenizer: {error}") from error
        settings = _read_json(folder / "tokenizer_config.json")
        special = _special_tokens(settings)
        try:
            template = load_template(folder, settings, special)
        except ValueError as error:
            raise TokenizerError(str(error)) from error
        eos = _eos_token_ids(folder, backend, special)
        return cls(backend, eos_token_ids=eos, template=template)

    def encode(
        self, text: str, *, add_special_tokens: bool = True, most: int | None = None
    ) -> list[int]:
        """Token ids of a text; `add_special_tokens` adds what the model expects before it.

        Raises TooManyTokens if they are more than `most`, before it tokenizes where the length of
        the text tells. Other threads run meanwhile: a long text takes seconds.
        """
        # Composing characters makes a text shorter, but leaves ASCII alone.
        if most is not None and self._bytes_per_token and (text.isascii() or not self._composes):
            size = len(text.encode().translate(None, self._without_token))
            least = -(-size // self._bytes_per_token)
            if least > most:
                raise TooManyTokens(f"{size} bytes, which are at least {least} tokens,")
        # `encode` would hold the interpreter's lock and count characters nobody asks for.
        batch = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        if most is not None and len(batch[0]) > most:
            raise TooManyTokens(f"{len(batch[0])} tokens")
        return batch[0].ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of whole token sequences, special tokens left out, invalid UTF-8 replaced."""
        joined = b"".join(self.token_bytes(i) for i in ids if not self.is_special(i))
        return joined.decode("utf-8", "replace")

    def is_special(self, token: int) -> bool:
        """Whether the token is a mark such as the end of a turn, no part of a text."""
        return token in self._special

    def token_bytes(self, token: int) -> bytes:
        """Bytes that the token stands for; none for ids that the vocabulary does not name."""
        if token in self._added:
            return self._added[token]
        string = self._backend.id_to_token(token)
        return b"" if string is None else self._to_bytes(string)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any] | None = None,
        *,
        most: int | None = None,
    ) -> list[int]:
        """Token ids of a conversation, with the opening of the assistant's turn at the end.

        `options` are further variables of the template. Raises ValueError where there is no
        template or the template refuses the conversation, TooManyTokens as `encode` does.
        """
        if self.template is None:
            raise ValueError("this model has no chat template: use /v1/completions")
        text = self.template.render(messages, options or {})
        return self.encode(text, add_special_tokens=False, most=most)

    def _byte_level(self, string: str) -> bytes:
        try:
            return bytes(self._chars[c] for c in string)
        except KeyError:
            return string.encode()


def _byte_chars() -> dict[str, int]:
    """GPT-2's alphabet: the printable character that stands for each byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(printable)]
    chars = {chr(b): b for b in printable}
    return chars | {chr(0x100 + i): b for i, b in enumerate(others)}


def _byte_fallback(string: str) -> bytes:
    if match := BYTE_FALLBACK_TOKEN.fullmatch(string):
        return bytes([int(match[1], 16)])
    return string.replace("\u2581", " ").encode()


def _parts(settings: Mapping[str, Any], name: str, plural: str) -> list[Mapping[str, Any]]:
    """The parts of one step of tokenizer.json in their order; sequences may be nested."""
    part = settings.get(name)
    if part is None:
        return []
    if part["type"] == "Sequence":
        return [p for inner in part[plural] for p in _parts({name: inner}, name, plural)]
    return [part]


def _bytes_per_token(backend: tokenizers.Tokenizer, settings: Mapping[str, Any]) -> int | None:
    """The most bytes of (composed) text that one token can stand for; None if there is no bound.

    There is one where nothing on the way from a text to its tokens leaves any of it out, but for
    bytes that have no token.
    """
    normalizers = _parts(settings, "normalizer", "normalizers")
    splits = _parts(settings, "pre_tokenizer", "pretokenizers")
    added = settings["added_tokens"]
    whole = (
        all(part["type"] == "NFC" for part in normalizers)
        and any(part["type"] == "ByteLevel" for part in splits)
        and all(part["type"] in ("ByteLevel", "Digits", "Split") for part in splits)
        and all(part.get("behavior") != "Removed" for part in splits)
        and not any(token["lstrip"] or token["rstrip"] for token in added)
    )
    if not whole:
        return None
    vocabulary = backend.get_vocab(with_added_tokens=False)
    return max(*map(len, vocabulary), *(len(token["content"].encode()) for token in added), 1)


def _read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file that may be missing."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} holds no JSON object")
    return value


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, eos_token ... as texts; they may be written as objects with `content`."""
    found = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        value = settings.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            found[name] = value
    return found


def _eos_token_ids(
    folder: Path, backend: tokenizers.Tokenizer, special: Mapping[str, str]
) -> tuple[int, ...]:
    """Ids that end a generation: those of the first of three places that names any.

    As in Hugging Face's `generate`, generation_config.json replaces what config.json says.
    """
    for name in ("generation_config.json", "config.json"):
        value = _read_json(folder / name).get("eos_token_id")
        if value is not None:
            ids = value if isinstance(value, list) else [value]
            if not all(type(i) is int and i >= 0 for i in ids):
                raise TokenizerError(f"{folder / name}: eos_token_id {value!r} is no token id")
            return tuple(ids)
    token = backend.token_to_id(special["eos_token"]) if "eos_token" in special else None
    return () if token is None else (token,)
