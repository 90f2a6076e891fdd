"""``heads-train push`` against a stand-in of the hub that speaks its protocol."""

import base64
import json
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub
import pytest
import torch
from tiny_books import EAGLE3, short_run

import decoder
from heads_train.cli import main

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="module")
def trained(model, books, tmp_path_factory):
    """Heads of a short run."""
    folder = tmp_path_factory.mktemp("trained")
    assert main(["fit", *short_run(model, books, folder)]) == 0
    return folder / "out" / "last"


class Hub(ThreadingHTTPServer):
    """Takes repositories and commits of files of any size, for one token."""

    def __init__(self, root: Path):
        super().__init__(("127.0.0.1", 0), Request)
        self.root, self.private = root, {}
        self.url = f"http://127.0.0.1:{self.server_port}"


class Request(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *args):
        pass

    def answer(self, status, content):
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self.answer(200, {"id": "me/heads", "sha": COMMIT, "siblings": []})

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/api/validate-yaml":
            self.answer(200, {"errors": [], "warnings": []})
        elif self.headers["Authorization"] != "Bearer hf_right":
            self.answer(401, {"error": "Invalid credentials"})
        elif self.path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization') or 'me'}/{asked['name']}"
            self.server.private[name] = bool(asked.get("private") or asked.get("visibility") == "private")
            self.answer(200, {"url": f"{self.server.url}/{name}"})
        elif self.path.endswith("/preupload/main"):
            files = [one["path"] for one in json.loads(body)["files"]]
            modes = [{"path": one, "uploadMode": "regular", "shouldIgnore": False} for one in files]
            self.answer(200, {"files": modes})
        elif self.path.endswith("/commit/main"):
            name = self.path.removeprefix("/api/models/").removesuffix("/commit/main")
            folder = self.server.root / name
            folder.mkdir(parents=True, exist_ok=True)
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    content = base64.b64decode(line["value"]["content"])
                    (folder / line["value"]["path"]).write_bytes(content)
            self.answer(200, {"commitUrl": f"{self.server.url}/{name}/commit/{COMMIT}", "commitOid": COMMIT})
        else:
            self.answer(404, {"error": self.path})


@pytest.fixture
def hub(tmp_path, monkeypatch):
    server = Hub(tmp_path / "hub")
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", server.url)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "127.0.0.1")
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("kind", ["chained", "eagle3"])
def test_what_was_sent_can_be_loaded_and_its_card_says_how(flags, tmp_path, capsys, hub, kind):
    assert main(["fit", *flags, *(EAGLE3 if kind == "eagle3" else [])]) == 0
    source = tmp_path / "out" / "last"
    (source / "notes.txt").write_text("mine")
    capsys.readouterr()
    arguments = ["--base-model", "org/model", str(source), "me/heads"]
    assert main(["push", "--dry-run", *arguments]) == 0
    shown = capsys.readouterr().out
    assert "nothing was sent to me/heads" in shown and "README.md" in shown and not hub.private

    assert main(["push", "--private", *arguments]) == 0
    out = capsys.readouterr().out
    assert COMMIT in out and f"{hub.url}/me/heads" in out
    assert hub.private == {"me/heads": True}
    sent = hub.root / "me" / "heads"
    weights = "model.safetensors" if kind == "eagle3" else "heads.safetensors"
    assert {file.name for file in sent.iterdir()} == {"README.md", "config.json", weights}
    found, given = decoder.load_heads(sent), decoder.load_heads(source)
    assert found.kind == kind
    pairs = zip(found.state_dict().values(), given.state_dict().values(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    config = json.loads((sent / "config.json").read_text())
    assert config["training"] == json.loads((source / "config.json").read_text())["training"]
    card = (sent / "README.md").read_text()
    assert card in shown
    assert card.startswith("---\nbase_model: org/model\n")
    assert 'decoder.load("org/model", heads="me/heads")' in card and "| head | before | after |" in card
    assert 'custom_generate(heads="me/heads")' in card
    assert ("vllm serve org/model --speculative-config" in card) == (kind == "eagle3")
    assert str(tmp_path) not in card.split("## How they were trained")[0]


@pytest.mark.parametrize(
    "change, told",
    [
        ({"repository": "heads"}, "give owner/name"),
        ({"repository": "me/too/deep"}, "give owner/name"),
        ({"base": None}, "name the hub's model with --base-model"),
        ({"token": "hf_wrong"}, "has a token that may write there"),
        ({"folder": "empty"}, "config.json"),
    ],
)
def test_what_cannot_be_sent_ends_in_a_sentence(trained, tmp_path, capsys, hub, monkeypatch, change, told):
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("HF_TOKEN", change.get("token", "hf_right"))
    base = [] if "base" in change else ["--base-model", "org/model"]
    folder = tmp_path / change["folder"] if "folder" in change else trained
    capsys.readouterr()
    assert main(["push", *base, str(folder), change.get("repository", "me/heads")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert told in line
    assert not hub.root.exists()


def test_a_hub_out_of_reach_ends_in_a_sentence(trained, capsys, hub, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    capsys.readouterr()
    assert main(["push", "--base-model", "org/model", str(trained), "me/heads"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "see that it can be reached" in line


def test_heads_of_others_have_a_card_without_a_history(trained, tmp_path, capsys):
    source = shutil.copytree(trained, tmp_path / "heads")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"training": {"by": "hand"}}))
    capsys.readouterr()
    assert main(["push", "--dry-run", "--base-model", "org/model", str(source), "me/heads"]) == 0
    shown = capsys.readouterr().out
    assert "me/heads" in shown and "How they were trained" not in shown
