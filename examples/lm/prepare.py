"""Write text files as one file of 16-bit tokens: their bytes, and 256 at the end of each document.

python examples/lm/prepare.py docs tokens.bin
"""

import sys
from pathlib import Path

import numpy as np

END = 256

if __name__ == "__main__":
    source, out = map(Path, sys.argv[1:])
    with out.open("wb") as file:
        for document in sorted(source.rglob("*.md")) + sorted(source.rglob("*.txt")):
            tokens = [*document.read_bytes(), END]
            file.write(np.array(tokens, dtype=np.uint16).tobytes())
    print(f"{out}: {out.stat().st_size // 2:,} tokens")
