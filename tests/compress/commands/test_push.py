"""Bundles that go out: what goes and what stays, the card, and that the other side gets all of it back or nothing."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from built_bundles import LOCK, RECIPE, reseal, write_key
from hub_double import TOKEN, Hub, Repository
from local_servers import Answer, Call, serve
from places import ROOT
from registry_double import CREDENTIALS, Registry, digest_of
from tiny_bundles import KINDS, make_bundle, predict
from typer.testing import CliRunner, Result

from compress.api.result import Result as JobResult
from compress.cli import app
from compress.commands.compile import compile_bundle
from compress.commands.find_keys import find_keys
from compress.commands.push import push_bundle
from compress.commands.sign import sign_bundle
from compress.errors import PushError
from compress.models.source import locate
from compress.recipe import network
from compress.recipe.schema import Recipe
from compress.specs import ModelSpec
from compress.tasks import TORCH_TASKS
from runtime import open_bundle
from runtime.__main__ import main
from runtime.bundle.engine import EngineOrder
from runtime.bundle.format import CAME_WITHOUT, find_left_out
from runtime.errors import BundleError, UsageError
from runtime.report.stored import read_stored_report
from runtime.report.validate import validate
from runtime.tasks.manifest import read_manifest, verify, write_bundle

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # the hub's library, of itself
BASE = {**LOCK["model"], "source": "hf:owner/base"}
SETS = {**LOCK["data"], "evaluation": {**LOCK["data"]["evaluation"], "source": "hf:owner/set:part"}}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Judged bundles as a recipe leaves them, one of each kind. Not to be written to."""
    root = tmp_path_factory.mktemp("made")
    for kind in KINDS:
        bundle = make_bundle(kind, root / kind)
        (bundle / "recipe.yaml").write_text(RECIPE.replace("'dir:${base}'", "'hf:owner/base'"))
        (bundle / "lock.json").write_text(json.dumps({**LOCK, "model": BASE, "data": SETS}))
        store_as(bundle, "int8")
        (bundle / "report.json").unlink()
        validate(bundle)
        (bundle / "host.json").write_text('{"folders": {"base": "/home/ada"}}')
        (bundle / "compress.log").write_text("on this machine\n")
    return root


def store_as(bundle: Path, precision: str) -> None:
    """Make the manifest fit the files, and say what its models' weights are stored in."""
    manifest = read_manifest(bundle)
    artifacts = tuple(replace(artifact, precision=precision) for artifact in manifest.artifacts)
    write_bundle(bundle, replace(manifest, artifacts=artifacts, files={}, digest=""))


@pytest.fixture
def bundle(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made / "image", tmp_path / "bundle"))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A hub that this process's own huggingface_hub talks to."""
    from huggingface_hub import constants

    double = Hub()
    with serve(double.answer) as place:
        double.address = f"http://{place}"
        monkeypatch.setattr(constants, "ENDPOINT", double.address)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", double.address + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(network, "SET_HERE", set())
        for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield double


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Registry]:
    """A registry whose name and password `docker login` kept."""
    double = Registry()
    with serve(double.answer) as place:
        double.address = place
        (tmp_path / "docker").mkdir()
        (tmp_path / "docker/config.json").write_text(json.dumps({"auths": {place: {"auth": CREDENTIALS}}}))
        monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
        yield double


def push(*words: Any) -> Result:
    return CliRunner().invoke(app, ["push", *map(str, words)])


def pull(hub: Hub, name: str, folder: Path, to: Path | None = None) -> Path:
    """Fetch a repository as its users do, with the library's own command; return the bundle's folder."""
    to = to or folder / "pulled"
    away = {"HF_ENDPOINT": hub.address, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(folder / "home")}
    words = [Path(sys.executable).with_name("hf"), "download", name, "--local-dir", to]
    done = subprocess.run(list(map(str, words)), env={**os.environ, **away}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return to / "bundle"


def read_header(card: bytes) -> dict[str, Any]:
    header: dict[str, Any] = yaml.safe_load(card.decode().split("---\n")[1])
    return header


# there and back


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_bundle_comes_back_from_the_hub_and_runs(kind: str, made: Path, hub: Hub, tmp_path: Path) -> None:
    done = push(made / kind, "hf://me/tiny")
    assert done.exit_code == 0, done.stderr
    files, manifest = hub.repositories["me/tiny"].files, read_manifest(made / kind)
    assert hub.repositories["me/tiny"].private and len(hub.repositories["me/tiny"].commits) == 2
    stays = {name for name in manifest.files if name.startswith("evaluation/")}
    assert {name for name in files if "/" in name} == {
        f"bundle/{n}" for n in {*manifest.files, "manifest.json"} - stays
    }
    assert f"evaluation data stayed here ({len(stays)} files; their digests went)" in done.stdout
    assert "hf download me/tiny --local-dir tiny" in done.stdout and "compress-run verify tiny/bundle" in done.stdout
    pulled = pull(hub, "me/tiny", tmp_path)
    assert verify(pulled) == manifest and find_left_out(pulled, manifest) == tuple(sorted(stays))
    with open_bundle(pulled) as there, open_bundle(made / kind) as here:
        if manifest.generates:
            assert there.generate("Once", max_new_tokens=2).text == here.generate("Once", max_new_tokens=2).text
        else:
            given: Any = ["a dog"] if kind == "text" else np.zeros((1, 4, 4, 3), np.uint8)
            ours, theirs = there.predict(given), here.predict(given)
            assert all(np.array_equal(ours[name], theirs[name]) for name in theirs)
    shutil.copytree(made / kind / "evaluation", pulled / "evaluation")
    predict(pulled)
    assert validate(pulled, report_folder=tmp_path / "report").verdict in ("pass", "unjudged")


def test_a_bundle_comes_back_from_a_registry(bundle: Path, registry: Registry, tmp_path: Path) -> None:
    to = f"oci://{registry.address}/team/tiny:v1"
    done = push(bundle, to)
    assert done.exit_code == 0, done.stderr
    digest = digest_of(registry.manifests["v1"])
    assert f"oras pull {registry.address}/team/tiny@{digest} --output tiny" in done.stdout
    assert "note: who may read it is set in the registry" in done.stdout
    manifest = registry.pull("v1", tmp_path / "pulled")
    assert verify(tmp_path / "pulled") == read_manifest(bundle)
    assert main(["predict", str(tmp_path / "pulled"), str(write_image(tmp_path))]) == 0
    assert manifest["annotations"]["org.opencontainers.image.description"].startswith(
        "image-classification, compressed"
    )
    last = [call.path for call in registry.calls if call.method == "PUT"]
    assert last[-1].endswith("/manifests/v1") and not any("manifests" in path for path in last[:-1])
    assert sum(call.path == "/token" for call in registry.calls) > 1  # tokens that ran out were bought again
    sent = len(registry.calls)
    assert push_bundle(bundle, to).version == digest  # the same bundle, the same digest, nothing sent twice
    assert not [call for call in registry.calls[sent:] if call.method == "PUT" and "/blobs/" in call.path]
    pushed = push_bundle(bundle, to, with_evaluation=True)
    assert not pushed.left_out and f"the tag was at {digest} before" in pushed.notes


@pytest.mark.slow
def test_the_lines_of_the_guide_work(
    bundle: Path, hub: Hub, registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the guide's order, with a signed bundle; `oras` is played by the double."""
    for library in ("model_signing", "cyclonedx"):
        pytest.importorskip(library, reason=f"{library} is not installed: pip install '.[trust]'")
    write_key(tmp_path / "key.pem", password=b"open")
    monkeypatch.setenv("SIGNING_PASSWORD", "open")
    for name in ("quickstart-digits", "model"):
        shutil.copytree(bundle, tmp_path / "bundles" / name)
    sign_bundle(tmp_path / "bundles/quickstart-digits", tmp_path / "key.pem", "open")
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```\n(.*?)^```$", (ROOT / "docs/howto/push.md").read_text(), re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.splitlines() if re.match("(compress(-run)?|hf|oras) ", line)]
    for line in lines:
        words = shlex.split(line.replace("registry.example.com", registry.address))
        if words[0] == "hf":
            pull(hub, words[2], tmp_path / "there", Path.cwd() / words[4])
        elif words[0] == "oras":
            shutil.rmtree(words[4])
            registry.pull(words[2].rpartition(":")[2], Path(words[4]))
        elif words[0] == "compress-run":
            write_image(tmp_path)
            assert main(words[1:]) == 0, line
        elif words[1] != "apply":
            done = CliRunner().invoke(app, words[1:])
            assert done.exit_code == 0, (line, done.stderr)
    assert len(lines) == 12


def write_image(folder: Path) -> Path:
    from PIL import Image

    Image.fromarray(np.zeros((4, 4, 3), np.uint8)).save(folder / "image.png")
    return folder / "image.png"


def test_what_came_without_its_evaluation_data_says_so(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(bundle / "evaluation")
    assert main(["verify", str(bundle)]) == 0 and CAME_WITHOUT in capsys.readouterr().out
    assert main(["verify", str(bundle), "--json"]) == 0
    left_out = ["evaluation/baseline_outputs.npz", "evaluation/samples.npz"]
    assert json.loads(capsys.readouterr().out)["left_out"] == left_out
    done = CliRunner().invoke(app, ["verify", str(bundle), "--json"])
    assert json.loads(done.stdout)["left_out"] == left_out
    assert CAME_WITHOUT in CliRunner().invoke(app, ["inspect", str(bundle)]).stdout
    for command in ("validate", "bench", "why"):
        assert main([command, str(bundle)]) == 2
        assert "ask who published it for the folder evaluation/ (4 samples, whose digests" in capsys.readouterr().err
    with pytest.raises(UsageError, match="came without its evaluation data"):
        open_bundle(bundle).evaluate()
    (bundle / "evaluation").mkdir()
    (bundle / "evaluation/samples.npz").write_text("of another bundle")
    with pytest.raises(
        BundleError, match=r"evaluation/baseline_outputs\.npz: missing\n.*evaluation/samples\.npz: 17 bytes"
    ):
        verify(bundle)


def test_engines_are_not_compiled_where_nothing_can_judge_them(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order = EngineOrder("engine-tensorrt", "tensorrt", "candidate", ())
    manifest = replace(read_manifest(bundle), orders=(order,))
    monkeypatch.setattr("compress.commands.compile.verify", lambda path: manifest)
    monkeypatch.setattr("compress.commands.compile.why_not_here", lambda order: "")
    shutil.rmtree(bundle / "evaluation")
    with pytest.raises(UsageError, match="came without its evaluation data"):
        compile_bundle(bundle)


# the hub: the card, one commit, what is there


def test_the_card_says_what_hubs_read(bundle: Path, hub: Hub) -> None:
    push_bundle(bundle, "hf://me/tiny-int8", public=True, licence="apache-2.0")
    repository = hub.repositories["me/tiny-int8"]
    header, text = read_header(repository.files["README.md"]), repository.files["README.md"].decode()
    assert not repository.private
    assert header["pipeline_tag"] == "image-classification" and header["license"] == "apache-2.0"
    assert header["base_model"] == "owner/base" and header["base_model_relation"] == "quantized"
    assert header["datasets"] == ["owner/set"] and header["tags"] == ["compressed", "onnxruntime-cpu"]
    (model,) = header["model-index"]
    results = {entry["type"]: entry["value"] for result in model["results"] for entry in result["metrics"]}
    report = read_stored_report(bundle).report
    assert results["top1"] == pytest.approx(report.candidate.metrics["top1"])
    assert {result["dataset"]["type"] for result in model["results"]} == {"owner/set"}
    assert "| top1 |" in text and "compress-run predict tiny-int8/bundle image.png" in text
    assert "hf download me/tiny-int8 --local-dir tiny-int8" in text and "compress-run validate" not in text
    (bundle / "model.sig").write_text("a signature")
    (bundle / "report.json").unlink()
    store_as(bundle, "float32")  # as what was pruned is
    push_bundle(bundle, "hf://me/all", with_evaluation=True)
    files = hub.repositories["me/all"].files
    assert "bundle/model.sig" in files and "compress-run validate all/bundle" in files["README.md"].decode()
    assert read_header(files["README.md"])["base_model_relation"] == "finetune"


def test_hubs_have_a_word_for_most_tasks() -> None:
    tags = {name: task.hub_tag for name, task in TORCH_TASKS.items()}
    assert tags["semantic-segmentation"] == "image-segmentation" and tags["generic"] == tags["regression"] == ""
    assert tags["ctc-speech-recognition"] == "automatic-speech-recognition"
    assert tags["text-multi-label-classification"] == tags["text-regression"] == "text-classification"
    assert tags["text-generation"] == "text-generation"


def test_a_further_push_replaces_the_bundle_and_keeps_what_people_added(bundle: Path, hub: Hub) -> None:
    push_bundle(bundle, "hf://me/tiny", with_evaluation=True)
    repository = hub.repositories["me/tiny"]
    card = repository.files["README.md"].decode().replace("---\n", "---\nlanguage: de\n", 1)
    repository.commits.append({**repository.files, "README.md": card.encode(), "LICENSE": b"of people"})
    (bundle / "report.json").unlink()
    pushed = push_bundle(bundle, "hf://me/tiny")
    header = read_header(repository.files["README.md"])
    assert header["language"] == "de" and "model-index" not in header
    assert repository.files["LICENSE"] == b"of people" and len(repository.commits) == 4
    assert not [name for name in repository.files if name.startswith("bundle/evaluation")]
    assert pushed.version == repository.sha and any("it was never judged" in note for note in pushed.notes)


@pytest.mark.parametrize("refuse", [r"/lfs/", r"/commit/", r"/preupload/"])
def test_a_push_that_fails_leaves_what_was_there(bundle: Path, hub: Hub, refuse: str) -> None:
    push_bundle(bundle, "hf://me/tiny", with_evaluation=True)
    before, hub.refuse = dict(hub.repositories["me/tiny"].files), refuse
    hub.blobs.clear()
    done = push(bundle, "hf://me/tiny")
    assert done.exit_code == 1 and "a push is one commit: all of it is there, or what was there before" in done.stderr
    assert hub.repositories["me/tiny"].files == before and "Traceback" not in done.stderr


def test_two_that_push_at_once_do_not_mix(bundle: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    push_bundle(bundle, "hf://me/tiny")
    repository, choose = hub.repositories["me/tiny"], hub._choose_modes

    def overtake(name: str, there: Repository, call: Any) -> Any:
        there.commits.append(dict(there.files))
        return choose(name, there, call)

    monkeypatch.setattr(hub, "_choose_modes", overtake)
    with pytest.raises(PushError, match=r"hf://me/tiny: .*push again"):
        push_bundle(bundle, "hf://me/tiny", with_evaluation=True)
    assert not [name for name in repository.files if name.startswith("bundle/evaluation")]


def test_a_repository_of_something_else_stays(bundle: Path, hub: Hub) -> None:
    hub.repositories["me/other"] = Repository(True, [{"model.safetensors": b"", "README.md": b"mine"}])
    with pytest.raises(UsageError, match="holds something else than a bundle, which stays: push to another name"):
        push_bundle(bundle, "hf://me/other")
    for private, public, way in ((False, False, "say --public"), (True, True, "leave --public out")):
        hub.repositories["me/there"] = Repository(private)
        with pytest.raises(UsageError, match=rf"hf://me/there is \w+, and stays so: {way}"):
            push_bundle(bundle, "hf://me/there", public=public, licence="mit")
    assert not any("/commit/" in call.path for call in hub.calls)


def test_offline_and_without_a_token_nothing_is_sent(bundle: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UsageError, match="HF_HUB_OFFLINE=1 is set, so nothing is sent to the hub; unset it"):
        push_bundle(bundle, "hf://me/tiny")
    network.SET_HERE.add("HF_HUB_OFFLINE")  # as a recipe that needs no hub sets it, for itself
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    result = JobResult(read_stored_report(bundle).report, bundle, Recipe.model_construct())
    assert result.push_to_hub("me/tiny").to == "hf://me/tiny"
    assert constants.HF_HUB_OFFLINE
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(UsageError, match="log in with `hf auth login`, or set HF_TOKEN"):
        push_bundle(bundle, "hf://me/tiny")


def test_the_library_tells_nobody_what_is_installed(bundle: Path, hub: Hub) -> None:
    push_bundle(bundle, "hf://me/tiny")
    agents = {call.headers.get("user-agent", "") for call in hub.calls}
    assert agents and not any("torch" in agent for agent in agents)


# a registry


@pytest.mark.parametrize("refuse", ["POST .*/uploads/", "PUT .*/blobs/", "PUT .*/manifests/"])
def test_a_tag_names_a_whole_bundle_or_what_it_named(bundle: Path, registry: Registry, refuse: str) -> None:
    registry.refuse = refuse
    done = push(bundle, f"oci://{registry.address}/tiny:v1")
    assert done.exit_code == 1 and "403 Forbidden (the double refuses this)" in done.stderr
    assert "The tag names a whole bundle, or what it named before" in done.stderr and not registry.manifests


def test_a_registry_that_does_not_know_us_says_how_to_log_in(bundle: Path, registry: Registry, tmp_path: Path) -> None:
    (tmp_path / "docker/config.json").unlink()
    with pytest.raises(PushError, match=rf"log in with `docker login {registry.address}` or `oras login"):
        push_bundle(bundle, f"oci://{registry.address}/tiny:v1")


def test_what_lets_us_in_goes_to_the_registry_alone(bundle: Path, registry: Registry) -> None:
    calls: list[Call] = []

    def take(call: Call) -> Answer:
        calls.append(call)
        return registry.take_file(call)

    with serve(take) as registry.store:
        push_bundle(bundle, f"oci://{registry.address}/tiny:v1")
    assert len(calls) == len(registry.blobs) and not any("authorization" in call.headers for call in calls)


def test_a_helper_keeps_the_password(
    bundle: Path, registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    helper = tmp_path / "docker/docker-credential-double"
    helper.write_text('#!/bin/sh\nread host\necho \'{"Username": "ada", "Secret": "open"}\'\n')
    helper.chmod(0o755)
    monkeypatch.setenv("PATH", f"{helper.parent}{os.pathsep}{os.environ['PATH']}")
    (tmp_path / "docker/config.json").write_text('{"auths": {}, "credsStore": "double"}')
    assert push_bundle(bundle, f"oci://{registry.address}/tiny:v1").files


# what is looked through first


@pytest.mark.parametrize(
    ("to", "options", "rule"),
    [
        ("me/tiny", {}, "write hf://OWNER/NAME for a model hub or oci://HOST/NAME:TAG for a registry"),
        ("hf://tiny", {}, "write hf://OWNER/NAME"),
        ("oci://host/Name:v1", {}, "write hf://OWNER/NAME"),
        ("oci://host/name", {}, "oci://HOST/NAME:TAG"),
        ("oci://host/name:v1", {"public": True}, "is set in the registry; leave --public out"),
        ("hf://me/tiny", {"public": True}, r"a public model needs a licence, and that of hf:owner/base is not known"),
        ("hf://me/tiny", {"public": True, "licence": "cc-by-nc-nd-4.0"}, "forbids to pass on changed models"),
    ],
)
def test_what_is_refused_before_anything_is_sent(
    bundle: Path, hub: Hub, to: str, options: dict[str, Any], rule: str
) -> None:
    with pytest.raises(UsageError, match=rule):
        push_bundle(bundle, to, **options)
    assert not hub.calls


def test_a_licence_comes_from_the_card_of_the_model(bundle: Path, hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base/README.md").write_text("---\nlicense: mit\n---\n")
    (bundle / "host.json").write_text(json.dumps({"folders": {"base": str(tmp_path / "base")}}))
    (bundle / "lock.json").write_text(json.dumps(LOCK))
    (bundle / "report.json").unlink()
    reseal(bundle)
    assert push_bundle(bundle, "hf://me/tiny", public=True).licence == "mit"
    header = read_header(hub.repositories["me/tiny"].files["README.md"])
    assert header["license"] == "mit" and "base_model" not in header and "base_model_relation" not in header
    notes = push_bundle(bundle, "hf://me/tiny", public=True, licence="apache-2.0").notes
    assert "the licence of dir:${base} is mit, and the card says apache-2.0, as you do" in notes


def test_a_model_of_the_hub_brings_its_licence_along(bundle: Path, hub: Hub, tmp_path: Path) -> None:
    card = b"---\nlicense: cc-by-nd-4.0\n---\n"
    files = {"config.json": b"{}", "model.safetensors": b"\2\0\0\0\0\0\0\0{}", "README.md": card}
    hub.repositories["owner/base"] = Repository(False, [files])
    locate(ModelSpec(source="hf:owner/base", task="text-classification"), tmp_path)
    with pytest.raises(UsageError, match=r"cc-by-nd-4\.0 forbids to pass on changed models"):
        push_bundle(bundle, "hf://me/tiny", public=True)
    assert push_bundle(bundle, "hf://me/tiny").licence == "cc-by-nd-4.0"


def test_a_bundle_that_is_not_whole_stays(bundle: Path, hub: Hub) -> None:
    (bundle / "layers.json").write_text("[1]")
    with pytest.raises(BundleError, match="layers"):
        push_bundle(bundle, "hf://me/tiny")
    shutil.rmtree(bundle)
    assert not hub.calls


SECRETS: dict[str, Callable[[], str]] = {  # put together here, so that this file holds none
    "a token of Hugging Face": lambda: "hf_" + "a1B2" * 9,
    "a private key": lambda: "-----BEGIN EC " + "PRIVATE KEY-----",
    "a token of GitHub": lambda: "ghp_" + "a1B2" * 9,
    "an access key of AWS": lambda: "AKIA" + "A1B2" * 4,
    "a key of OpenAI or Anthropic": lambda: "sk-" + "a1B2" * 9,
    "a password in an address": lambda: "https://ada:" + "secret1@example.org/data.csv",
    "a password or token": lambda: "password: " + "correct-horse",
}


@pytest.mark.parametrize("kind", SECRETS)
def test_a_key_stays_here(kind: str, bundle: Path, hub: Hub) -> None:
    text = f"{RECIPE}# {SECRETS[kind]()}\n"
    (bundle / "recipe.yaml").write_text(text)
    (bundle / "report.json").unlink()
    reseal(bundle)
    done = push(bundle, "hf://me/tiny")
    assert (
        done.exit_code == 2
        and f"recipe.yaml:{text.count(chr(10))}: {kind}, as it seems: nothing was sent" in done.stderr
    )
    assert SECRETS[kind]()[-8:] not in done.stderr and not hub.calls


def test_words_that_look_like_keys_are_none(tmp_path: Path) -> None:
    texts = {
        "tokenizer_config.json": '{"pad_token": "<|endoftext|>", "secret": "of the vocabulary"}',
        "layers.json": '["mask-rcnn-resnet50-fpn-coco-instance-segmentation", "hf_hub_download", "xoxb-"]',
        "recipe.yaml": "vars: {token: '${TOKEN}'}\nmodel: {source: 'hf:a/b'} # password: ${X}\n",
        "lock.json": '{"url": "https://example.org:8080/a@b", "digest": "sk-1234"}',
        "empty.txt": "",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    assert list(find_keys({name: tmp_path / name for name in texts})) == []


def test_large_files_are_looked_at_where_people_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compress.commands.find_keys.MOST_BYTES", 1000)
    monkeypatch.setattr("compress.commands.find_keys.END_BYTES", 100)
    secret = SECRETS["an access key of AWS"]().encode()
    (tmp_path / "weights").write_bytes(b"\0" * 2000 + b" " + secret + b" ")
    (line,) = find_keys({"weights": tmp_path / "weights"})
    assert line == "weights:1: an access key of AWS"
