"""A saved folder carries its code: it loads where the package is not installed."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

import hf_recurrence
from tests.common import ALL_MODELS, MODELS, tiny_config
from tests.remote import compare, load_elsewhere, save_with_inputs


PACKAGE = Path(hf_recurrence.__file__).parent
SHARED = ["cache_recurrent.py", "losses.py", "recurrence.py", "segment.py", "windowing.py"]
SHIPPED = {kind: [*SHARED, f"configuration_{kind}.py", f"modeling_{kind}.py"] for kind in ALL_MODELS}
SHIPPED["block_recurrent"] += ["attention.py"]
SHIPPED["recurrent_gpt2"] += ["configuration_recurrence.py"]
SHIPPED["recurrent_roberta"] += ["answering.py", "configuration_recurrence.py"]
SHIPPED["sru_bert"] = ["configuration_sru_bert.py", "losses.py", "modeling_sru_bert.py", "scan.py", "scan_loops.py"]
SHIPPED["sru_bert"] += ["scan_triton.py"]
HEADS = {kind: {"CausalLM"} for kind in MODELS} | {"recurrent_roberta": {"QuestionAnswering"}}
HEADS["sru_bert"] = {"MaskedLM", "QuestionAnswering", "SequenceClassification", "TokenClassification"}


@pytest.mark.parametrize("kind", ALL_MODELS)
def test_a_folder_loads_as_remote_code_and_gives_the_same(kind: str, tmp_path) -> None:
    folder = tmp_path / "model"
    expected = save_with_inputs(folder, kind)
    others = ["config.json", "inputs.st", "model.safetensors"] + ["generation_config.json"] * (kind in MODELS)
    assert sorted(file.name for file in folder.iterdir()) == sorted([*SHIPPED[kind], *others])
    facts, found = load_elsewhere(folder, tmp_path / "out.safetensors")
    compare(found, expected)
    autos = {"AutoConfig", "AutoModel", *(f"AutoModelFor{head}" for head in HEADS[kind])}
    assert set(facts["config"]["auto_map"]) == autos


def test_a_base_model_or_a_config_alone_carry_all_of_the_code(tmp_path) -> None:
    hf_recurrence.RecurrentGPT2Model(tiny_config()).save_pretrained(tmp_path / "base")
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    assert set(config["auto_map"]) == {"AutoConfig", "AutoModel", "AutoModelForCausalLM"}
    assert {file.name for file in (tmp_path / "base").glob("*.py")} == set(SHIPPED["recurrent_gpt2"])


def test_shipped_files_are_the_packages_own_and_import_only_what_travels() -> None:
    allowed = {"torch", "transformers", "safetensors", *sys.stdlib_module_names}
    names = {name for files in SHIPPED.values() for name in files}
    for name in names:
        tree = ast.parse((PACKAGE / name).read_text())
        tried = {child for node in ast.walk(tree) if isinstance(node, ast.Try) for child in ast.walk(node)}
        for node in ast.walk(tree):
            if node in tried and not getattr(node, "level", 0):
                continue  # what may be missing
            if isinstance(node, ast.Import):
                assert {alias.name.split(".")[0] for alias in node.names} <= allowed, name
            elif isinstance(node, ast.ImportFrom) and node.level:
                assert node.level == 1, name
                assert f"{node.module}.py" in names, f"{name} imports {node.module}"
            elif isinstance(node, ast.ImportFrom):
                assert node.module.split(".")[0] in allowed, name


def test_once_the_package_is_imported_its_classes_answer(tmp_path) -> None:
    save_with_inputs(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True)
    assert type(model) is hf_recurrence.RecurrentGPT2LMHeadModel


def test_the_import_is_silent_offline_and_takes_no_time_of_its_own() -> None:
    program = (
        "import socket, time\n"
        "def refuse(*args, **kwargs): raise OSError('no network')\n"
        "socket.socket.connect = refuse\n"
        "import torch, transformers\n"
        "from transformers import AutoModel, AutoModelForCausalLM, GPT2LMHeadModel\n"
        "start = time.perf_counter()\n"
        "import hf_recurrence\n"
        "taken = time.perf_counter() - start\n"
        "assert taken < 2, taken\n"  # a small part of that alone on a core; a loaded machine gets room
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
