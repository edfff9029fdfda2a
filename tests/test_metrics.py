"""The record of a run: enough to run it again, and kept beside what was measured before."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import torch

import hf_recurrence
from hf_recurrence.data import TokenStore
from hf_recurrence.metrics import add_record, commit, files_digest, read_records, run_record


def test_a_record_says_what_ran_on_what_and_with_what(monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/hf-recurrence", "train", "a recipe.yaml"])
    record = run_record({"name": "books"}, {"folder": Path("out"), "overlap": 10}, {"loss": 1.5}, seeds=[1, 2])
    assert record["command"] == "hf-recurrence train 'a recipe.yaml'"
    assert record["versions"]["hf_recurrence"] == hf_recurrence.__version__
    assert record["versions"]["torch"] == torch.__version__
    assert (record["seeds"], record["data"], record["results"]) == ([1, 2], {"name": "books"}, {"loss": 1.5})
    assert record["settings"] == {"folder": "out", "overlap": 10}
    assert json.loads(json.dumps(record)) == record
    monkeypatch.setattr(sys, "argv", ["/somewhere/hf_recurrence/__main__.py", "train"])
    assert run_record({}, {}, {})["command"] == "python -m hf_recurrence train"


def test_the_commit_is_that_of_the_packages_own_checkout(tmp_path) -> None:
    """And of no checkout that the package merely lies in, such as that of a project with a virtual environment."""
    folder = Path(hf_recurrence.__file__).parent
    head = subprocess.run(["git", "-C", str(folder), "rev-parse", "HEAD"], capture_output=True, text=True)
    found = commit()
    assert found is None if head.returncode else found.removesuffix("-dirty") == head.stdout.strip()
    copy = tmp_path / "site" / "hf_recurrence"
    copy.mkdir(parents=True)
    for name in ("__init__.py", "metrics.py"):
        (copy / name).write_text((folder / name).read_text() if name == "metrics.py" else "__version__ = '0'")
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    program = "from hf_recurrence.metrics import commit; print(commit())"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path / "site", capture_output=True, text=True)
    assert done.stdout == "None\n", done.stderr


def test_records_are_kept_by_name(tmp_path) -> None:
    assert read_records(tmp_path) == {}
    for name, value in (("train", 1), ("evaluate", 2), ("train", 3)):
        path = add_record(tmp_path, name, run_record({}, {}, {"loss": value}))
    assert {name: record["results"]["loss"] for name, record in read_records(tmp_path).items()} == {
        "train": 3,
        "evaluate": 2,
    }
    assert [file.name for file in tmp_path.iterdir()] == [path.name] == ["metrics.json"]


def test_digests_are_of_the_content(tmp_path) -> None:
    (tmp_path / "a").write_bytes(b"one")
    (tmp_path / "b").write_bytes(b"two")
    assert files_digest([tmp_path / "a", tmp_path / "b"]) == hashlib.sha256(b"onetwo").hexdigest()
    stores = [TokenStore.build(tmp_path / str(n), texts) for n, texts in enumerate((["x", "y"], ["x", "y"], ["xy"]))]
    assert stores[0].digest == stores[1].digest != stores[2].digest
