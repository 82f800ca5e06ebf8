"""Safetensors folders into preallocated views: what is loaded, what is refused, and that refusing copies nothing."""

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from minillm.checkpoint import Checkpoint, Destination
from minillm.errors import CheckpointError

INDEX = "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"model.embed.weight": (6, 4), "model.layers.0.q.weight": (8, 4), "model.norm.weight": (4,)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def write_shards(folder: Path, weight_map: dict[str, object] | None = None) -> dict[str, Tensor]:
    stored = tensors()
    first, *others = stored
    save_file({first: stored[first]}, folder / SHARDS[0])
    save_file({name: stored[name] for name in others}, folder / SHARDS[1])
    home: dict[str, object] = {first: SHARDS[0]} | dict.fromkeys(others, SHARDS[1])
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": home | (weight_map or {})}))
    return stored


def empty_like(stored: dict[str, Tensor], dtype: torch.dtype = torch.float32) -> dict[str, Destination]:
    return {
        name: Destination(torch.full(t.shape, float("nan"), dtype=dtype), tuple(t.shape)) for name, t in stored.items()
    }


def assert_loaded(destinations: dict[str, Destination], stored: dict[str, Tensor]) -> None:
    for name, destination in destinations.items():
        assert torch.equal(destination.view, stored[name]), name


def refused(folder: Path, *words: str) -> None:
    with pytest.raises(CheckpointError) as error:
        Checkpoint(folder)
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)


def refused_load(
    folder: Path, destinations: dict[str, Destination], words: Iterable[str], optional: tuple[str, ...] = ()
) -> None:
    """The error is one line with every word, and no destination was written."""
    with pytest.raises(CheckpointError) as error:
        Checkpoint(folder).load(destinations, optional=optional)
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)
    assert all(destination.view.isnan().all() for destination in destinations.values())


@pytest.mark.parametrize("sharded", [False, True])
def test_names_shapes_values_and_progress(tmp_path: Path, sharded: bool) -> None:
    stored = write_shards(tmp_path) if sharded else tensors()
    if not sharded:
        save_file(stored, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)
    assert sorted(checkpoint.names) == sorted(stored)
    assert checkpoint.shape("model.layers.0.q.weight") == (8, 4)
    with pytest.raises(CheckpointError, match="nothing"):
        checkpoint.shape("nothing")
    destinations, steps = empty_like(stored), []
    checkpoint.load(destinations, progress=steps.append)
    assert_loaded(destinations, stored)
    assert sorted(steps) == [16, 96, 128]


def test_a_view_may_reorder_transpose_and_convert(tmp_path: Path) -> None:
    """Rows of heads of 4, half-split in the file, become neighbours in one fused, transposed bfloat16 matrix."""
    q, k = torch.randn(8, 3), torch.randn(4, 3)
    save_file({"q": q, "k": k}, tmp_path / "model.safetensors")
    fused = torch.full((3, 12), float("nan"), dtype=torch.bfloat16)
    rows = fused.t()  # [12, 3]
    Checkpoint(tmp_path).load(
        {
            "q": Destination(rows[:8].view(2, 2, 2, 3).transpose(1, 2), (8, 3)),
            "k": Destination(rows[8:].view(1, 2, 2, 3).transpose(1, 2), (4, 3)),
        }
    )
    order = [0, 2, 1, 3]
    expected = torch.cat([q[order], q[4:][order], k[order]]).bfloat16()
    assert torch.equal(fused, expected.t())


def test_a_destination_must_have_room_for_its_tensor() -> None:
    with pytest.raises(ValueError, match=r"\[2, 3\] cannot hold a tensor of \[7\]"):
        Destination(torch.zeros(2, 3), (7,))


def test_missing_unexpected_and_misshapen_tensors_are_all_named_before_anything_is_copied(tmp_path: Path) -> None:
    stored = tensors()
    save_file(stored | {"extra.bias": torch.zeros(3)}, tmp_path / "model.safetensors")
    destinations = empty_like(stored)
    destinations["absent.weight"] = Destination(torch.full((2,), float("nan")), (2,))
    destinations["model.norm.weight"] = Destination(torch.full((2, 2), float("nan")), (2, 2))
    words = ("missing: absent.weight;", "unexpected: extra.bias;", "model.norm.weight is [4] and should be [2, 2]")
    refused_load(tmp_path, destinations, (*words, str(tmp_path)))


def test_a_transposed_shape_with_as_many_elements_is_refused(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(2, 3)}, tmp_path / "model.safetensors")
    destinations = {"w": Destination(torch.full((2, 3), float("nan")), (3, 2))}
    refused_load(tmp_path, destinations, ["w is [2, 3] and should be [3, 2]"])


def test_a_long_list_of_names_is_cut(tmp_path: Path) -> None:
    save_file({f"layer{i:02}": torch.zeros(1) for i in range(30)}, tmp_path / "model.safetensors")
    refused_load(tmp_path, {}, ["layer00, layer01", "layer07 and 22 more"])


@pytest.mark.parametrize("buffer", ["model.layers.0.self_attn.rotary_emb.inv_freq", "rope.freqs"])
def test_stored_rotary_frequencies_are_passed_over(tmp_path: Path, buffer: str) -> None:
    """Guards: a strict load failed on the rotary buffers of old checkpoints. Their values must not matter."""
    stored = tensors()
    save_file(stored | {buffer: torch.full((2,), 1e9)}, tmp_path / "model.safetensors")
    destinations = empty_like(stored)
    Checkpoint(tmp_path).load(destinations)
    assert_loaded(destinations, stored)


def test_a_bias_that_nobody_asks_for_is_refused(tmp_path: Path) -> None:
    """Guards: a bias in the file was dropped in silence where the config's flag said that there is none."""
    stored = tensors()
    save_file(stored | {"model.layers.0.q.bias": torch.ones(8)}, tmp_path / "model.safetensors")
    refused_load(tmp_path, empty_like(stored), ["unexpected: model.layers.0.q.bias"])


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("present", [False, True])
def test_the_four_cases_of_a_tied_output_matrix(tmp_path: Path, tied: bool, present: bool) -> None:
    """Guards: KeyError, unexpected key or a random output matrix, by whether config and file agree about lm_head."""
    stored, head = tensors(), "lm_head.weight"
    save_file(stored | ({head: torch.ones(6, 4)} if present else {}), tmp_path / "model.safetensors")
    destinations = empty_like(stored)
    if tied:
        Checkpoint(tmp_path).load(destinations, optional={head})
        assert_loaded(destinations, stored)
        return
    destinations[head] = Destination(torch.full((6, 4), float("nan")), (6, 4))
    if present:
        Checkpoint(tmp_path).load(destinations)
        assert_loaded(destinations, stored | {head: torch.ones(6, 4)})
    else:
        refused_load(tmp_path, destinations, ["missing: lm_head.weight"])


def test_an_optional_tensor_with_a_destination_is_loaded_if_it_is_there(tmp_path: Path) -> None:
    stored = tensors()
    save_file(stored, tmp_path / "model.safetensors")
    destinations = empty_like(stored)
    spare = torch.full((2,), float("nan"))
    Checkpoint(tmp_path).load(
        destinations | {"absent": Destination(spare, (2,))}, optional=["absent", "model.norm.weight"]
    )
    assert_loaded(destinations, stored)
    assert spare.isnan().all()


@pytest.mark.parametrize(
    ("dtype", "label"), [(torch.int8, "I8"), (torch.float8_e4m3fn, "F8_E4M3"), (torch.bool, "BOOL")]
)
def test_quantised_weights_are_refused_with_name_and_dtype(tmp_path: Path, dtype: torch.dtype, label: str) -> None:
    stored = tensors()
    save_file(stored | {"model.norm.weight": torch.zeros(4).to(dtype)}, tmp_path / "model.safetensors")
    refused_load(tmp_path, empty_like(stored), ["dtype", f"model.norm.weight is {label}"])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_float_dtypes_are_converted(tmp_path: Path, dtype: torch.dtype) -> None:
    stored = {name: tensor.to(dtype) for name, tensor in tensors().items()}
    save_file(stored, tmp_path / "model.safetensors")
    destinations = empty_like(stored, torch.float32)
    Checkpoint(tmp_path).load(destinations)
    assert_loaded(destinations, {name: tensor.float() for name, tensor in stored.items()})


def test_the_index_decides_and_files_beside_it_do_not_matter(tmp_path: Path) -> None:
    """Guards: globbing *.safetensors picks up leftovers and adapters that lie in the folder."""
    stored = write_shards(tmp_path)
    save_file({"adapter.weight": torch.zeros(1)}, tmp_path / "adapter.safetensors")
    first, *others = stored
    for shard, home in zip(SHARDS, ([first], others), strict=True):  # each holds old values of the other's tensors
        save_file({name: t if name in home else t + 1 for name, t in stored.items()}, tmp_path / shard)
    destinations = empty_like(stored)
    Checkpoint(tmp_path).load(destinations)
    assert_loaded(destinations, stored)


def test_a_tensor_that_the_index_forgot_is_not_dropped_in_silence(tmp_path: Path) -> None:
    stored = write_shards(tmp_path)
    save_file({"model.embed.weight": stored["model.embed.weight"], "stray": torch.zeros(1)}, tmp_path / SHARDS[0])
    refused_load(tmp_path, empty_like(stored), ["unexpected: stray"])


def test_a_single_file_wins_over_an_index(tmp_path: Path) -> None:
    """As in transformers."""
    write_shards(tmp_path)
    save_file({"only": torch.zeros(2)}, tmp_path / "model.safetensors")
    assert Checkpoint(tmp_path).names == ["only"]


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    write_shards(tmp_path)
    (tmp_path / SHARDS[1]).unlink()
    refused(tmp_path, f"lacks {SHARDS[1]}", INDEX)


def test_a_tensor_missing_from_its_shard_is_named(tmp_path: Path) -> None:
    write_shards(tmp_path, {"model.ghost.weight": SHARDS[0]})
    refused(tmp_path, "model.ghost.weight", SHARDS[0])


@pytest.mark.parametrize(
    "shard", ["../outside.safetensors", "..", "/etc/passwd", "a/b.safetensors", "a\\b", "C:x", "", ".", 7, None]
)
def test_an_index_that_points_elsewhere_is_refused(tmp_path: Path, shard: object) -> None:
    """Guards: a path in a downloaded index may not reach a file outside the model's folder."""
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"w": torch.zeros(1)}, tmp_path / "outside.safetensors")
    write_shards(folder, {"w": shard})
    refused(folder, INDEX, repr(shard))


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}'])
def test_a_broken_index_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / INDEX).write_text(content)
    refused(tmp_path, INDEX)


@pytest.mark.parametrize("cut", [0, 5, 30, -1])
def test_a_file_cut_short_is_named(tmp_path: Path, cut: int) -> None:
    file = tmp_path / "model.safetensors"
    save_file(tensors(), file)
    file.write_bytes(file.read_bytes()[:cut])
    refused(tmp_path, str(file), "not a complete safetensors file")


def test_a_file_cut_short_after_its_header_was_read_is_an_error_too(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file(tensors(), file)
    checkpoint = Checkpoint(tmp_path)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="not a complete safetensors file"):
        checkpoint.load(empty_like(tensors()))


def test_a_pickle_under_a_safetensors_name_is_refused(tmp_path: Path) -> None:
    torch.save(tensors(), tmp_path / "model.safetensors")
    refused(tmp_path, "not a complete safetensors file")


def test_folders_without_safetensors_say_what_to_do(tmp_path: Path) -> None:
    refused(tmp_path / "absent", "absent")
    refused(tmp_path, "model.safetensors")
    (tmp_path / "pytorch_model.bin").touch()
    refused(tmp_path, "pytorch_model", "convert", "safetensors")
    (tmp_path / "consolidated.00.pth").touch()
    refused(tmp_path, "Meta", "convert", "Hugging Face")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_host_memory_grows_by_one_tensor_at_a_time(tmp_path: Path) -> None:
    """Guards: pages of a mapped file stay in memory until it is closed; one mapping for all doubles the peak."""
    save_file(
        {f"t{i}": torch.full((4, 2**18), float(i)) for i in range(24)}, tmp_path / "model.safetensors"
    )  # 4 MB each
    code = f"""
import re, torch
from minillm.checkpoint import Checkpoint, Destination
def resident(): return int(re.search(r"VmRSS:\\s*(\\d+)", open("/proc/self/status").read())[1]) / 1024
matrix = torch.zeros(24, 4, 2**18)
matrix.fill_(1)
checkpoint = Checkpoint({str(tmp_path)!r})
before, peak = resident(), []
views = {{f"t{{i}}": Destination(matrix[i], (4, 2**18)) for i in range(24)}}
checkpoint.load(views, progress=lambda _: peak.append(resident()))
assert matrix.mean() == 11.5
print(max(peak) - before)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[1], capture_output=True, text=True, check=True
    )
    assert float(done.stdout) < 24  # MB; all tensors together are 96
