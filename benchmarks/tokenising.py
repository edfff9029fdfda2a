"""Memory of tokenising and of reading lanes, for texts of two sizes.

    python -m benchmarks.tokenising BOOKS TOKENIZER

BOOKS is a folder of text files, which are repeated up to each size; TOKENIZER the folder of a tokenizer. Each size has
a process of its own. Time is not measured alone on the machine, and says only how long it took.
"""

import itertools
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from benchmarks.common import in_process, memory_mb, write_results
from hf_recurrence.data import Lanes, TokenStore
from hf_recurrence.metrics import files_digest


SIZES_MB = (100, 1000)
LANES, SEGMENT = 8, 6000


def books(folder: Path, megabytes: int) -> Iterator[str]:
    """The files' texts one after the other, over and over, until there are enough bytes."""
    left = megabytes * 10**6
    for file in itertools.cycle(sorted(folder.glob("*.txt"))):
        text = file.read_text(encoding="utf-8")
        left -= len(text.encode())
        if left < 0:
            return
        yield text


class Watch(threading.Thread):
    """Notes the most memory of the process's own; what is mapped from files can be dropped at any time."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most, self.ended = 0.0, threading.Event()

    def run(self) -> None:
        while not self.ended.wait(0.05):
            self.most = max(self.most, memory_mb("RssAnon"))


def measure(folder: Path, tokenizer_folder: str, megabytes: int) -> dict[str, Any]:
    """The peaks of building a store and of reading all of its lanes."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    before = memory_mb("RssAnon")
    with tempfile.TemporaryDirectory() as kept:
        peaks = {}
        for part in ("build", "lanes"):
            watch, start = Watch(), time.perf_counter()
            watch.start()
            if part == "build":
                store = TokenStore.build(kept, books(folder, megabytes), tokenizer)
            else:
                tokens = sum(segment.num_tokens for segment in Lanes(store, LANES, SEGMENT))
            watch.ended.set()
            watch.join()
            peaks[part] = {"peak_anonymous_mb": watch.most, "seconds": time.perf_counter() - start}
    return {
        "megabytes": store.manifest["bytes"] / 1e6,
        "documents": len(store),
        "tokens": tokens,
        "anonymous_before_mb": before,
        **peaks,
        "peak_with_mapped_files_mb": memory_mb("VmHWM"),
    }


def main() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if sys.argv[1:2] == ["one"]:
        print(json.dumps(measure(Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))))
        return
    folder, tokenizer = Path(sys.argv[1]), sys.argv[2]
    results = [in_process("benchmarks.tokenising", "one", folder, tokenizer, size) for size in SIZES_MB]
    first, last = ([size[part]["peak_anonymous_mb"] for part in ("build", "lanes")] for size in results)
    ratios = {name: b / a for name, a, b in zip(("build", "lanes"), first, last, strict=True)}
    settings = {
        "books": folder.name,
        "sha256": files_digest(sorted(folder.glob("*.txt"))),
        "tokenizer": Path(tokenizer).name,
        "lanes": LANES,
        "segment_length": SEGMENT,
    }
    targets = {"peak_of_the_larger_over_the_smaller": "about 1: bounded memory"}
    write_results(
        Path(__file__).stem, settings, {"sizes": results, "peak_of_the_larger_over_the_smaller": ratios}, targets
    )


if __name__ == "__main__":
    main()
