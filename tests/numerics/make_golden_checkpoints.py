"""Write the goldens' random models: `python make_golden_checkpoints.py FOLDER [SMOLLM2]`.

Runs in the project's environment; `make_goldens.py` then runs on FOLDER in its own. Beside each
model lies fingerprint.txt, which goes into the golden, so that a test notices other weights.
"""

import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY / "tests" / "support"), str(REPOSITORY / "scripts"), str(REPOSITORY)]

import golden_weights  # noqa: E402
from golden_cases import CASES, SERVING  # noqa: E402

from models.checkpoint import weights_fingerprint  # noqa: E402


def main(folder: Path, smollm2: Path | None) -> None:
    for name in (*CASES, *SERVING):
        golden_weights.write(folder / name, name)
        (folder / name / "fingerprint.txt").write_text(weights_fingerprint(folder / name))
    if smollm2 is not None:
        (folder / "smollm2").mkdir(exist_ok=True)
        (folder / "smollm2" / "fingerprint.txt").write_text(weights_fingerprint(smollm2))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None)
