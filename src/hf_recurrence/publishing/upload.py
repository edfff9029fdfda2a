# Copyright 2026 The hf_recurrence authors. Licensed under the Apache License, Version 2.0.
"""Brings a checked folder to the Hub: in one commit, the card at its end, or not at all."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError
from huggingface_hub.hf_api import RepoFile

from .card import is_sealed
from .files import CARD, kind_of


MESSAGE = "Publish with hf_recurrence"
ASK_CARD = (
    "was not written by hf_recurrence, or was edited since: pass --overwrite-card (card='overwrite') to replace it or "
    "--keep-card (card='keep') to leave it as it is"
)


class Remote:
    """A repository on the Hub as it is now, and what may be done to it.

    Making one changes nothing; it raises an `OSError` or a `ValueError` that says what is in the way.
    """

    def __init__(self, repo_id: str, private: bool, tag: str | None, token: str | None = None) -> None:
        self.api, self.private, self.tag = HfApi(token=token), private, tag
        if (token or get_token()) is None:
            raise PermissionError(
                "not logged in to the Hub: run `hf auth login`, or set HF_TOKEN to a token that may write"
            )
        with clear_errors(repo_id):
            account = self.api.whoami()
            self.user = str(account["name"])
            self.repo_id = repo_id if "/" in repo_id else f"{self.user}/{repo_id}"
            self.check_rights(account)
            try:
                info = self.api.model_info(self.repo_id)
            except RepositoryNotFoundError:
                info = None
            self.exists, self.head = info is not None, None if info is None else info.sha
            self.files = {} if info is None else tree(self.api, self.repo_id, self.head)
            refs = None if info is None else self.api.list_repo_refs(self.repo_id)
            self.tags = {} if refs is None else {ref.name: ref.target_commit for ref in refs.tags}
        if info is not None and bool(info.private) != private:
            kinds = ("private", "public") if info.private else ("public", "private")
            raise ValueError(f"`private` must fit the repository: {self.repo_id} is {kinds[0]}, not {kinds[1]}")

    def check_rights(self, account: dict[str, Any]) -> None:
        """Raises a `PermissionError` where the token or the account plainly cannot write."""
        role = account.get("auth", {}).get("accessToken", {}).get("role")
        if role == "read":
            raise PermissionError(f"the token of {self.user} may only read: log in with one that may write")
        owner = self.repo_id.split("/")[0]
        groups = {group["name"]: group.get("roleInOrg") for group in account.get("orgs", [])}
        if owner != self.user and (owner not in groups or groups[owner] == "read"):
            raise PermissionError(
                f"{self.user} may not write to {owner}: choose {self.user}/{self.repo_id.split('/')[1]}"
            )

    def read(self, name: str) -> bytes | None:
        """The content of a small file of the repository; None without it."""
        if name not in self.files:
            return None
        with clear_errors(self.repo_id):
            return Path(self.api.hf_hub_download(self.repo_id, name, revision=self.head)).read_bytes()

    def card_was_edited(self, text: bytes) -> bool:
        """Whether the card on the Hub is other than what was published last."""
        if is_sealed(text.decode("utf-8", "replace")):
            return False
        with clear_errors(self.repo_id):
            titles = {item.commit_id: item.title for item in self.api.list_repo_commits(self.repo_id)}
            last = next((commit for commit, title in titles.items() if title == MESSAGE), None)
            before = tree(self.api, self.repo_id, last).get(CARD) if last else None
        return before is None or before.blob_id != self.files[CARD].blob_id

    def check(self, model_type: str) -> None:
        """Raises a `ValueError` where the name is taken by something else, or the tag by another commit."""
        stored = self.read("config.json")
        found = json.loads(stored).get("model_type") if stored else None
        if stored and found != model_type:
            raise ValueError(f"`repo_id` is taken: {self.repo_id} holds a model of type {found!r}, not {model_type!r}")
        if self.tag in self.tags and self.tags[self.tag] != self.head:
            raise ValueError(
                f"`tag` is taken: {self.tag} of {self.repo_id} names commit {self.tags[self.tag][:9]} and is not moved"
            )

    def plan(self, folder: Path) -> tuple[list[str], list[str]]:
        """The files to add or replace, the card last, and files of an earlier checkpoint to delete."""
        local = {path.name: path for path in folder.iterdir()}
        added = sorted(
            (name for name, path in local.items() if not self.has(name, path)), key=lambda n: (n == CARD, n)
        )
        deleted = sorted(name for name in self.files if kind_of(name) and name not in local and name != CARD)
        return added, deleted

    def has(self, name: str, path: Path) -> bool:
        """Whether the repository holds this very file."""
        file = self.files.get(name)
        if file is None:
            return False
        if file.lfs is not None:
            return bool(file.lfs.sha256 == digest(path, hashlib.sha256()))
        return bool(file.blob_id == digest(path, hashlib.sha1(f"blob {path.stat().st_size}\0".encode())))


def tree(api: HfApi, repo_id: str, commit: str | None) -> dict[str, RepoFile]:
    """The files of a commit by path."""
    found = api.list_repo_tree(repo_id, recursive=True, revision=commit)
    return {file.path: file for file in found if isinstance(file, RepoFile)}


def digest(path: Path, state: Any) -> str:
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            state.update(block)
    return str(state.hexdigest())


def upload(folder: Path, remote: Remote, card: str = "ask") -> dict[str, Any]:
    """What was done to make the repository hold the files of the folder: its commit, files added and deleted, the tag.

    One commit holds everything. Where it fails, a repository that did not exist before does not exist after.
    """
    theirs = remote.read(CARD)
    if theirs is not None and theirs != (folder / CARD).read_bytes() and remote.card_was_edited(theirs):
        if card == "ask":
            raise ValueError(f"{CARD} of {remote.repo_id} {ASK_CARD}")
        if card == "keep":
            (folder / CARD).write_bytes(theirs)
    added, deleted = remote.plan(folder)
    if remote.tag in remote.tags and (added or deleted):
        raise ValueError(f"`tag` is taken: {remote.tag} of {remote.repo_id} names what is there now, and is not moved")
    commit, created = remote.head, False
    try:
        with clear_errors(remote.repo_id):
            if not remote.exists:
                remote.api.create_repo(remote.repo_id, private=remote.private)
                created = True
                commit = remote.api.model_info(remote.repo_id).sha
            if added or deleted:
                operations: list[Any] = [CommitOperationDelete(name) for name in deleted]
                operations += [CommitOperationAdd(name, str(folder / name)) for name in added]
                done = remote.api.create_commit(
                    remote.repo_id, operations, commit_message=MESSAGE, parent_commit=commit
                )
                commit = done.oid
    except BaseException:
        if created:  # by this call; where it cannot be deleted either, the next call goes on with it
            with suppress(Exception):
                remote.api.delete_repo(remote.repo_id, missing_ok=True)
        raise
    with clear_errors(remote.repo_id, f"commit {commit} was sent, unchecked,"):
        remote.files = tree(remote.api, remote.repo_id, commit)
    check_arrived(folder, remote)
    with clear_errors(remote.repo_id, f"commit {commit} but no tag was sent"):
        if remote.tag is not None and remote.tag not in remote.tags:
            remote.api.create_tag(remote.repo_id, tag=remote.tag, revision=commit)
    facts = {"repo_id": remote.repo_id, "url": f"{remote.api.endpoint}/{remote.repo_id}", "commit": commit}
    return {**facts, "uploaded": added, "deleted": deleted, "tag": remote.tag}


def check_arrived(folder: Path, remote: Remote) -> None:
    """Raises an `OSError` if the Hub now holds other bytes than the folder."""
    wrong = sorted(path.name for path in folder.iterdir() if not remote.has(path.name, path))
    if wrong:
        raise OSError(f"{remote.repo_id} does not hold what was sent: {', '.join(wrong)} differ; publish again")


@contextmanager
def clear_errors(repo_id: str, state: str = "nothing was published") -> Iterator[None]:
    """Errors of the client as one line that says what is in the way, and what has been done by then."""
    try:
        yield
    except (ValueError, PermissionError) as error:
        if isinstance(error, HfHubHTTPError):
            raise explained(error, f"{state} to {repo_id}") from error
        raise
    except Exception as error:
        raise explained(error, f"{state} to {repo_id}") from error


def explained(error: BaseException, state: str) -> Exception:
    """The error to show for one of the client's, or of what lies behind it."""
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__ or link.__context__
    for link in chain:
        if isinstance(link, HfHubHTTPError):
            status = link.response.status_code if link.response is not None else 0
            reasons = {
                401: "the Hub does not accept the token: run `hf auth login` again",
                403: "this account or its token may not write there",
                404: "it does not exist, or is private and this account may not see it",
                409: "the name is taken",
                412: "somebody else has committed to it meanwhile: publish again",
            }
            said = str(link.server_message or "").split("\n")[0]
            reason = reasons.get(
                status, f"the Hub answered {status}" + f" ({said})" * bool(said) + ": try again later"
            )
            kind = PermissionError if status in (401, 403) else OSError
            return kind(f"{state}: {reason}")
    for link in chain:
        if isinstance(link, OSError) or type(link).__module__.split(".")[0] in (
            "httpx",
            "httpx2",
            "requests",
            "httpcore",
        ):
            said = str(link).split("\n")[0]
            return ConnectionError(f"{state}: the Hub cannot be reached ({said})")
    return RuntimeError(f"{state}: {str(error).splitlines()[0] if str(error) else error!r}")


__all__ = ["ASK_CARD", "Remote", "upload"]
