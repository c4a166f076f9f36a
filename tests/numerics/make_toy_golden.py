"""The golden of the family from outside the tree: `python make_toy_golden.py FOLDER`, run twice.

First in the project's environment: writes the model into FOLDER. Then in that of
`make_goldens.py` (torch, transformers, nothing of ours): makes goldens/qwen2_plugin.npz from it.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path[:0] = [
    str(path)
    for path in (
        HERE.parents[1],
        HERE.parents[1] / "scripts",
        HERE.parent / "support",
        HERE.parent / "plugins" / "qwen2",
    )
]

from qwen2_case import (  # noqa: E402
    CONFIG,
    LOGITS_UP_TO,
    NAME,
    NEW_TOKENS,
    PROMPT_LENGTHS,
    SEED,
    STD,
    VOCAB,
)


def write_model(folder: Path) -> None:
    import tempfile

    from plugin_site import QWEN2, install
    from random_checkpoint import write_checkpoint

    from models.checkpoint import weights_fingerprint

    with tempfile.TemporaryDirectory() as site:
        sys.path.append(str(install(QWEN2, Path(site))))
        write_checkpoint(folder, CONFIG, std=STD, seed=SEED)
    (folder / "fingerprint.txt").write_text(weights_fingerprint(folder))


def make_golden(folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    rng = np.random.default_rng(SEED)
    out = {"fingerprint": np.array((folder / "fingerprint.txt").read_text())}
    gaps = []
    for i, length in enumerate(PROMPT_LENGTHS):
        ids = rng.integers(0, VOCAB, length).tolist()
        prompt = torch.tensor([ids])
        with torch.no_grad():
            tokens = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),  # or it would take token 0 for padding
                pad_token_id=0,
                max_new_tokens=NEW_TOKENS,
                do_sample=False,
            )
            logits = model(tokens).logits[0]
        new, answers = tokens[0, length:], logits[length - 1 : -1]
        assert answers.argmax(-1).tolist() == new.tolist(), "its own cache disagrees"
        best = answers.topk(2).values
        gaps.append(float((best[:, 0] - best[:, 1]).min()))
        chosen = answers.log_softmax(-1)[torch.arange(NEW_TOKENS), new]
        out[f"tokens_{i}"] = np.array(ids, np.int32)
        out[f"greedy_{i}"] = new.numpy().astype(np.int32)
        out[f"logprobs_{i}"] = chosen.numpy()
        if length <= LOGITS_UP_TO:
            out[f"logits_{i}"] = logits[:length].numpy()
    file = HERE / "goldens" / f"{NAME}.npz"
    np.savez_compressed(file, **out, gap=np.float32(min(gaps)))
    print(f"{file.name}: {file.stat().st_size / 1e3:.0f} kB, smallest gap {min(gaps):.4f}")


if __name__ == "__main__":
    (make_golden if find_spec("torch") else write_model)(Path(sys.argv[1]))
