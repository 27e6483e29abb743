"""External data behind the links of a Hugging Face cache: what is opened through them, and what never is."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

from rewriter import diff, inspect, rewrite, validate
from rewriter.errors import ModelError
from rewriter.files.load import as_stored, load_model, read_tensor
from tests.conftest import Ran
from tests.textmodels import SILU, mlp

HASH = "0" * 64
LINK = "is or lies behind a symbolic link; copy the model with its data"


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    """A model in a cache as huggingface_hub writes it: all files are links to blobs, in a folder of the revision."""
    cache = tmp_path / "hub" / "models--org--name"
    folder = cache / "snapshots" / "abc123" / "onnx"
    folder.mkdir(parents=True)
    (cache / "blobs").mkdir()
    onnx.save(mlp(SILU), folder / "model.onnx", save_as_external_data=True, location="model.data", size_threshold=0)
    for name, blob in (("model.onnx", "f" * 64), ("model.data", HASH)):
        (folder / name).rename(cache / "blobs" / blob)
        (folder / name).symlink_to(Path("../../../blobs") / blob)
    return folder


def test_links_into_the_blobs(snapshot: Path) -> None:
    path = snapshot / "model.onnx"
    model = load_model(path)
    cache = snapshot.parents[2]
    assert {ref.path for ref in model.external} == {cache / "blobs" / HASH}
    weights = {tensor.name: read_tensor(model, tensor) for tensor in model.proto.graph.initializer}
    whole = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in mlp(SILU).graph.initializer}
    assert weights.keys() == whole.keys()
    assert all(np.array_equal(weights[name], whole[name]) for name in whole)


@pytest.mark.slow
def test_every_call_that_runs_the_model(snapshot: Path, tmp_path: Path) -> None:
    path, out = snapshot / "model.onnx", tmp_path / "out.onnx"
    assert inspect(path).report.converted
    for proof in ("whole", "blocks"):
        report = rewrite(path, out, providers=["cpu"], proof=proof, force=True)
        assert report.exit_status == 0
    # The result has its own copy of the data, not a link.
    assert not any(each.is_symlink() for each in tmp_path.glob("out*"))
    assert validate(path, out, providers=["cpu"]).same
    assert diff(path, out, outputs=False).same
    assert diff(path, path, providers=["cpu"]).same


def test_the_result_may_lie_beside_the_link(snapshot: Path) -> None:
    out = snapshot / "out.onnx"
    assert rewrite(snapshot / "model.onnx", out, providers=["cpu"]).exit_status == 0
    assert (snapshot / "model.data").is_symlink()
    load_model(out)


def relink(folder: Path, target: str | Path) -> None:
    (folder / "model.data").unlink()
    (folder / "model.data").symlink_to(target)


def _loop(folder: Path) -> None:
    relink(folder, "other.data")
    (folder / "other.data").symlink_to("model.data")


def _chain(folder: Path) -> None:
    blob = folder.parents[2] / "blobs" / HASH
    blob.rename(folder / "elsewhere")
    blob.symlink_to("../snapshots/abc123/onnx/elsewhere")


def _swapped_blobs(folder: Path) -> None:
    blobs = folder.parents[2] / "blobs"
    blobs.rename(folder.parents[2] / "others")
    blobs.symlink_to("others")


def _located(folder: Path, location: str) -> None:
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    for tensor in model.graph.initializer:
        tensor.external_data[0].value = location
    (folder / "model.onnx").unlink()
    (folder / "model.onnx").write_bytes(model.SerializeToString())


def _linked_folder(folder: Path) -> None:
    """What it leads to is never opened: by its text the link in it names a blob that does not exist."""
    secret = folder.parents[4] / "secret"
    secret.mkdir()
    (secret / "model.data").symlink_to("../blobs/none")
    _located(folder, "sub/model.data")
    (folder / "sub").symlink_to(secret)


ATTACKS: dict[str, tuple[Callable[[Path], object], str]] = {
    "out of the directory": (lambda it: relink(it, "../../../../../secret"), LINK),
    "out by way of blobs": (lambda it: relink(it, "../../../blobs/../../../secret"), LINK),
    "another cache": (lambda it: relink(it, f"../../../../models--org--other/blobs/{HASH}"), LINK),
    "absolute": (lambda it: relink(it, it.parents[2] / "blobs" / HASH), LINK),
    "absolute, a system file": (lambda it: relink(it, "/etc/passwd"), LINK),
    "the blobs themselves": (lambda it: relink(it, "../../../blobs"), LINK),
    "the cache itself": (lambda it: relink(it, "../../.."), LINK),
    "below a blob": (lambda it: relink(it, f"../../../blobs/{HASH}/x"), LINK),
    "a loop": (_loop, LINK),
    "itself": (lambda it: relink(it, "model.data"), LINK),
    "a blob that is a link": (_chain, "is or lies behind a symbolic link"),
    "blobs that are a link": (_swapped_blobs, LINK),
    "no such blob": (lambda it: relink(it, "../../../blobs/none"), "No such file"),
    "no cache": (lambda it: it.parents[1].rename(it.parents[2] / "copies"), "does not exist"),
    "a hard link": (lambda it: os.link(it.parents[2] / "blobs" / HASH, it.parents[2] / "second"), "hard links"),
    "a location with dots": (lambda it: _located(it, f"../../../blobs/{HASH}"), "is not a plain relative path"),
    "a folder in between that is a link": (_linked_folder, LINK),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_attacks(attack: str, snapshot: Path, ran: Ran) -> None:
    plant, message = ATTACKS[attack]
    plant(snapshot)
    out = snapshot.parents[4] / "out.onnx"
    assert message in ran(4, [str(snapshot / "model.onnx"), "-o", str(out)]).refusal
    assert not out.exists()


def test_a_link_that_changes_after_the_check(snapshot: Path) -> None:
    model = load_model(snapshot / "model.onnx")
    secret = snapshot.parents[4] / "secret"
    secret.write_bytes(bytes(4096))
    relink(snapshot, secret)
    weight = as_stored(model.proto).graph.initializer[0]
    assert read_tensor(model, weight).any(), "the link is not read again"
    blob = snapshot.parents[2] / "blobs" / HASH
    blob.unlink()
    blob.symlink_to(secret)
    with pytest.raises(ModelError, match="is or lies behind a symbolic link"):
        read_tensor(model, weight)
