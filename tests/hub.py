"""A small Hugging Face Hub on 127.0.0.1 that the real huggingface_hub client talks to.

Behind it are real git repositories and a store of LFS objects, all in one folder. It serves what pushing and loading
models needs: accounts and tokens, private repositories, uploads, commits, tags, revisions and downloads, with the
Hub's own errors. `python -m tests.hub FOLDER` serves until it is ended.
"""

import base64
import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import yaml


ATTRIBUTES = "".join(
    f"*.{suffix} filter=lfs diff=lfs merge=lfs -text\n"
    for suffix in ("bin", "h5", "msgpack", "npz", "onnx", "pickle", "pkl", "pt", "pth", "safetensors")
).encode()
LARGE = 10_000_000  # bytes; text up to here is kept in git
POINTER = re.compile(rb"version https://git-lfs\S+\noid sha256:([0-9a-f]{64})\nsize (\d+)\n")
LICENSES = {"apache-2.0", "bsd-3-clause", "cc-by-4.0", "cc-by-sa-4.0", "mit", "openrail", "other", "unknown"}
REPO_ID = r"[\w.-]+/[\w.-]+"


class HubError(Exception):
    """An answer that is not what was asked for; `code` is the Hub's own name of it."""

    def __init__(self, status: int, message: str, code: str = "", commit: str = "") -> None:
        self.status, self.message, self.code, self.commit = status, message, code, commit


class Repository:
    """A bare git repository; large files are pointers into the LFS store."""

    def __init__(self, path: Path, private: bool) -> None:
        self.path, self.private = path, private
        subprocess.run(["git", "init", "-q", "--bare", "-b", "main", str(path)], check=True)
        self.commit({".gitattributes": self.blob(ATTRIBUTES)}, [], "initial commit")

    def git(self, *arguments: str, text: bytes = b"", **environment: str) -> bytes:
        identity = {
            f"GIT_{who}_{what}": "hub@localhost" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")
        }
        command = ["git", f"--git-dir={self.path}", *arguments]
        done = subprocess.run(command, input=text, capture_output=True, env={**os.environ, **identity, **environment})
        if done.returncode:
            raise RuntimeError(done.stderr.decode())
        return done.stdout

    def blob(self, content: bytes) -> str:
        return self.git("hash-object", "-w", "--stdin", text=content).decode().strip()

    def find(self, revision: str) -> str:
        """The commit of a branch, a tag or a commit's name."""
        try:
            return self.git("rev-parse", "--verify", "-q", f"{revision}^{{commit}}").decode().strip()
        except RuntimeError:
            raise HubError(404, f"Invalid rev id: {revision}", "RevisionNotFound") from None

    def files(self, revision: str) -> dict[str, dict[str, Any]]:
        """What the Hub tells of each file: its size, its blob, and the LFS object behind a pointer."""
        found = {}
        for line in self.git("ls-tree", "-r", "-l", revision).decode().splitlines():
            (_, _, oid, size), path = line.split("\t")[0].split(), line.split("\t")[1]
            found[path] = {"type": "file", "oid": oid, "size": int(size), "path": path}
            pointer = POINTER.fullmatch(self.git("cat-file", "blob", oid)) if int(size) < 200 else None
            if pointer:
                target = {"oid": pointer[1].decode(), "size": int(pointer[2]), "pointerSize": int(size)}
                found[path] |= {"size": target["size"], "lfs": target}
        return found

    def refs(self, kind: str) -> list[dict[str, str]]:
        lines = self.git("for-each-ref", "--format=%(refname) %(objectname)", f"refs/{kind}").decode().splitlines()
        pairs = [line.split() for line in lines]
        return [{"name": ref.split("/", 2)[2], "ref": ref, "targetCommit": commit} for ref, commit in pairs]

    def commit(self, added: dict[str, str], deleted: list[str], message: str, branch: str = "main") -> str:
        """The new commit, whose files are all there or none."""
        parent = {ref["name"]: ref["targetCommit"] for ref in self.refs("heads")}.get(branch)
        index = {"GIT_INDEX_FILE": str(self.path / "index")}
        self.git("read-tree", *([parent] if parent else ["--empty"]), **index)
        lines = [f"100644 {oid}\t{path}" for path, oid in added.items()]
        lines += [f"0 {'0' * 40}\t{path}" for path in deleted]
        self.git("update-index", "--index-info", text="".join(f"{line}\n" for line in lines).encode(), **index)
        tree = self.git("write-tree", **index).decode().strip()
        parents = ["-p", parent] if parent else []
        new = self.git("commit-tree", tree, *parents, "-m", message).decode().strip()
        self.git("update-ref", f"refs/heads/{branch}", new)
        return new


class Hub:
    """The state of the Hub, and its answers by path.

    `users` has a name, a role ("write" or "read") and organisations for every token; `log` the requests so far.
    `broken` maps a pattern of "METHOD path" to a status: such requests fail, with 0 the connection is cut instead.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.repositories, self.lock = folder, {}, threading.RLock()
        self.users: dict[str, tuple[str, str, list[str]]] = {}
        self.log: list[str] = []
        self.broken: dict[str, int] = {}
        (folder / "lfs").mkdir(parents=True)
        self.url = ""
        self.routes: list[tuple[str, re.Pattern[str], Callable[..., Any]]] = [
            (method, re.compile(pattern.replace("ID", f"({REPO_ID})").replace("*", "([^/]+)")), answer)
            for method, pattern, answer in (
                ("GET", "/api/whoami-v2", self.whoami),
                ("POST", "/api/validate-yaml", self.validate_yaml),
                ("POST", "/api/repos/create", self.create),
                ("DELETE", "/api/repos/delete", self.delete),
                ("GET", "/api/models/ID", self.info),
                ("GET", "/api/models/ID/revision/*", self.info),
                ("GET", "/api/models/ID/tree/*", self.tree),
                ("GET", "/api/models/ID/tree/*/*", self.tree),
                ("GET", "/api/models/ID/refs", self.refs),
                ("GET", "/api/models/ID/commits/*", self.commits),
                ("GET", "/api/models/ID/discussions", self.discussions),
                ("POST", "/api/models/ID/paths-info/*", self.paths_info),
                ("POST", "/api/models/ID/preupload/*", self.preupload),
                ("POST", "/api/models/ID/commit/*", self.commit),
                ("POST", "/api/models/ID/tag/*", self.tag),
                ("POST", "/ID.git/info/lfs/objects/batch", self.lfs_batch),
                ("PUT", "/lfs/*", self.lfs_store),
                ("POST", "/lfs/verify/ID", self.lfs_verify),
            )
        ]

    def object(self, oid: str) -> Path:
        return self.folder / "lfs" / oid

    def repository(self, repo_id: str, who: str | None, write: bool = False) -> Repository:
        """The repository if the account may see it (or write to it)."""
        repository = self.repositories.get(repo_id)
        if repository is None or (repository.private and not self.may_write(repo_id, who)):
            # without a token nobody learns whether a private repository exists
            status = 401 if who is None else 404
            raise HubError(status, "Invalid username or password." if who is None else "Not found", "RepoNotFound")
        if write and who is None:
            raise HubError(401, "Invalid username or password.")
        if write and (not self.may_write(repo_id, who) or self.role(who) != "write"):
            raise HubError(403, f"Forbidden: you must use a write token to upload to {repo_id}")
        return repository

    def role(self, who: str | None) -> str | None:
        return next((role for name, role, _ in self.users.values() if name == who), None)

    def may_write(self, repo_id: str, who: str | None) -> bool:
        owner = repo_id.split("/")[0]
        return any(name == who and owner in (name, *groups) for name, _, groups in self.users.values())

    # accounts and repositories

    def whoami(self, who: str | None, body: Any) -> dict[str, Any]:
        for name, role, groups in self.users.values():
            if name == who:
                orgs = [{"type": "org", "name": group, "roleInOrg": "write"} for group in groups]
                return {"type": "user", "name": name, "orgs": orgs, "auth": {"accessToken": {"role": role}}}
        raise HubError(401, "Invalid username or password.")

    def create(self, who: str | None, body: Any) -> dict[str, Any]:
        if who is None:
            raise HubError(401, "Invalid username or password.")
        repo_id = f"{body['organization'] or who}/{body['name']}"
        if not self.may_write(repo_id, who) or self.role(who) != "write":
            raise HubError(403, f"You don't have the rights to create a model under the namespace {repo_id}")
        answer = {"url": f"{self.url}/{repo_id}", "name": repo_id, "id": repo_id}
        if repo_id in self.repositories:
            raise HubError(409, json.dumps({**answer, "error": "You already created this model repo"}))
        private = body.get("visibility") == "private" or bool(body.get("private"))
        self.repositories[repo_id] = Repository(self.folder / "git" / f"{repo_id}.git", private)
        return answer

    def delete(self, who: str | None, body: Any) -> dict[str, Any]:
        repo_id = f"{body['organization'] or who}/{body['name']}"
        repository = self.repository(repo_id, who, write=True)
        subprocess.run(["rm", "-r", str(repository.path)], check=True)
        del self.repositories[repo_id]
        return {}

    def info(self, who: str | None, body: Any, repo_id: str, revision: str = "main") -> dict[str, Any]:
        repository = self.repository(repo_id, who)
        commit = repository.find(revision)
        siblings = [{"rfilename": path} for path in repository.files(commit)]
        facts = {"id": repo_id, "modelId": repo_id, "sha": commit, "private": repository.private, "tags": []}
        return {**facts, "_id": "0" * 24, "siblings": siblings, "downloads": 0, "likes": 0}

    def tree(self, who: str | None, body: Any, repo_id: str, revision: str, folder: str = "") -> list[dict[str, Any]]:
        repository = self.repository(repo_id, who)
        commit = repository.find(revision)
        under = [
            file for path, file in repository.files(commit).items() if not folder or path.startswith(f"{folder}/")
        ]
        if folder and not under:
            raise HubError(404, f"{folder} does not exist on {revision}", "EntryNotFound", commit)
        return under

    def refs(self, who: str | None, body: Any, repo_id: str) -> dict[str, Any]:
        repository = self.repository(repo_id, who)
        return {"branches": repository.refs("heads"), "tags": repository.refs("tags"), "converts": []}

    def commits(self, who: str | None, body: Any, repo_id: str, revision: str) -> list[dict[str, Any]]:
        repository = self.repository(repo_id, who)
        dates = ["--date=format-local:%Y-%m-%dT%H:%M:%S.000Z", "--format=%H %cd %s"]
        lines = repository.git("log", *dates, repository.find(revision), TZ="UTC").decode().splitlines()
        split = [line.split(" ", 2) for line in lines]
        return [
            {"id": name, "date": date, "title": title, "message": "", "authors": []} for name, date, title in split
        ]

    def discussions(self, who: str | None, body: Any, repo_id: str) -> dict[str, Any]:
        self.repository(repo_id, who)
        return {"discussions": [], "count": 0, "start": 0}

    def paths_info(self, who: str | None, body: Any, repo_id: str, revision: str) -> list[dict[str, Any]]:
        repository = self.repository(repo_id, who)
        found = repository.files(repository.find(revision))
        return [found[path] for path in body["paths"] if path in found]

    def validate_yaml(self, who: str | None, body: Any) -> dict[str, Any]:
        """The Hub's rules for the head of a card, those of them that concern models."""
        match = re.match(r"\s*---\r?\n([\S\s]*?)\r?\n---[ \t]*(\r?\n|$)", body["content"])
        if match is None:
            warning = {"message": "empty or missing yaml metadata in repo card"}
            return {"errors": [], "warnings": [warning]}
        errors = card_errors(match[1])
        if errors:
            raise HubError(400, json.dumps({"errors": [{"message": text} for text in errors], "warnings": []}))
        return {"errors": [], "warnings": []}

    # uploads

    def preupload(self, who: str | None, body: Any, repo_id: str, revision: str) -> dict[str, Any]:
        repository = self.repository(repo_id, who, write=True)
        found = repository.files(repository.find(revision))
        rules = [line.split()[0][1:] for line in ATTRIBUTES.decode().splitlines()]
        files = []
        for file in body["files"]:
            path, sample = file["path"], base64.b64decode(file["sample"])
            large = path.endswith(tuple(rules)) or file["size"] > LARGE or b"\0" in sample
            known = found.get(path, {})
            oid = known.get("lfs", {}).get("oid") if large else known.get("oid")
            mode = "lfs" if large else "regular"
            files.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        return {"files": files}

    def lfs_batch(self, who: str | None, body: Any, repo_id: str) -> dict[str, Any]:
        self.repository(repo_id, who, write=True)
        objects = []
        for item in body["objects"]:
            answer = {"oid": item["oid"], "size": item["size"]}
            if not self.object(item["oid"]).exists():
                upload = {"href": f"{self.url}/lfs/{item['oid']}"}
                answer["actions"] = {"upload": upload, "verify": {"href": f"{self.url}/lfs/verify/{repo_id}"}}
            objects.append(answer)
        return {"transfer": "basic", "objects": objects}

    def lfs_store(self, who: str | None, body: bytes, oid: str) -> dict[str, Any]:
        if hashlib.sha256(body).hexdigest() != oid:
            raise HubError(400, f"The content is not that of {oid}")
        self.object(oid).write_bytes(body)
        return {}

    def lfs_verify(self, who: str | None, body: Any, repo_id: str) -> dict[str, Any]:
        self.repository(repo_id, who, write=True)
        stored = self.object(body["oid"])
        if not stored.exists() or stored.stat().st_size != body["size"]:
            raise HubError(404, f"{body['oid']} is not stored")
        return {}

    def commit(self, who: str | None, body: list[Any], repo_id: str, branch: str) -> dict[str, Any]:
        repository = self.repository(repo_id, who, write=True)
        head, added, deleted = repository.find(branch), {}, []
        header = body[0]["value"]
        if not head.startswith(header.get("parentCommit", "")):
            raise HubError(412, "A commit has happened since. Please refresh and try again.")
        found = repository.files(head)
        for line in body[1:]:
            value = line["value"]
            if line["key"] == "file":
                added[value["path"]] = repository.blob(base64.b64decode(value["content"]))
            elif line["key"] == "lfsFile":
                stored = self.object(value["oid"])
                if not stored.exists():
                    raise HubError(400, f"Object {value['oid']} of {value['path']} was never uploaded")
                pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{value['oid']}\n"
                added[value["path"]] = repository.blob(f"{pointer}size {stored.stat().st_size}\n".encode())
            elif line["key"] == "deletedFile":
                if value["path"] not in found:
                    raise HubError(404, "A file with this name doesn't exist", "EntryNotFound")
                deleted.append(value["path"])
        message = f"{header['summary']}\n\n{header.get('description', '')}"
        new = repository.commit(added, deleted, message, branch)
        return {"success": True, "commitOid": new, "commitUrl": f"{self.url}/{repo_id}/commit/{new}", "hookOutput": ""}

    def tag(self, who: str | None, body: Any, repo_id: str, revision: str) -> dict[str, Any]:
        repository = self.repository(repo_id, who, write=True)
        if any(ref["name"] == body["tag"] for ref in repository.refs("tags")):
            raise HubError(409, "Tag reference exists already")
        repository.git("update-ref", f"refs/tags/{body['tag']}", repository.find(revision))
        return {}

    # downloads

    def resolve(self, who: str | None, repo_id: str, revision: str, path: str) -> tuple[dict[str, str], bytes]:
        """The headers and the content of a file."""
        repository = self.repository(repo_id, who)
        commit = repository.find(revision)
        file = repository.files(commit).get(path)
        if file is None:
            raise HubError(404, "Entry not found", "EntryNotFound", commit)
        headers = {"X-Repo-Commit": commit, "ETag": f'"{file["oid"]}"', "Accept-Ranges": "bytes"}
        if "lfs" not in file:
            return headers, repository.git("cat-file", "blob", file["oid"])
        target = file["lfs"]
        headers |= {"X-Linked-Etag": f'"{target["oid"]}"', "X-Linked-Size": str(target["size"])}
        return headers, self.object(target["oid"]).read_bytes()


def card_errors(head: str) -> list[str]:
    """What is wrong with the metadata of a model's card."""
    try:
        data = yaml.safe_load(head) or {}
    except yaml.YAMLError as error:
        return [f"YAML: {error}"]
    if not isinstance(data, dict):
        return ["the metadata must be a mapping"]
    errors = []
    if "license" in data and data["license"] not in LICENSES:
        errors.append(f'"license" must be one of {sorted(LICENSES)}')
    for key in ("base_model", "datasets", "tags", "language"):
        values = data.get(key, [])
        values = values if isinstance(values, list) else [values]
        if not all(isinstance(value, str) and value for value in values):
            errors.append(f'"{key}" must be a string or a list of strings')
        elif key == "base_model" and not all(re.fullmatch(r"([\w.-]+/)?[\w.-]+", value) for value in values):
            errors.append('"base_model" must be the id of a model on the Hub')
        elif key == "datasets" and not all(re.fullmatch(r"([\w.-]+/)?[\w.-]+", value) for value in values):
            errors.append('"datasets" must be ids of data sets on the Hub')
        elif key == "language" and not all(re.fullmatch(r"[a-z]{2,3}|code|multilingual", value) for value in values):
            errors.append('"language" must be ISO 639 codes')
    for model in data.get("model-index", []):
        if not isinstance(model.get("name"), str) or not isinstance(model.get("results"), list):
            errors.append('"model-index" entries must have a name and results')
            continue
        for result in model["results"]:
            if not isinstance(result.get("task", {}).get("type"), str):
                errors.append('"model-index.results.task.type" is required')
            if not {"type", "name"} <= set(result.get("dataset", {})):
                errors.append('"model-index.results.dataset" must have a type and a name')
            for metric in result.get("metrics") or [{}]:
                if not isinstance(metric.get("type"), str) or "value" not in metric:
                    errors.append('"model-index.results.metrics" must have a type and a value')
    return errors


class Handler(BaseHTTPRequestHandler):
    """HTTP around a Hub."""

    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *arguments: Any) -> None:
        pass

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def answer(self) -> None:
        path, raw = unquote(urlsplit(self.path).path, encoding="utf-8"), self.body()
        with self.hub.lock:
            self.hub.log.append(f"{self.command} {path}")
            broken = next((s for rule, s in self.hub.broken.items() if re.match(rule, f"{self.command} {path}")), None)
            if broken == 0:
                self.close_connection = True
                self.connection.close()
                return
            try:
                if broken is not None:
                    raise HubError(broken, "Internal Error - We're working hard to fix this as soon as possible!")
                self.respond(path, raw, self.account())
            except HubError as error:
                text = error.message if error.message.startswith("{") else json.dumps({"error": error.message})
                headers = {"X-Error-Message": error.message.split("\n")[0], "X-Error-Code": error.code}
                headers |= {"X-Repo-Commit": error.commit}
                self.send(error.status, text.encode(), {name: value for name, value in headers.items() if value})

    def account(self) -> str | None:
        """The name behind the token; None without one."""
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if not token:
            return None
        if token not in self.hub.users:
            raise HubError(401, "Invalid credentials in Authorization header")
        return self.hub.users[token][0]

    def respond(self, path: str, raw: bytes, who: str | None) -> None:
        file = re.fullmatch(rf"/({REPO_ID})/resolve/([^/]+)/(.+)", path)
        if file and self.command in ("GET", "HEAD"):
            headers, content = self.hub.resolve(who, *file.groups())
            start = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
            if start:
                part = content[int(start[1]) :]
                headers["Content-Range"] = f"bytes {start[1]}-{len(content) - 1}/{len(content)}"
                return self.send(206, part, headers)
            return self.send(200, content, headers)
        for method, pattern, answer in self.hub.routes:
            # the branches and tags of a path are one part of it, whatever slashes they hold
            match = pattern.fullmatch(path) if method == self.command else None
            if match:
                kind = self.headers.get("Content-Type", "")
                body: Any = raw
                if "ndjson" in kind:
                    body = [json.loads(line) for line in raw.splitlines() if line]
                elif "json" in kind:
                    body = json.loads(raw or b"null")
                return self.send(200, json.dumps(answer(who, body, *match.groups())).encode())
        raise HubError(404, f"no such endpoint: {self.command} {path}")

    def send(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, value.encode("ascii", "replace").decode())
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = answer


@contextmanager
def serve(folder: Path) -> Iterator[Hub]:
    """A Hub that answers while the block runs."""
    hub = Hub(folder)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("BoundHandler", (Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


if __name__ == "__main__":
    with serve(Path(sys.argv[1])) as served:
        served.users["hf_write"] = ("user", "write", [])
        print(f"HF_ENDPOINT={served.url} HF_TOKEN=hf_write HF_HUB_DISABLE_XET=1", flush=True)
        threading.Event().wait()
