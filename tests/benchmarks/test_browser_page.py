"""docs/browser.html: both models run in a browser, as onnxruntime runs them here; the package is checked."""

from __future__ import annotations

import functools
import http.server
import io
import json
import re
import shutil
import socketserver
import subprocess
import tarfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
import onnx
import pytest

from benchmarks.browser import MODEL, PAGE, RUNTIME, TOKENIZER, build, unpack
from tests.conftest import slow
from tests.rewriter.report.html.browser import EXECUTABLE, Browser, needs_browser

TEXT = "Raise ValueError if the naïve  value\nis 3.5"


def test_it_names_no_other_place() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert set(re.findall(r"https?://[^\s<\"'`]+", page)) == {"http://127.0.0.1:8000/browser.html"}
    assert re.findall(r'(?:src|href)="', page) == []


def test_another_package_is_refused(tmp_path: Path) -> None:
    archive = tmp_path / "onnxruntime-web.tgz"
    with tarfile.open(archive, "w:gz") as package:
        for name in RUNTIME:
            entry = tarfile.TarInfo(f"package/dist/{name}")
            package.addfile(entry, io.BytesIO())
    with pytest.raises(click.ClickException, match="is not the published package"):
        unpack(archive, tmp_path)
    assert list(tmp_path.iterdir()) == [archive]


def test_without_npm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(click.ClickException, match=r"install Node\.js"):
        build(tmp_path / "site")
    assert list((tmp_path / "site").iterdir()) == []


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("npm") is None:
        pytest.skip("needs npm")
    ping = subprocess.run(["npm", "ping"], capture_output=True, check=False)
    if ping.returncode:
        pytest.skip("npm reaches no registry")
    folder = tmp_path_factory.mktemp("site")
    build(folder)
    return folder


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name in the standard library
        pass


@pytest.fixture
def address(site: Path) -> Iterator[str]:
    handler = functools.partial(_Quiet, directory=str(site))
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/browser.html"
        server.shutdown()
        thread.join()


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    assert EXECUTABLE is not None
    with Browser(EXECUTABLE, tmp_path / "profile") as made:
        yield made


def shown(browser: Browser, address: str, until: str = "!document.getElementById('shown').hidden") -> None:
    """Open the page and wait until it shows something, or 60 s."""
    # As wide as a phone: nothing may stick out.
    browser.call("Emulation.setDeviceMetricsOverride", width=390, height=900, deviceScaleFactor=1, mobile=True)
    browser.call("Page.navigate", url=address)
    wait(browser, f"document.readyState === 'complete' && ({until})")
    assert browser.value("document.documentElement.scrollWidth") <= 390


def wait(browser: Browser, condition: str) -> None:
    for _ in range(600):
        if browser.value(condition):
            return
        time.sleep(0.1)
    raise AssertionError(browser.value("document.body.innerText"))


def reference(path: Path, ids: list[int]) -> Any:
    import onnxruntime

    feeds = {"input_ids": np.array([ids]), "attention_mask": np.ones((1, len(ids)), np.int64)}
    return onnxruntime.InferenceSession(path).run(["logits"], feeds)[0]


def typed(browser: Browser, text: str, status: str) -> None:
    code = "const t = document.getElementById('text'); t.value = %s; t.dispatchEvent(new Event('input'))"
    browser.value("{" + code % json.dumps(text) + "}")
    wait(browser, f"document.getElementById('status').textContent === '{status}'")


ROWS = "[...document.querySelectorAll('#%s tr')].slice(1).map((row) => [...row.cells].map((cell) => cell.textContent))"


@slow
@needs_browser
def test_both_models_run(browser: Browser, address: str, site: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(TOKENIZER))
    shown(browser, address)
    ids = tokenizer.encode(TEXT).ids
    typed(browser, TEXT, f"{len(ids)} tokens")
    for table, path in (("original", MODEL), ("rewritten", site / "browser" / "attnonly.onnx")):
        last = reference(path, ids)[0, -1].astype(float)
        best = np.argsort(-last)[:5]
        rows = browser.value(ROWS % table)
        assert [float(row[1]) for row in rows] == pytest.approx(last[best], abs=1e-4)
        share = np.exp(last - last.max()) / np.exp(last - last.max()).sum()
        assert [float(row[2].split()[0]) for row in rows] == pytest.approx(100 * share[best], abs=0.02)
        assert [json.loads(row[0]) for row in rows] == [tokenizer.decode([int(token)]) for token in best]
    off = float(browser.value("document.getElementById('difference').textContent").split(": ")[1].split(";")[0])
    assert 0 < off < 1e-4
    outside = {
        event["params"]["request"]["url"] for event in browser.events if event["method"] == "Network.requestWillBeSent"
    }
    assert {url for url in outside if not url.startswith((address.rsplit("/", 1)[0], "data:", "blob:"))} == set()


@slow
@needs_browser
def test_the_pattern_is_sigma_of_the_preactivation(browser: Browser, address: str, tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    ids = tokenizers.Tokenizer.from_file(str(TOKENIZER)).encode("Return the number of").ids
    shown(browser, f"{address}?block=1&neuron=7")
    weights = browser.value("[...document.querySelectorAll('#weights span')].map((each) => Number(each.textContent))")
    model = onnx.load(MODEL)
    sigmoids = [node for node in model.graph.node if node.op_type in ("Sigmoid", "Swish")]
    assert len(sigmoids) == 2
    model.graph.output.append(onnx.helper.make_empty_tensor_value_info(sigmoids[1].input[0]))
    import onnxruntime

    feeds = {"input_ids": np.array([ids]), "attention_mask": np.ones((1, len(ids)), np.int64)}
    y = onnxruntime.InferenceSession(model.SerializeToString()).run([sigmoids[1].input[0]], feeds)[0]
    y = y.reshape(len(ids), 160)[:, 7]
    assert weights == pytest.approx(1 / (1 + np.exp(-y.astype(float))), abs=1e-4)


@slow
@needs_browser
def test_a_wrong_model_shows(browser: Browser, address: str, site: Path) -> None:
    path = site / "browser" / "attnonly.onnx"
    right = path.read_bytes()
    model = onnx.load(path)
    weight = max(model.graph.initializer, key=lambda each: len(each.raw_data) if "mlp" in each.name else 0)
    values = onnx.numpy_helper.to_array(weight) * 1.01
    weight.CopyFrom(onnx.numpy_helper.from_array(values.astype(np.float32), weight.name))
    onnx.save(model, path)
    try:
        shown(browser, address)
        off = float(browser.value("document.getElementById('difference').textContent").split(": ")[1].split(";")[0])
        assert off > 1e-3
    finally:
        path.write_bytes(right)


@slow
@needs_browser
def test_missing_files_are_explained(browser: Browser, tmp_path: Path) -> None:
    page = tmp_path / "browser.html"
    shutil.copyfile(PAGE, page)
    shown(browser, page.as_uri(), "!document.getElementById('missing').hidden")
    assert "python -m benchmarks.browser site" in browser.value("document.getElementById('missing').innerText")
