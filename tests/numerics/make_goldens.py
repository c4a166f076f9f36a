"""Make the goldens with transformers: `python make_goldens.py CHECKPOINTS [--smollm2 FOLDER]`.

CHECKPOINTS is the folder that `make_golden_checkpoints.py` has written (that one runs in the
project's environment, this one needs torch 2.13 for CPU, transformers 5.24, numpy, safetensors and
nothing of ours). Writes one .npz per model into goldens/ beside this file:

  tokens_I      prompt I, int32 [L]
  logits_I      f32 [L, V], of the whole prompt in one pass (random models of CASES only)
  greedy_I      int32 [new tokens], continued one by one with a cache
  logprobs_I    f32 [new tokens], of those tokens
  first_I       f32 [V] log-softmax of the first new token (for SmolLM2 its 20 best and for the
                serving model its 5 best: first_ids_I, first_logprobs_I)
  fingerprint   of the weights, as models.checkpoint.weights_fingerprint gives it
  gap           the smallest difference, over the greedy tokens, of the best two logits
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "support"))

from golden_cases import (  # noqa: E402
    CASES,
    NEW_TOKENS,
    PROMPT_LENGTHS,
    SERVING,
    SERVING_BEST,
    SERVING_LENGTHS,
    SERVING_PER_LENGTH,
    VOCAB,
)

SMALLEST_GAP = 2e-3  # prompts of the serving model with a closer call than this are drawn again
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


def greedy(model: torch.nn.Module, ids: list[int], count: int) -> dict[str, np.ndarray]:
    """Continue with a cache, token by token."""
    step = torch.tensor([ids])
    cache, tokens, logprobs, first, gap = None, [], [], None, np.inf
    for _ in range(count):
        out = model(step, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        logits = out.logits[0, -1].float()
        best = logits.topk(2).values
        gap = min(gap, float(best[0] - best[1]))
        distribution = logits.log_softmax(-1)
        first = distribution if first is None else first
        token = int(logits.argmax())
        tokens.append(token)
        logprobs.append(float(distribution[token]))
        step = torch.tensor([[token]])
    return {
        "greedy": np.array(tokens, np.int32),
        "logprobs": np.array(logprobs, np.float32),
        "first": first.numpy(),
        "gap": np.float32(gap),
    }


def load(folder: Path) -> torch.nn.Module:
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


def fingerprint(folder: Path) -> str:
    return (folder / "fingerprint.txt").read_text().strip()


@torch.no_grad()
def random_model(folder: Path) -> dict[str, np.ndarray]:
    model = load(folder)
    rng = np.random.default_rng(7)
    out: dict[str, np.ndarray] = {"fingerprint": np.array(fingerprint(folder))}
    gaps = []
    for i, length in enumerate(PROMPT_LENGTHS):
        ids = rng.integers(0, VOCAB, length).tolist()
        logits = model(torch.tensor([ids])).logits[0].float()
        result = greedy(model, ids, NEW_TOKENS)
        gaps.append(result.pop("gap"))
        out[f"tokens_{i}"] = np.array(ids, np.int32)
        out[f"logits_{i}"] = logits.numpy()
        out |= {f"{name}_{i}": value for name, value in result.items()}
    out["gap"] = np.min(gaps)
    return out


@torch.no_grad()
def serving_model(folder: Path) -> dict[str, np.ndarray]:
    model = load(folder)
    out: dict[str, np.ndarray] = {"fingerprint": np.array(fingerprint(folder))}
    gaps: list[float] = []
    for length in SERVING_LENGTHS:
        rng = np.random.default_rng(length)
        kept = 0
        while kept < SERVING_PER_LENGTH:
            ids = rng.integers(0, VOCAB, length).tolist()
            result = greedy(model, ids, NEW_TOKENS)
            gap = result.pop("gap")
            if gap >= SMALLEST_GAP:
                store_generation(out, len(gaps), ids, result, SERVING_BEST)
                gaps.append(gap)
                kept += 1
    out["gap"] = np.min(gaps)
    return out


def store_generation(
    out: dict[str, np.ndarray], i: int, ids: list[int], result: dict[str, np.ndarray], best: int
) -> None:
    """Prompt i and its continuation, of the first token's distribution the best alone."""
    top = torch.tensor(result.pop("first")).topk(best)
    out[f"tokens_{i}"] = np.array(ids, np.int32)
    out[f"first_ids_{i}"] = top.indices.numpy().astype(np.int32)
    out[f"first_logprobs_{i}"] = top.values.numpy()
    out.update({f"{name}_{i}": value for name, value in result.items()})


@torch.no_grad()
def smollm2(folder: Path, print_of: str) -> dict[str, np.ndarray]:
    model, tokenizer = load(folder), AutoTokenizer.from_pretrained(folder)
    prompts = [tokenizer(text).input_ids for text in SMOLLM2_PROMPTS]
    for text in SMOLLM2_CHATS:
        chat = [{"role": "user", "content": text}]
        rendered = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        prompts.append(tokenizer(rendered, add_special_tokens=False).input_ids)
    out: dict[str, np.ndarray] = {"fingerprint": np.array(print_of)}
    gaps = []
    for i, ids in enumerate(prompts):
        result = greedy(model, ids, SMOLLM2_NEW_TOKENS)
        gaps.append(result.pop("gap"))
        store_generation(out, i, ids, result, SMOLLM2_BEST)
        print(repr(tokenizer.decode(ids)), "->", repr(tokenizer.decode(result["greedy"])))
    out["gap"] = np.min(gaps)
    return out


def save(name: str, arrays: dict[str, np.ndarray]) -> None:
    file = HERE / "goldens" / f"{name}.npz"
    file.parent.mkdir(exist_ok=True)
    np.savez_compressed(file, **arrays)
    print(f"{file.name}: {file.stat().st_size / 1e3:.0f} kB, smallest gap {arrays['gap']:.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("checkpoints", type=Path)
    parser.add_argument("--smollm2", type=Path, help="the folder of fetch_smollm2.py, in f32")
    args = parser.parse_args()
    for name in CASES:
        save(name, random_model(args.checkpoints / name))
    save(SERVING, serving_model(args.checkpoints / SERVING))
    if args.smollm2:
        save("smollm2", smollm2(args.smollm2, fingerprint(args.checkpoints / "smollm2")))


if __name__ == "__main__":
    main()
