"""Signed bundles: what a signature covers, what is refused, and that other readers of these formats agree."""

from __future__ import annotations

import base64
import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from built_bundles import LOCK, RECIPE, reseal, write_key
from tiny_bundles import make_bundle
from tiny_bundles import sign as seal_manifest
from typer.testing import CliRunner

from compress.cli import app
from compress.commands.bom import find_licence, write_bom
from compress.commands.compile import _copy_bundle
from compress.commands.sign import describe_build, read_password, sign_bundle
from compress.store.output import refuse_foreign
from runtime.__main__ import main
from runtime.bundle.format import UNSIGNED
from runtime.bundle.signature import check_signature
from runtime.errors import BundleError, MissingDependency, UsageError
from runtime.report.validate import validate
from runtime.tasks.manifest import verify

pytest.importorskip("model_signing", reason="model-signing is not installed: pip install '.[trust]'")
pytest.importorskip("cyclonedx", reason="cyclonedx-python-lib is not installed: pip install '.[trust]'")

from click.testing import CliRunner as ReferenceRunner
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from model_signing._cli import main as model_signing_cli


def certify(folder: Path, name: str, key: Any, issuer: tuple[Any, Any] | None) -> x509.Certificate:
    """Write folder/NAME.crt for `key`, issued by (certificate, key), or by itself where there is none."""
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    above, signer = (subject, key) if issuer is None else (issuer[0].subject, issuer[1])
    usage = {"key_cert_sign": issuer is None, "crl_sign": issuer is None, "digital_signature": issuer is not None}
    others = ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "encipher_only")
    certificate = (
        x509.CertificateBuilder(above, subject, key.public_key(), x509.random_serial_number())
        .not_valid_before(datetime.now(UTC) - timedelta(days=1))
        .not_valid_after(datetime.now(UTC) + timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
        .add_extension(x509.KeyUsage(**usage, **dict.fromkeys(others, False), decipher_only=False), critical=True)
        .sign(signer, hashes.SHA256())
    )
    (folder / f"{name}.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    return certificate


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with key.pem, key.pub, and those of somebody else: other.pem, other.pub."""
    folder = tmp_path_factory.mktemp("keys")
    write_key(folder / "key.pem")
    write_key(folder / "other.pem")
    return folder


@pytest.fixture(scope="module")
def unsigned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle that could have been built from a recipe. Not to be written to."""
    root = make_bundle("image", tmp_path_factory.mktemp("made") / "bundle")
    (root / "recipe.yaml").write_text(RECIPE)
    (root / "lock.json").write_text(json.dumps(LOCK))
    reseal(root)
    (root / "report.json").unlink()
    validate(root)
    return root


@pytest.fixture
def bundle(unsigned: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(unsigned, tmp_path / "bundle"))


@pytest.fixture
def signed(bundle: Path, keys: Path) -> Path:
    write_bom(bundle)
    sign_bundle(bundle, keys / "key.pem")
    return bundle


def accepted_by_reference(root: Path, public: Path) -> bool:
    """Return what the library's own command says, by exit code."""
    words = ["verify", "key", root, "--signature", root / "model.sig", "--public_key", public, "--no-ignore-git-paths"]
    done = ReferenceRunner().invoke(model_signing_cli, list(map(str, words)))
    assert done.exit_code in (0, 1), done.output
    return done.exit_code == 0


def accepted(root: Path, public: Path) -> bool:
    return main(["verify", str(root), "--require-signature", str(public)]) == 0


# what is signed


def test_a_signed_bundle_is_accepted_by_both_and_by_the_library_s_command(signed: Path, keys: Path) -> None:
    assert accepted(signed, keys / "key.pub")
    assert accepted_by_reference(signed, keys / "key.pub")
    done = CliRunner().invoke(app, ["verify", str(signed), "--require-signature", str(keys / "key.pub")])
    assert done.exit_code == 0 and done.stdout.endswith(f", signed with {keys / 'key.pub'}\n")


def test_the_library_s_installed_command_takes_it_without_a_list_of_ignored_paths(signed: Path, keys: Path) -> None:
    words = ["verify", "key", signed, "--signature", signed / "model.sig", "--public_key", keys / "key.pub"]
    done = subprocess.run([sys.executable, "-m", "model_signing", *map(str, words)], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == "Verification succeeded\n"


def test_a_signature_survives_judging_and_other_machines(signed: Path, keys: Path) -> None:
    code = main(["validate", str(signed), "--require-signature", str(keys / "key.pub"), "--short"])
    assert code == validate(signed).exit_code
    for name in set(UNSIGNED) - {"model.sig"}:
        (signed / name).write_text("written anew")
    (signed / "report.json.4711.tmp").write_text("left by a kill")
    assert accepted(signed, keys / "key.pub")
    (signed / "report.json.4711.tmp").unlink()
    assert accepted_by_reference(signed, keys / "key.pub")
    moved = Path(shutil.copytree(signed, signed.parent / "elsewhere" / "other-name"))
    (linked := signed.parent / "current").symlink_to(moved)
    assert accepted(moved, keys / "key.pub") and accepted(linked, keys / "key.pub")


def test_what_is_told_of_a_bundle_is_signed_and_not_hashed(signed: Path, keys: Path) -> None:
    payload = read_payload(json.loads((signed / "model.sig").read_text()))
    names = {resource["name"] for resource in payload["predicate"]["resources"]}
    manifest = verify(signed)
    assert names == {*manifest.files, "manifest.json", "bom.cdx.json", "provenance.json"}
    assert set(payload["predicate"]["serialization"]["ignore_paths"]) == set(UNSIGNED)
    assert {"report.json", "host.json", "compress.log", "model.sig"} <= set(UNSIGNED)
    (signed / "bom.cdx.json").unlink()
    verify(signed)
    assert not accepted(signed, keys / "key.pub")


def test_a_bundle_is_replaced_and_compiled_without_what_is_told_of_it(signed: Path, tmp_path: Path) -> None:
    refuse_foreign(signed, OSError)  # type: ignore[arg-type]
    _copy_bundle(signed, tmp_path / "staging")
    assert not {"model.sig", "bom.cdx.json", "provenance.json"} & {p.name for p in (tmp_path / "staging").iterdir()}


def test_a_signature_holds_with_evaluation_data_and_without(signed: Path, keys: Path, tmp_path: Path) -> None:
    shutil.copytree(signed / "evaluation", tmp_path / "evaluation")
    shutil.rmtree(signed / "evaluation")
    assert accepted(signed, keys / "key.pub") and not accepted_by_reference(signed, keys / "key.pub")
    sign_bundle(signed, keys / "other.pem")  # somebody signs what came without it
    shutil.copytree(tmp_path / "evaluation", signed / "evaluation")
    assert accepted(signed, keys / "other.pub") and accepted_by_reference(signed, keys / "other.pub")
    (signed / "evaluation/samples.npz").unlink()
    assert not accepted(signed, keys / "other.pub")


def test_digests_of_what_is_not_there_are_the_signed_ones(signed: Path, keys: Path) -> None:
    shutil.rmtree(signed / "evaluation")
    data = json.loads((signed / "manifest.json").read_text())
    data["files"]["evaluation/samples.npz"]["sha256"] = "0" * 64
    seal_manifest(signed, data)
    verify(signed)
    assert not accepted(signed, keys / "key.pub")


def test_signing_again_replaces_the_signature(signed: Path, keys: Path) -> None:
    sign_bundle(signed, keys / "other.pem")
    assert accepted(signed, keys / "other.pub") and not accepted(signed, keys / "key.pub")
    assert not [path for path in signed.iterdir() if path.name.startswith(".")]


# what is refused

Mutation = Callable[[Path, random.Random, Path], object]


def read_payload(signature: dict[str, Any]) -> dict[str, Any]:
    payload: dict[str, Any] = json.loads(base64.b64decode(signature["dsseEnvelope"]["payload"]))
    return payload


def covered_files(root: Path) -> list[Path]:
    return [p for p in sorted(root.rglob("*")) if p.is_file() and p.relative_to(root).as_posix() not in UNSIGNED]


def flip_byte(root: Path, rng: random.Random, keys: Path) -> None:
    file = rng.choice([path for path in covered_files(root) if path.stat().st_size])
    data = bytearray(file.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    file.write_bytes(data)


def cut_or_grow(root: Path, rng: random.Random, keys: Path) -> None:
    file = rng.choice([path for path in covered_files(root) if path.stat().st_size])
    file.write_bytes(file.read_bytes()[:-1] if rng.random() < 0.5 else file.read_bytes() + b"\n")


def remove_file(root: Path, rng: random.Random, keys: Path) -> None:
    rng.choice(covered_files(root)).unlink()


def add_file(root: Path, rng: random.Random, keys: Path) -> None:
    name = rng.choice(
        ["model/extra.json", "evaluation/more.npz", ".hidden", ".gitignore", "notes.txt", "model/report.json"]
    )
    (root / name).write_text(rng.choice(["", "added"]))


def rename_file(root: Path, rng: random.Random, keys: Path) -> None:
    file = rng.choice(covered_files(root))
    file.rename(file.with_name(rng.choice([f"{file.name}.old", f"x{file.name}", file.name.upper() + "_"])))


def swap_contents(root: Path, rng: random.Random, keys: Path) -> None:
    first, second = root / "model/model.onnx", root / "baseline/model.onnx"
    if rng.random() < 0.5:
        first, second = rng.sample(covered_files(root), 2)
    kept = first.read_bytes()
    assert kept != second.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(kept)


def replace_model(root: Path, rng: random.Random, keys: Path) -> None:
    """Another file in a place of the manifest's, and a manifest that fits it: `verify` alone takes it."""
    name = rng.choice(["layers.json", "recipe.yaml", "lock.json", "README.md"])
    (root / name).write_text(f"[] {rng.random()}" if name == "layers.json" else f"changed {rng.random()}")
    reseal(root)
    verify(root)


def edit_manifest(root: Path, rng: random.Random, keys: Path) -> None:
    """Other limits for the same files, under a digest that fits."""
    data = json.loads((root / "manifest.json").read_text())
    data["judgement"]["seed"] = rng.randrange(1, 1000)
    seal_manifest(root, data)
    verify(root)


def edit_signature(root: Path, rng: random.Random, keys: Path) -> None:
    """A signature whose list of files is made to fit a changed bundle, or whose own bytes are others."""
    file = root / "model.sig"
    data = json.loads(file.read_text())
    envelope = data["dsseEnvelope"]
    kind = rng.randrange(4)
    if kind == 0:
        raw = bytearray(base64.b64decode(envelope["signatures"][0]["sig"]))
        raw[rng.randrange(4, len(raw))] ^= 1 << rng.randrange(8)
        envelope["signatures"][0]["sig"] = base64.b64encode(raw).decode()
    elif kind == 1:
        payload = read_payload(data)
        payload["predicate"]["serialization"]["ignore_paths"].append("model")
        envelope["payload"] = base64.b64encode(json.dumps(payload).encode()).decode()
    elif kind == 2:
        data["verificationMaterial"]["publicKey"]["hint"] = rng.choice(["", None, "0" * 64])
        flip_byte(root, rng, keys)
    else:
        data = rng.choice([{}, [], "text", {"dsseEnvelope": envelope}, {**data, "mediaType": "text/plain"}])
    file.write_text(json.dumps(data))


def sign_by_another(root: Path, rng: random.Random, keys: Path) -> None:
    """Everything right, and signed, by somebody else's key; or with the hint of the key that is asked for."""
    hint = json.loads((root / "model.sig").read_text())["verificationMaterial"]
    sign_bundle(root, keys / "other.pem")
    if rng.random() < 0.5:
        data = json.loads((root / "model.sig").read_text())
        (root / "model.sig").write_text(json.dumps({**data, "verificationMaterial": hint}))


def link_file(root: Path, rng: random.Random, keys: Path) -> None:
    """The same bytes, from elsewhere."""
    file = rng.choice(covered_files(root))
    file.rename(root.parent / "elsewhere.bin")
    file.symlink_to(root.parent / "elsewhere.bin")


MUTATIONS: tuple[Mutation, ...] = (
    flip_byte,
    cut_or_grow,
    remove_file,
    add_file,
    rename_file,
    swap_contents,
    replace_model,
    edit_manifest,
    edit_signature,
    sign_by_another,
)


@pytest.mark.slow
def test_a_hundred_mutations_are_refused_by_ours_and_by_the_library(signed: Path, keys: Path, tmp_path: Path) -> None:
    taken: list[str] = []
    for seed in range(100):
        mutate, root = MUTATIONS[seed % len(MUTATIONS)], tmp_path / "mutated" / "bundle"
        shutil.rmtree(root.parent, ignore_errors=True)
        shutil.copytree(signed, root)
        assert seed or (accepted(root, keys / "key.pub") and accepted_by_reference(root, keys / "key.pub"))
        mutate(root, random.Random(seed), keys)
        for judge in (accepted, accepted_by_reference):
            if judge(root, keys / "key.pub"):
                taken.append(f"{mutate.__name__} of seed {seed} by {judge.__name__}")
        with pytest.raises(BundleError):  # by the signature, whatever the manifest would find
            check_signature(root, keys / "key.pub")
    assert not taken


def test_a_link_in_a_file_s_place_is_refused(signed: Path, keys: Path) -> None:
    link_file(signed, random.Random(1), keys)
    assert not accepted(signed, keys / "key.pub") and not accepted_by_reference(signed, keys / "key.pub")


def test_a_signature_of_the_right_key_that_covers_less_is_refused(bundle: Path, keys: Path) -> None:
    """The library's command takes what a signature says it ignores; a signer's other work vouches for no model here."""
    from model_signing import hashing, signing

    ignored = hashing.Config().set_ignored_paths(paths=[*UNSIGNED, "model"])
    config = signing.Config().use_elliptic_key_signer(private_key=keys / "key.pem").set_hashing_config(ignored)
    config.sign(bundle, bundle / "model.sig")
    assert accepted_by_reference(bundle, keys / "key.pub")
    with pytest.raises(BundleError, match=r"not what was signed with .*Extra files found.*model/model\.onnx"):
        check_signature(bundle, keys / "key.pub")


def test_what_validate_refuses_is_not_run(bundle: Path, keys: Path) -> None:
    before = (bundle / "report.json").read_bytes()
    words = ["validate", str(bundle), "--require-signature", str(keys / "key.pub")]
    assert main(words) == 1
    assert CliRunner().invoke(app, words).exit_code == 1
    assert (bundle / "report.json").read_bytes() == before


def test_an_unsigned_bundle_is_refused(bundle: Path, keys: Path) -> None:
    with pytest.raises(
        BundleError, match=r"model\.sig: missing: the bundle is not signed; `compress sign .* --key KEY`"
    ):
        check_signature(bundle, keys / "key.pub")
    (bundle / "model.sig").symlink_to(keys / "key.pub")
    with pytest.raises(BundleError, match=r"model\.sig: missing"):
        check_signature(bundle, keys / "key.pub")


def test_a_signature_that_is_too_large_is_not_read(signed: Path, keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.bundle.signature.MAX_SIGNATURE_BYTES", 100)
    with pytest.raises(BundleError, match=r"model\.sig: larger than 100 bytes, not a signature"):
        check_signature(signed, keys / "key.pub")


def test_the_reason_is_told(signed: Path, keys: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lock = (signed / "lock.json").read_text()
    for text in map(str, range(20)):  # of digests that hold quotes, too
        (signed / "lock.json").write_text(text)
        with pytest.raises(BundleError, match=r"key\.pub: .*Hash mismatch for [\\']+lock\.json[\\']+.?\]; fetch"):
            check_signature(signed, keys / "key.pub")
    (signed / "lock.json").write_text(lock)
    with pytest.raises(
        BundleError, match=r"not what was signed with .*other\.pub: Key mismatch.*; fetch the bundle again"
    ):
        check_signature(signed, keys / "other.pub")
    data = json.loads((signed / "model.sig").read_text())
    data["verificationMaterial"]["publicKey"]["hint"] = ""
    (signed / "model.sig").write_text(json.dumps(data))
    with pytest.raises(BundleError, match=r"other\.pub: InvalidSignature; fetch"):
        check_signature(signed, keys / "other.pub")
    assert main(["verify", str(signed), "--require-signature", str(keys / "key.pub"), "--json"]) == 0
    said = capsys.readouterr()
    assert (
        json.loads(said.out)["signed_with"] == str(keys / "key.pub")
        and "older verification material format" in said.err
    )


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("none.pub", "No such file or directory"),
        ("text.pub", "Unable to load PEM"),
        ("rsa.pub", "another kind of key"),
    ],
)
def test_a_file_that_holds_no_public_key_is_a_wrong_call(signed: Path, tmp_path: Path, name: str, reason: str) -> None:
    (tmp_path / "text.pub").write_text("no key")
    write_key(tmp_path / "rsa.pem", rsa.generate_private_key(65537, 2048))
    with pytest.raises(
        UsageError, match=rf"--require-signature .*{name}: .*{reason}.*; give a PEM file with an elliptic"
    ):
        check_signature(signed, tmp_path / name)


# keys and certificates


def test_an_encrypted_key_takes_its_password_from_the_environment(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = write_key(tmp_path / "locked.pem", ec.generate_private_key(ec.SECP384R1()), b"open")
    words = ["sign", str(bundle), "--key", str(key), "--password-env", "KEY_PASSWORD"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2 and "--password-env KEY_PASSWORD: no such environment variable; set it" in done.stderr
    monkeypatch.setenv("KEY_PASSWORD", "wrong")
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2 and f"--key {key}: " in done.stderr and "give a PEM file" in done.stderr
    with pytest.raises(UsageError, match="--password-env where it is encrypted"):
        sign_bundle(bundle, key)
    assert not (bundle / "model.sig").exists() and not (bundle / "provenance.json").exists()
    monkeypatch.setenv("KEY_PASSWORD", "open")
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0 and done.stdout == f"{bundle}/model.sig: written (digest {verify(bundle).digest})\n"
    assert accepted(bundle, key.with_suffix(".pub")) and accepted_by_reference(bundle, key.with_suffix(".pub"))
    with pytest.raises(UsageError, match="--password-env: with --certificate the library reads no encrypted key"):
        read_password("KEY_PASSWORD", tmp_path / "a.crt")
    assert read_password(None, None) is None


@pytest.mark.parametrize("key", [rsa.generate_private_key(65537, 2048), ec.generate_private_key(ec.SECP256K1())])
def test_a_key_of_another_kind_is_refused(bundle: Path, tmp_path: Path, key: Any) -> None:
    with pytest.raises(
        UsageError, match=r"--key .*k\.pem: .*; give a PEM file with an elliptic-curve private key \(P-256"
    ):
        sign_bundle(bundle, write_key(tmp_path / "k.pem", key))


def test_certificates_lead_to_a_root(bundle: Path, tmp_path: Path, keys: Path) -> None:
    root_key, signer_key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    root = certify(tmp_path, "root", root_key, None)
    certify(tmp_path, "signer", signer_key, (root, root_key))
    certify(tmp_path, "stranger", root_key, None)
    key = write_key(tmp_path / "signer.pem", signer_key)
    sign_bundle(bundle, key, certificate=tmp_path / "signer.crt")
    assert accepted(bundle, tmp_path / "root.crt")
    words = ["verify", "certificate", bundle, "--signature", bundle / "model.sig", "--no-ignore-git-paths"]
    words += ["--certificate_chain", tmp_path / "root.crt"]
    assert ReferenceRunner().invoke(model_signing_cli, list(map(str, words))).exit_code == 0
    other = certify(tmp_path, "other", signer_key, None)
    assert other and not accepted(bundle, tmp_path / "other.crt")
    assert not accepted(bundle, keys / "key.pub")  # a certificate is no key
    (bundle / "README.md").write_text("changed")
    assert not accepted(bundle, tmp_path / "root.crt")
    options = rf"--key {keys / 'key.pem'}, --certificate {tmp_path / 'signer.crt'}: The public key from the certificate"
    with pytest.raises(UsageError, match=options):
        sign_bundle(bundle, keys / "key.pem", certificate=tmp_path / "signer.crt")


def test_what_is_not_whole_is_not_signed(bundle: Path, keys: Path) -> None:
    (bundle / "README.md").write_text("not what was sealed")
    with pytest.raises(BundleError, match="README"):
        sign_bundle(bundle, keys / "key.pem")
    assert not (bundle / "model.sig").exists()


def test_a_bundle_of_unknown_making_is_not_told_of(bundle: Path, keys: Path) -> None:
    (bundle / "lock.json").write_text("{}")
    (bundle / "report.json").unlink()
    reseal(bundle)
    for tell in (write_bom, lambda root: sign_bundle(root, keys / "key.pem")):
        with pytest.raises(
            BundleError, match=r"lock\.json: does not say what the bundle was made of; `compress apply`"
        ):
            tell(bundle)


@pytest.mark.parametrize(
    ("module", "package"), [("model_signing", "model-signing pyopenssl"), ("cyclonedx", "cyclonedx-python-lib")]
)
def test_a_missing_library_is_named_with_its_extra(
    signed: Path, keys: Path, monkeypatch: pytest.MonkeyPatch, module: str, package: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(
        MissingDependency, match=rf"\(the extra 'trust'\) needs the package '{package}'.*pip install {package}"
    ):
        check_signature(signed, keys / "key.pub") if module == "model_signing" else write_bom(signed)


# bill of materials and provenance


def test_the_bom_is_cyclonedx_and_says_where_the_model_comes_from(bundle: Path, tmp_path: Path) -> None:
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    done = CliRunner().invoke(app, ["bom", str(bundle)])
    assert done.stdout == f"{bundle}/bom.cdx.json: written\n" and not done.stderr
    text = (bundle / "bom.cdx.json").read_text()
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    document, manifest = json.loads(text), verify(bundle)
    made = document["metadata"]["component"]
    assert (made["type"], made["name"]) == ("machine-learning-model", manifest.name)
    files = {part["name"]: part["hashes"] for part in made["components"]}
    digest = manifest.files["model/model.onnx"].sha256
    assert files["model/model.onnx"] == [{"alg": "SHA-256", "content": digest}]
    assert files.keys() == {*manifest.files, "manifest.json"}
    said = {entry["name"]: entry["value"] for entry in made["properties"]}
    assert said["compress:digest"] == manifest.digest and said["compress:verdict"] == "unjudged"
    assert json.loads(said["compress:pass:0"]) == {"kind": "int8", "mode": "static"}
    (ancestor,) = made["pedigree"]["ancestors"]
    assert ancestor["name"] == "dir:${base}" and "licenses" not in ancestor
    assert {entry["name"] for entry in ancestor["properties"]} == {"compress:digest", "compress:licence"}
    card = made["modelCard"]
    assert card["modelParameters"]["datasets"] == [{"ref": "data:calibration"}, {"ref": "data:evaluation"}]
    report = json.loads((bundle / "report.json").read_text())
    metrics = {metric["type"]: metric for metric in card["quantitativeAnalysis"]["performanceMetrics"]}
    assert float(metrics["top1"]["value"]) == pytest.approx(report["candidate"]["metrics"]["top1"])
    assert set(metrics["top1"]["confidenceInterval"]) == {"lowerBound", "upperBound"}
    assert "size_ratio" in metrics
    libraries = {part["name"]: part["purl"] for part in document["components"] if part["type"] == "library"}
    assert libraries == {"python": "pkg:github/python/cpython@v3.11.7", "torch": "pkg:pypi/torch@2.13.0%2Bcpu"}


def test_the_same_bundle_gives_the_same_bom_also_before_it_is_judged(bundle: Path) -> None:
    first = write_bom(bundle).read_bytes()
    assert write_bom(bundle).read_bytes() == first
    (bundle / "report.json").unlink()
    document = json.loads(write_bom(bundle).read_bytes())
    assert document["metadata"]["component"]["modelCard"]["quantitativeAnalysis"] == {"performanceMetrics": []}
    assert document["serialNumber"] != json.loads(first)["serialNumber"]


def test_a_bom_of_a_signed_bundle_asks_for_another_signature(signed: Path, keys: Path) -> None:
    (signed / "report.json").unlink()
    done = CliRunner().invoke(app, ["bom", str(signed)])
    assert done.stderr == f"note: {signed}/model.sig was made without it: run `compress sign` again\n"
    assert not accepted(signed, keys / "key.pub")


def test_a_report_of_another_bundle_is_not_passed_on(bundle: Path) -> None:
    report = json.loads((bundle / "report.json").read_text())
    (bundle / "report.json").write_text(json.dumps({**report, "manifest_digest": "0" * 64}))
    with pytest.raises(UsageError, match=r"report\.json: is of another bundle"):
        write_bom(bundle)


def test_a_licence_is_read_from_the_model_s_card(tmp_path: Path) -> None:
    def find(header: str) -> str:
        (tmp_path / "model/README.md").write_text(f"---\n{header}\n---\n# Model\n")
        return find_licence("dir:${base}/model", None, {"folders": {"base": str(tmp_path)}})

    (tmp_path / "model").mkdir()
    assert find("license: apache-2.0") == "apache-2.0"
    assert find("tags: [a]") == find("license: [mit, apache-2.0]") == find("license: [") == ""
    assert find_licence("python:a:b", None, {}) == find_licence("dir:model", None, {}) == ""


def test_a_licence_stands_in_the_bom_by_its_spdx_name(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base/README.md").write_text("---\nlicense: apache-2.0\n---\n")
    (bundle / "host.json").write_text(json.dumps({"folders": {"base": str(tmp_path / "base")}}))
    document = json.loads(write_bom(bundle).read_text())
    (ancestor,) = document["metadata"]["component"]["pedigree"]["ancestors"]
    assert ancestor["licenses"] == [{"license": {"id": "Apache-2.0"}}]


def test_a_hub_s_model_has_its_package_url(bundle: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "empty"))
    source = "hf:owner/name"
    recipe = RECIPE.replace("'dir:${base}'", source).replace("task:", "revision: abc123, task:")
    (bundle / "recipe.yaml").write_text(recipe)
    (bundle / "lock.json").write_text(json.dumps({**LOCK, "model": {**LOCK["model"], "source": source}}))  # type: ignore[dict-item]
    (bundle / "report.json").unlink()
    reseal(bundle)
    document = json.loads(write_bom(bundle).read_text())
    (ancestor,) = document["metadata"]["component"]["pedigree"]["ancestors"]
    assert ancestor["purl"] == "pkg:huggingface/owner/name@abc123" and ancestor["version"] == "abc123"


def test_the_provenance_is_slsa_s_and_names_what_went_in(bundle: Path, keys: Path) -> None:
    from google.protobuf.json_format import ParseDict
    from in_toto_attestation.predicates.provenance.v1 import provenance_pb2
    from in_toto_attestation.v1.statement import Statement

    sign_bundle(bundle, keys / "key.pem", builder="https://ci.example/workflow")
    said = json.loads((bundle / "provenance.json").read_text())
    assert said == describe_build(bundle, verify(bundle), "https://ci.example/workflow")
    statement = Statement([], said["predicateType"], said["predicate"])
    ParseDict(said, statement.pb)
    statement.validate()
    ParseDict(said["predicate"], provenance_pb2.Provenance())  # ParseError for a field that SLSA does not have
    manifest = verify(bundle)
    subject = {entry["name"]: entry["digest"]["sha256"] for entry in said["subject"]}
    assert subject.keys() == {*manifest.files, "manifest.json"}
    assert subject["model/model.onnx"] == manifest.files["model/model.onnx"].sha256
    definition, run = said["predicate"]["buildDefinition"], said["predicate"]["runDetails"]
    assert definition["externalParameters"]["recipe"]["passes"] == [{"kind": "int8", "mode": "static"}]
    assert definition["internalParameters"] == {"seed": 7}
    dependencies = {entry["name"]: entry for entry in definition["resolvedDependencies"]}
    assert dependencies["model"] == {"name": "model", "uri": "dir:${base}", "digest": {"compressModel": "aa11"}}
    assert dependencies["data.evaluation.fr"]["uri"] == "npz:f.npz"
    assert dependencies["data.calibration"]["digest"] == {"compressFiles": "f1", "compressSamples": "d1"}
    assert dependencies["torch"]["uri"] == "pkg:pypi/torch@2.13.0%2Bcpu"
    assert run["builder"] == {"id": "https://ci.example/workflow", "version": {"compress": "0.1.0"}}
    assert (
        describe_build(bundle, manifest)["predicate"]["runDetails"]["builder"]["id"] == "urn:compress:builder:unnamed"
    )
