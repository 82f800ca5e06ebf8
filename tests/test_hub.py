"""What a person calls a model -> a directory. The hub and pip are replaced; there is no network."""

import os
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import errors
from test_convert import small_llama, write_gguf

from minillm import download, hub
from minillm.errors import CheckpointError
from minillm.hub import resolve_model, weights_dir


@pytest.fixture(autouse=True)
def weights(tmp_path, monkeypatch) -> Path:
    """Weights go to a place of this test, which is also the current directory; no program is ever started."""
    monkeypatch.setenv("MINILLM_WEIGHTS", str(tmp_path / "weights"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(download.subprocess, "run", None)
    return tmp_path / "weights"


@pytest.fixture
def gguf_file(tmp_path) -> Path:
    pytest.importorskip("gguf")
    return write_gguf(tmp_path / "story.gguf", small_llama())


def test_a_directory_is_itself(tmp_path):
    (tmp_path / "my-model").mkdir()
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert resolve_model(tmp_path / "my-model") == tmp_path / "my-model"
    assert resolve_model(str(tmp_path / "my-model")) == tmp_path / "my-model"
    assert resolve_model("org/name") == Path("org/name")  # and not a hub id


def test_a_gguf_file_is_converted_once(gguf_file, weights, capsys):
    directory = resolve_model(gguf_file)
    assert directory.parent == weights / "converted"
    assert directory.name.startswith("story-")
    assert (directory / "model.safetensors").is_file()
    assert "converting" in capsys.readouterr().err
    before = (directory / "model.safetensors").stat().st_mtime_ns
    assert resolve_model("story.gguf") == directory  # the same file by its relative name
    assert (directory / "model.safetensors").stat().st_mtime_ns == before
    assert capsys.readouterr().err == ""


def test_a_changed_gguf_file_is_converted_anew(gguf_file):
    """A cache by name alone would go on running the old weights."""
    first = resolve_model(gguf_file)
    write_gguf(gguf_file, small_llama(tie_word_embeddings=True))
    second = resolve_model(gguf_file)
    os.utime(gguf_file, ns=(1, 1))
    assert len({first, second, resolve_model(gguf_file)}) == 3


def test_two_processes_convert_the_same_file(gguf_file, monkeypatch):
    """The slower one finds the directory made by the faster, and uses it."""
    convert = hub.convert_gguf

    def overtaken(source, target, **options):
        convert(source, target)
        return convert(source, target, **options)

    monkeypatch.setattr(hub, "convert_gguf", overtaken)
    assert (resolve_model(gguf_file) / "config.json").is_file()


def test_a_bad_gguf_file(tmp_path, weights):
    (tmp_path / "bad.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"bad\.gguf"):
        resolve_model("bad.gguf")
    assert not weights.exists()


@pytest.mark.parametrize("place", ["minillm/stories", "weights/stories"])
def test_the_model_that_comes_with_minillm(tmp_path, monkeypatch, place):
    """In a wheel, and in a checkout; where `weights` says that other models are does not matter."""
    monkeypatch.setattr(hub, "__file__", str(tmp_path / "home" / "minillm" / "hub.py"))
    directory = tmp_path / "home" / place
    directory.mkdir(parents=True)
    assert hub.bundled_model() is None  # its card alone is no model
    with pytest.raises(CheckpointError, match=r"one of smollm2"):
        resolve_model("stories")
    assert hub.default_model() == hub.default_model(chat=True) == "smollm2-135m-instruct"
    (directory / "config.json").touch()
    assert resolve_model(None) == resolve_model("stories") == resolve_model("Stories") == directory
    assert hub.default_model() == "stories"
    assert hub.default_model(chat=True) == "smollm2-135m-instruct"  # the story model has no chat template
    with pytest.raises(CheckpointError, match=r"one of stories, smollm2"):
        resolve_model("storeys")
    (tmp_path / "stories").mkdir()
    assert resolve_model("stories") == Path("stories")  # a directory of that name wins


@pytest.mark.parametrize("model", [None, "smollm2-135m-instruct", "SmolLM2-135M-Instruct"])
def test_the_default_and_known_names_are_fetched_once(weights, monkeypatch, model, capsys):
    monkeypatch.setattr(hub, "bundled_model", lambda: None)
    target = weights / "SmolLM2-135M-Instruct"
    fetched = []

    def fetch(name):
        fetched.append(name)
        target.mkdir(parents=True)
        (target / "config.json").touch()
        return target

    monkeypatch.setattr(hub, "download", fetch)
    assert resolve_model(model) == target
    assert resolve_model(model) == target
    assert fetched == ["smollm2-135m-instruct"]
    assert capsys.readouterr().err == ""  # the second call is silent, and the first is download's to comment


def test_a_hub_id(tmp_path, monkeypatch):
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    (snapshot / "model.safetensors").touch()
    calls = []

    def fetch(repo_id, allow_patterns):
        calls.append((repo_id, allow_patterns))
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert resolve_model("org/some-Model_1.5") == snapshot
    ((repo_id, patterns),) = calls
    assert repo_id == "org/some-Model_1.5"
    files = [
        *("config.json", "generation_config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json"),
        *("chat_template.jinja", "model.safetensors.index.json", "model-00001-of-00002.safetensors"),
        *("pytorch_model.bin", "consolidated.00.pth", "model.gguf", "training_args.bin", "modeling_evil.py"),
    ]
    assert list(huggingface_hub.utils.filter_repo_objects(files, allow_patterns=patterns)) == files[:8]

    (snapshot / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no safetensors"):
        resolve_model("org/some-Model_1.5")


def http_error(kind):
    """An error as the hub's client raises it, without a response of a particular HTTP library."""
    error = kind.__new__(kind)
    Exception.__init__(error, "401 Client Error.\nRequest ID: abc")
    return error


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (http_error(errors.RepositoryNotFoundError), "no such public model"),
        (http_error(errors.GatedRepoError), r"gated; .*https://huggingface.co/org/name"),
        (errors.LocalEntryNotFoundError("Cannot find\nthe files"), r"cannot be fetched from the hub \(Cannot find\)"),
        (errors.OfflineModeIsEnabled("offline mode is enabled"), "offline mode is enabled"),
        (RuntimeError(), "RuntimeError"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_hub_fails_in_one_sentence(monkeypatch, error, message):
    def fetch(repo_id, allow_patterns):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    with pytest.raises(CheckpointError, match=rf"org/name: .*{message}") as caught:
        resolve_model("org/name")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("model", ["no-such-model", "./org/name", "/no/such/place", "../up", "a/b/c", "org/x.gguf", ""])
def test_a_path_that_does_not_exist(monkeypatch, model):
    """Paths never turn into questions to the network."""
    monkeypatch.setattr(huggingface_hub, "snapshot_download", None)
    with pytest.raises(CheckpointError) as caught:
        resolve_model(model)
    assert model in str(caught.value)
    assert "smollm2-135m-instruct" in str(caught.value)


def test_a_file_that_is_no_model(tmp_path):
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(CheckpointError, match="a file; give the directory"):
        resolve_model(tmp_path / "model.safetensors")


def test_weights_dir_is_the_one_of_the_environment(weights):
    assert weights_dir() == weights
