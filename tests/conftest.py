"""Eight CPU devices for jax, one compilation cache, and the fixtures shared by all tests."""

import functools
import importlib
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tokenizers
from fake_cuda import VARIABLE, FakeCuda, build
from hypothesis import HealthCheck, settings
from repository import REPOSITORY, load_script
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from jaxdisagg.tokenizer import Tokenizer

# Read when jax is first imported, which no import below may do earlier.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
).strip()
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(REPOSITORY / ".cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

# A shell lets what it runs in the background ignore SIGINT, and processes inherit that: those that
# tests interrupt would not end.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A slow machine is no failure.
settings.register_profile("project", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("project")

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_characters() -> list[str]:
    """GPT-2's character for each byte, written independently of the product."""
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
    spare = iter(range(256, 512))
    return [chr(b) if b in plain else chr(next(spare)) for b in range(256)]


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder without weights: byte-level BPE in which token b is the byte b.

    Token 256 is "he", 257 "ll", 258 "hell"; 259 <|im_start|>, 260 <|im_end|> (which ends a
    generation), 261 <|pad|>.
    """
    folder = tmp_path_factory.mktemp("tiny")
    vocab = {c: b for b, c in enumerate(byte_characters())} | {"he": 256, "ll": 257, "hell": 258}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [("h", "e"), ("l", "l"), ("he", "ll")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<|im_start|>", "<|im_end|>", "<|pad|>"]
    backend.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in special])
    backend.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "chat_template": CHATML}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="session")
def tiny_tokenizer(tiny_folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(tiny_folder)


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """The folder of SmolLM2-135M-Instruct in f32, fetched once and kept."""
    return load_script("fetch_smollm2").fetch()


@pytest.fixture(scope="session")
def fake_cuda_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fake CUDA driver, compiled once."""
    return build(tmp_path_factory.mktemp("fake_cuda"))


@pytest.fixture
def fake_cuda(fake_cuda_library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """Engines made in the test take the fake driver for libcuda.so.1."""
    monkeypatch.setenv(VARIABLE, str(fake_cuda_library))
    fake = FakeCuda(fake_cuda_library)
    fake.reset()
    yield fake
    fake.reset()


@pytest.fixture(scope="session")
def golden_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """From a name in support/golden_cases.MODELS to the folder of that model, written once."""

    @functools.cache
    def write(name: str) -> Path:
        folder = tmp_path_factory.mktemp("goldens") / name
        importlib.import_module("golden_weights").write(folder, name)
        return folder

    return write
