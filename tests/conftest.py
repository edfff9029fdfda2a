"""Settings of all tests: offline, two threads at most, the same random numbers for each test."""

import os


os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from collections.abc import Iterator

import huggingface_hub
import pytest
import torch
import transformers

from tests.hub import Hub, serve


torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Iterator[Hub]:
    """A local Hub that the client of this process is logged in to, as "ann" of the organisation "lab"."""
    with serve(tmp_path / "hub") as served:
        served.users = {
            "hf_ann": ("ann", "write", ["lab"]),
            "hf_bob": ("bob", "write", []),
            "hf_eve": ("eve", "read", []),
        }
        connect(monkeypatch, served.url, "hf_ann", tmp_path / "hf_home")
        yield served
        huggingface_hub.utils.close_session()


def connect(monkeypatch: pytest.MonkeyPatch, url: str, token: str, home: object) -> None:
    """Lets huggingface_hub and transformers of this process, which read their settings on import, talk to a Hub."""
    constants = huggingface_hub.constants
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", f"{home}/token")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", f"{home}/hub")
    monkeypatch.setattr(transformers.utils.hub, "_hf_api", None)
    monkeypatch.setattr(huggingface_hub.hf_api.api, "endpoint", url)
    monkeypatch.setenv("HF_TOKEN", token)
