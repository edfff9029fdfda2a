"""`make compat`: a folder saved here loads, as remote code, under every supported transformers and gives the same.

Each version is installed into `.compat/VERSION`, without torch, and put in front of the packages of `.venv`.
"""

import itertools
import subprocess
import sys
import tempfile
from pathlib import Path

import transformers

from tests.common import ALL_MODELS
from tests.remote import compare, load_elsewhere, save_with_inputs


VERSIONS = ("4.57.6", "5.0.0", "5.10.4")


def installed(version: str) -> Path | None:
    """The folder with this version; None for the one that is installed anyway."""
    if version == transformers.__version__:
        return None
    folder = Path(__file__).parent.parent / ".compat" / version
    if not (folder / "transformers").is_dir():
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--target",
            str(folder),
            f"transformers=={version}",
        ]
        subprocess.run(command, check=True)
    return folder


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        for kind, version in itertools.product(ALL_MODELS, (*VERSIONS, transformers.__version__)):
            folder = Path(scratch) / kind / version
            expected = save_with_inputs(folder, kind)
            facts, found = load_elsewhere(folder, Path(scratch) / f"{version}.st", installed(version))
            assert facts["transformers"] == version, facts["transformers"]
            compare(found, expected)
            print(f"{kind}, transformers {version}: the same outputs, losses and gradients", flush=True)


if __name__ == "__main__":
    main()
