"""Make the data of configs/grpo_format.py and configs/grpo.py: sums of two digits that are below 10.

    python scripts/sums.py FOLDER

Write FOLDER/format.jsonl, texts such as `3+5=2` whose last digit is random, and FOLDER/prompts.jsonl, the 55 prompts
such as `3+5=`, each with its answer. So the texts show the form of an answer, and nothing of addition.
"""

import json
import random
import sys
from pathlib import Path

COPIES = 20  # texts of each sum


def main() -> None:
    folder, digits = Path(sys.argv[1]), random.Random(0)
    sums = [(a, b) for a in range(10) for b in range(10 - a)]
    rows = {
        "format": [{"text": f"{a}+{b}={digits.randrange(10)}"} for a, b in sums for _ in range(COPIES)],
        "prompts": [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in sums],
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, each in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in each))
        print(f"{len(each):,} rows in {folder / name}.jsonl")


if __name__ == "__main__":
    main()
