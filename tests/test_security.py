"""The files that travel with checkpoints do nothing but define models."""

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hf_recurrence.publishing.files import CONFIGS, shipped_files


ALLOWED = {
    *("torch", "transformers", "safetensors"),
    *(
        "collections",
        "dataclasses",
        "functools",
        "itertools",
        "json",
        "math",
        "os",
        "pathlib",
        "re",
        "types",
        "typing",
    ),
    "weakref",
}
OPTIONAL = {"triton"}  # inside try: a kernel for CUDA
FORBIDDEN = {"__import__", "breakpoint", "compile", "eval", "exec", "globals", "input", "open"}
SHIPPED = {name: path for model_type in CONFIGS for name, path in shipped_files(model_type).items()}

# What python tells of while the files are imported; torch, transformers and their models are imported before.
IMPORTS = """
import importlib, os, sys
import torch, transformers, safetensors.torch
from transformers import AutoModel, BertForMaskedLM, GPT2LMHeadModel, RobertaModel, GenerationMixin
from transformers.activations import ACT2FN
import transformers.cache_utils, transformers.modeling_layers, transformers.models.bert.modeling_bert
import transformers.models.gpt2.modeling_gpt2, transformers.models.roberta.modeling_roberta
seen = []

def note(event, arguments):
    if event == "open":
        path, mode, flags = arguments
        written = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if written or not str(path).endswith((".py", ".pyc", ".so")):
            seen.append((event, str(path)))
    elif event.split(".")[0] in ("socket", "subprocess", "urllib", "http", "ftplib", "smtplib", "shutil", "pty"):
        seen.append((event, str(arguments)))
    elif event in ("os.system", "os.exec", "os.fork", "os.posix_spawn", "os.remove", "os.rename", "os.mkdir"):
        seen.append((event, str(arguments)))

sys.addaudithook(note)
for name in sys.argv[2:]:
    importlib.import_module(f"shipped.{name}")
found = list(seen)
open(os.devnull).close()  # and that would have been seen
print(len(sys.argv[2:]), found, len(seen) - len(found))
"""


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_file_imports_and_calls_only_what_is_allowed(name: str) -> None:
    tree = ast.parse(SHIPPED[name].read_text())
    tried = {child for node in ast.walk(tree) if isinstance(node, ast.Try) for child in ast.walk(node)}
    for node in ast.walk(tree):
        modules = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            modules = [node.module]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 1
            assert f"{node.module}.py" in SHIPPED
        roots = {module.split(".")[0] for module in modules}
        assert roots <= ALLOWED | (OPTIONAL if node in tried or name == "scan_triton.py" else set()), roots
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in FORBIDDEN, node.func.id
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("os", "torch"):
            assert node.attr not in ("system", "popen", "exec", "fork", "remove", "load", "hub"), node.attr


def test_to_import_the_shipped_files_opens_no_file_no_socket_and_no_process(tmp_path: Path) -> None:
    (tmp_path / "shipped").mkdir()
    (tmp_path / "shipped" / "__init__.py").write_text("")
    for name, path in SHIPPED.items():
        shutil.copy(path, tmp_path / "shipped" / name)
    names = [name.removesuffix(".py") for name in SHIPPED if name != "scan_triton.py"]
    environment = {
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": str(tmp_path),
        "PATH": "/usr/bin:/bin",
        "HOME": str(tmp_path),
    }
    command = [sys.executable, "-c", IMPORTS, str(tmp_path), *names]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == f"{len(names)} [] 1"
