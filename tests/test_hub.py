"""The local Hub answers the real client as the Hub does."""

import hashlib
import json
import subprocess
import urllib.request

import httpx2
import pytest
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, ModelCard, hf_hub_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    HfHubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)


WEIGHTS = bytes(range(256)) * 5


@pytest.fixture
def api(hub) -> HfApi:
    return HfApi()


def commit(api: HfApi, repo_id: str = "ann/model", **files: bytes | str) -> str:
    """The commit that holds these files; names have underscores for points."""
    additions = [CommitOperationAdd(name.replace("_", "."), content) for name, content in files.items()]
    return api.create_commit(repo_id, additions, commit_message="Add").oid


def test_what_is_pushed_comes_back_and_the_repository_is_one_of_git(api, hub, tmp_path) -> None:
    assert api.create_repo("model").repo_id == "ann/model"
    first = commit(api, config_json=b"{}\n", weights_safetensors=WEIGHTS)
    info = api.model_info("ann/model")
    assert (info.sha, info.private) == (first, False)
    tree = {file.path: file for file in api.list_repo_tree("ann/model")}
    assert set(tree) == {".gitattributes", "config.json", "weights.safetensors"}
    assert tree["weights.safetensors"].lfs.sha256 == hashlib.sha256(WEIGHTS).hexdigest()
    assert tree["config.json"].lfs is None
    for name, content in (("config.json", b"{}\n"), ("weights.safetensors", WEIGHTS)):
        with open(hf_hub_download("ann/model", name), "rb") as file:
            assert file.read() == content
    git = ["git", "clone", "-q", str(hub.repositories["ann/model"].path), str(tmp_path / "clone")]
    subprocess.run(git, check=True, env={"GIT_LFS_SKIP_SMUDGE": "1", "PATH": "/usr/bin:/bin"})
    assert (tmp_path / "clone" / "config.json").read_text() == "{}\n"
    assert hashlib.sha256(WEIGHTS).hexdigest() in (tmp_path / "clone" / "weights.safetensors").read_text()


def test_the_same_again_makes_no_commit_and_uploads_nothing(api, hub) -> None:
    api.create_repo("model")
    first = commit(api, config_json=b"{}", weights_safetensors=WEIGHTS)
    hub.log.clear()
    assert commit(api, config_json=b"{}", weights_safetensors=WEIGHTS) == first
    assert not [line for line in hub.log if line.startswith("PUT") or "/commit/" in line]


def test_revisions_and_tags_keep_what_they_name(api) -> None:
    api.create_repo("model")
    first = commit(api, config_json=b"1")
    api.create_tag("ann/model", tag="v1")
    second = api.create_commit(
        "ann/model", [CommitOperationDelete("config.json"), CommitOperationAdd("b", b"2")], commit_message="Two"
    ).oid
    assert [item.commit_id for item in api.list_repo_commits("ann/model")][:2] == [second, first]
    assert {ref.name: ref.target_commit for ref in api.list_repo_refs("ann/model").tags} == {"v1": first}
    for revision in ("v1", first):
        with open(hf_hub_download("ann/model", "config.json", revision=revision)) as file:
            assert file.read() == "1"
    with pytest.raises(EntryNotFoundError):
        hf_hub_download("ann/model", "config.json", revision=second)
    with pytest.raises(RevisionNotFoundError):
        hf_hub_download("ann/model", "b", revision="v2")
    with pytest.raises(HfHubHTTPError, match="409"):
        api.create_tag("ann/model", tag="v1")
    with pytest.raises(HfHubHTTPError, match="412"):
        api.create_commit("ann/model", [CommitOperationAdd("c", b"3")], commit_message="Late", parent_commit=first)


def test_rights_are_those_of_the_token(api, hub) -> None:
    api.create_repo("lab/secret", private=True)
    commit(api, "lab/secret", config_json=b"{}")
    assert HfApi(token="hf_ann").whoami()["orgs"][0]["name"] == "lab"
    for token in (False, "hf_bob"):
        with pytest.raises(RepositoryNotFoundError):
            HfApi(token=token).model_info("lab/secret")
    with pytest.raises(HfHubHTTPError, match="401"):
        HfApi(token="hf_nobody").model_info("lab/secret")
    api.create_repo("open")
    with pytest.raises(HfHubHTTPError, match="403"):
        HfApi(token="hf_bob").create_repo("ann/other")
    with pytest.raises(HfHubHTTPError, match="403"):
        HfApi(token="hf_eve").create_repo("other")
    with pytest.raises(HfHubHTTPError, match="403"):
        commit(HfApi(token="hf_bob"), "ann/open", config_json=b"{}")
    with pytest.raises(HfHubHTTPError, match="409"):
        api.create_repo("open")
    api.delete_repo("open")
    assert not api.repo_exists("ann/open")


def test_a_broken_upload_leaves_nothing_behind(api, hub) -> None:
    api.create_repo("model")
    before = api.model_info("ann/model").sha
    hub.broken = {"POST .*/commit/": 500}
    with pytest.raises(HfHubHTTPError, match="500"):
        commit(api, config_json=b"{}", weights_safetensors=WEIGHTS)
    hub.broken = {"POST .*/commit/": 0}
    with pytest.raises(httpx2.TransportError):
        commit(api, config_json=b"{}", weights_safetensors=WEIGHTS)
    hub.broken = {}
    assert api.model_info("ann/model").sha == before
    wrong = urllib.request.Request(f"{hub.url}/lfs/{'0' * 64}", data=b"x", method="PUT")
    with pytest.raises(urllib.error.HTTPError, match="400"):
        urllib.request.urlopen(wrong)


def test_a_cards_head_is_checked(api) -> None:
    good = "---\nlicense: mit\nbase_model: gpt2\n---\n# Good\n"
    ModelCard(good).validate()
    wrong = {
        "license: none-such": "license",
        "base_model: /home/me/gpt2": "base_model",
        "language: English": "language",
        "model-index: [{name: a, results: [{task: {}}]}]": "task.type",
    }
    for head, complaint in wrong.items():
        with pytest.raises(ValueError, match=complaint):
            api._validate_yaml(f"---\n{head}\n---\n")
    api.create_repo("model")
    with pytest.raises(ValueError, match="Invalid metadata"):
        commit(api, README_md=b"---\nlicense: none-such\n---\n")
    assert json.dumps([file.path for file in api.list_repo_tree("ann/model")]) == '[".gitattributes"]'
