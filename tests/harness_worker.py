"""Runs lm-evaluation-harness on a saved folder as remote code, in a process that cannot import the package.

`python harness_worker.py FOLDER TASKS MAX_LENGTH` prints the metrics of the tasks in the folder TASKS as JSON; a
length of 0 leaves it to the harness.
"""

import json
import sys


sys.modules["hf_recurrence"] = None  # an import of it fails from here on

import lm_eval
from lm_eval.tasks import TaskManager


def main(folder: str, tasks: str, max_length: int) -> None:
    settings = {"pretrained": folder, "trust_remote_code": True, "dtype": "float32"}
    if max_length:
        settings["max_length"] = max_length
    found = lm_eval.simple_evaluate(
        model="hf",
        model_args=settings,
        tasks=["rolling", "choice"],
        task_manager=TaskManager(include_path=tasks, include_defaults=False),
        device="cpu",
        batch_size=2,
        bootstrap_iters=0,
    )
    print(json.dumps(found["results"], default=str))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
