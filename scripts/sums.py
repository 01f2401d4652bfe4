"""Make the data of configs/grpo_format.py, configs/grpo.py and configs/on_policy.py: sums of two digits.

    python scripts/sums.py FOLDER

Write FOLDER/format.jsonl, texts such as `3+5=2` whose last digit is random, and FOLDER/prompts.jsonl, 28 prompts such
as `3+5=`, each with its answer. So the texts show the form of an answer, and nothing of addition. The first digit is 0
to 3, and each answer from 3 to 9 belongs to four prompts: no answer is right more often than the others.
FOLDER/right.jsonl has the same texts with the right results, for a teacher.
"""

import json
import random
import sys
from pathlib import Path

COPIES = 40  # texts of each sum


def main() -> None:
    folder, digits = Path(sys.argv[1]), random.Random(0)
    sums = [(a, result - a) for result in range(3, 10) for a in range(4)]
    rows = {
        "format": [{"text": f"{a}+{b}={digits.randrange(10)}"} for a, b in sums for _ in range(COPIES)],
        "right": [{"text": f"{a}+{b}={a + b}"} for a, b in sums for _ in range(COPIES)],
        "prompts": [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in sums],
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, each in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in each))
        print(f"{len(each):,} rows in {folder / name}.jsonl")


if __name__ == "__main__":
    main()
