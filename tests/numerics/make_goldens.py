"""Make the goldens with transformers: `python make_goldens.py CHECKPOINTS [--smollm2 FOLDER]`.

CHECKPOINTS is the folder that `make_golden_checkpoints.py` has written (that one runs in the
project's environment, this one needs torch 2.13 for CPU, transformers 5.24, numpy, safetensors and
nothing of ours). Writes one .npz per model into goldens/ beside this file:

  tokens_I      prompt I, int32 [L]
  logits_I      f32 [L, V], of the whole prompt in one pass (random models of CASES only)
  greedy_I      int32 [new tokens], continued one by one with a cache
  logprobs_I    f32 [new tokens], of those tokens
  first_I       f32 [V] log-softmax of the first new token (for SmolLM2 its 20 best and for the
                serving models their 5 best: first_ids_I, first_logprobs_I)
  drafts_I      int32 [new tokens], what the MTP module drafts for each of them; -1 for the first
                after a prompt of one token, which it cannot (models with the module only)
  fingerprint   of the weights, as models.checkpoint.weights_fingerprint gives it
  gap           the smallest difference, over the greedy tokens and drafts, of the best two logits
  margin        the smallest difference, over all tokens and layers, of the score of the last expert
                or group chosen and the first that was not (models with experts only)
  noise         the largest difference of a logit when the reference is run in f64 instead (same)

and for each of MTP_CASES a NAME_mtp.npz with mtp_I f32 [L + new tokens - 1, V], the MTP module's
logits for all rows of the prompt and its continuation; row i predicts token i + 2.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from transformers import AutoTokenizer

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "support")]

from golden_cases import (  # noqa: E402
    CASES,
    NEW_TOKENS,
    PROMPT_LENGTHS,
    SERVING,
    SERVING_BEST,
)
from golden_sequences import Reference, Sequence  # noqa: E402

SMALLEST_GAP = 1e-3  # prompts with a closer call than this are drawn again
SMALLEST_GAP_SERVING = 2e-3
SMOLLM2_NEW_TOKENS = 32
SMOLLM2_BEST = 20
SMOLLM2_PROMPTS = (
    "The capital of France is",
    "Once upon a time",
    "def fibonacci(n):",
    "Water boils at",
    "The three primary colours are",
    "1, 1, 2, 3, 5, 8,",
    "To be, or not to be,",
    "The quick brown fox jumps over",
    "In the year 1969,",
    "import numpy as np\n\n",
    "Q: What is the largest planet?\nA:",
    "The mitochondria is",
    "A list of fruits:\n- apple\n-",
    "Dear Sir or Madam,",
    "The opposite of hot is",
    "Photosynthesis is the process by which",
    "She opened the door and",
    "The recipe calls for two cups of flour, one cup of sugar,",
)
SMOLLM2_CHATS = ("What is the capital of France?", "Write one sentence about the sea.")


@torch.no_grad()
def random_model(folder: Path) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
    """The golden of a model of CASES, and that of its MTP module if it has one."""
    reference = Reference(folder)
    rng = np.random.default_rng(7)
    sequences = [reference.draw(rng, length, NEW_TOKENS, SMALLEST_GAP) for length in PROMPT_LENGTHS]
    out = account(folder, reference, sequences)
    for i, sequence in enumerate(sequences):
        out |= {
            f"logits_{i}": sequence.logits[: len(sequence.prompt)],
            f"first_{i}": sequence.first,
        }
    yield folder.name, out
    if reference.mtp is not None:
        yield (
            f"{folder.name}_mtp",
            {name: out[name] for name in ("fingerprint", "gap", "margin", "noise")}
            | {f"mtp_{i}": sequence.mtp for i, sequence in enumerate(sequences)},
        )


@torch.no_grad()
def serving_model(folder: Path) -> dict[str, np.ndarray]:
    """The golden of a model of SERVING."""
    reference = Reference(folder)
    lengths, each = SERVING[folder.name]
    sequences = [
        reference.draw(rng, length, NEW_TOKENS, SMALLEST_GAP_SERVING)
        for length in lengths
        for rng in [np.random.default_rng(length)]
        for _ in range(each)
    ]
    out = account(folder, reference, sequences)
    for i, sequence in enumerate(sequences):
        store_best(out, i, sequence, SERVING_BEST)
    return out


def account(folder: Path, reference: Reference, sequences: list[Sequence]) -> dict[str, np.ndarray]:
    """What all goldens of random models hold."""
    out = {
        "fingerprint": np.array(fingerprint(folder)),
        "gap": np.float32(min(s.gap for s in sequences)),
    }
    if np.isfinite(sequences[0].margin):
        out["margin"] = np.float32(min(s.margin for s in sequences))
        out["noise"] = np.float32(reference.noise(sequences))
    for i, sequence in enumerate(sequences):
        out[f"tokens_{i}"] = np.array(sequence.prompt, np.int32)
        out[f"greedy_{i}"] = sequence.greedy
        out[f"logprobs_{i}"] = sequence.logprobs
        if sequence.mtp is not None:
            out[f"drafts_{i}"] = sequence.drafts
    return out


def store_best(out: dict[str, np.ndarray], i: int, sequence: Sequence, best: int) -> None:
    """Of the first token's distribution the best alone."""
    top = torch.tensor(sequence.first).topk(best)
    out[f"first_ids_{i}"] = top.indices.numpy().astype(np.int32)
    out[f"first_logprobs_{i}"] = top.values.numpy()


@torch.no_grad()
def smollm2(folder: Path, print_of: str) -> dict[str, np.ndarray]:
    reference, tokenizer = Reference(folder), AutoTokenizer.from_pretrained(folder)
    prompts = [tokenizer(text).input_ids for text in SMOLLM2_PROMPTS]
    for text in SMOLLM2_CHATS:
        chat = [{"role": "user", "content": text}]
        rendered = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        prompts.append(tokenizer(rendered, add_special_tokens=False).input_ids)
    out: dict[str, np.ndarray] = {"fingerprint": np.array(print_of)}
    sequences = [reference.continued(ids, SMOLLM2_NEW_TOKENS) for ids in prompts]
    for i, sequence in enumerate(sequences):
        out[f"tokens_{i}"] = np.array(sequence.prompt, np.int32)
        out[f"greedy_{i}"] = sequence.greedy
        out[f"logprobs_{i}"] = sequence.logprobs
        store_best(out, i, sequence, SMOLLM2_BEST)
        ids, greedy = sequence.prompt, sequence.greedy
        print(repr(tokenizer.decode(ids)), "->", repr(tokenizer.decode(greedy)))
    out["gap"] = np.float32(min(s.gap for s in sequences))
    return out


def fingerprint(folder: Path) -> str:
    return (folder / "fingerprint.txt").read_text().strip()


def save(name: str, arrays: dict[str, np.ndarray]) -> None:
    file = HERE / "goldens" / f"{name}.npz"
    file.parent.mkdir(exist_ok=True)
    np.savez_compressed(file, **arrays)
    said = ", ".join(f"{n} {arrays[n]:.1e}" for n in ("gap", "margin", "noise") if n in arrays)
    drafts = [k for k in arrays if k.startswith("drafts_")]
    right = sum((arrays[k] == arrays[k.replace("drafts", "greedy")]).sum() for k in drafts)
    more = f", {right} of {sum(map(len, map(arrays.get, drafts)))} drafts right" if drafts else ""
    print(f"{file.name}: {file.stat().st_size / 1e3:.0f} kB, {said}{more}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("checkpoints", type=Path)
    parser.add_argument("--smollm2", type=Path, help="the folder of fetch_smollm2.py, in f32")
    parser.add_argument("--only", nargs="+", default=[*CASES, *SERVING], help="these models")
    args = parser.parse_args()
    torch.set_num_threads(1)  # nothing here is large
    for name in args.only:
        if name in SERVING:
            save(name, serving_model(args.checkpoints / name))
        else:
            for file, arrays in random_model(args.checkpoints / name):
                save(file, arrays)
    if args.smollm2:
        save("smollm2", smollm2(args.smollm2, fingerprint(args.checkpoints / "smollm2")))


if __name__ == "__main__":
    main()
