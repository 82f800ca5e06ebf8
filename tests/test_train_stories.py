"""The stages that make the story model, from end to end, tiny and on the CPU; and what each promises."""

import hashlib
import json
import random
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import make_tiny_model
from tokenizers import Tokenizer

from examples.train_stories import evaluate, llama, sample, split, teacher, train
from examples.train_stories.__main__ import main
from examples.train_stories.fit import Recipe, fit, rate, validate
from examples.train_stories.packing import PAD, Tokens, epoch_order, pack, place
from examples.train_stories.stories import SEPARATOR, Sieve, read_stories, words_of, write_stories
from minillm import LLM, SamplingParams
from minillm.config import ModelConfig
from minillm.tokenizer import Tokenizer as MinillmTokenizer

CPU = torch.device("cpu")
CONFIG = train.CONFIG | {"vocab_size": 400, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
CONFIG |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "torch_dtype": "float32"}


NAMES = ["Ann", "Bob", "Cleo", "Dan", "Eve", "Finn", "Gus", "Hal"]
THINGS = ["ball", "kite", "boat", "drum", "cake", "lamp", "frog", "shoe"]
PLACES = ["park", "wood", "yard", "shop", "barn", "cave", "lake", "hill"]
MOODS = ["happy", "sad", "proud", "tired", "brave", "calm", "shy", "glad"]
REAL = (
    "Ann had a red kite. She ran up the hill with it, and the wind took it far away over the trees. "
    '"Come back!" she called. Bob heard her and climbed the tallest tree of the wood. '
    "There it hung, with a small hole. They mended it together and were glad."
)
NEW = (
    "One day a frog found a shoe by the lake. It was just as long as a boat for one, so he sat in it and rowed. "
    '"Where are you going?" asked a fish. The frog did not know yet. '
    "So they went on side by side until the stars were out, and then he slept."
)


def made_up_stories(count: int) -> list[str]:
    """Stories of a grammar of our own, each different, all clean."""
    rng = random.Random(0)
    stories = []
    for _ in range(count):
        a, b = rng.sample(NAMES, 2)
        said = [f"{a} was {rng.choice(MOODS)} and had a {rng.choice(THINGS)}."]
        for _ in range(rng.randint(4, 8)):
            who, other = rng.sample([a, b], 2)
            said.append(f"{who} took the {rng.choice(THINGS)} of {other} to the {rng.choice(PLACES)}.")
            said.append(f'"I am {rng.choice(MOODS)}," said {other} at the {rng.choice(PLACES)}.')
        said.append(f"They were {rng.choice(MOODS)} in the end.")
        stories.append(" ".join(said))
    return stories


class TakesAll(Sieve):
    """A teacher of two layers writes no clean story."""

    def reason(self, story: str) -> str | None:
        return None


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory in which the command has run, with a tiny teacher, on made-up stories: `work` and `out`."""
    root = tmp_path_factory.mktemp("stories")
    (root / "corpus.txt").write_text(f"\n{SEPARATOR}\n".join([*made_up_stories(200), "Too short."]), "utf-8")
    make_tiny_model(root / "source", max_position_embeddings=1024, eos_token_id=2)
    small = replace(train.RECIPE, batch=8, learning_rate=1e-2, warm_up=2, epochs=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(split, "run", partial(split.run, vocab_size=CONFIG["vocab_size"]))
        patch.setattr(teacher, "run", partial(teacher.run, recipe=replace(small, block=1024)))
        patch.setattr(train, "run", partial(train.run, recipe=small, config=CONFIG))
        patch.setattr(sample, "Sieve", TakesAll)
        main(command(root))
    return root


def command(root: Path) -> list[str]:
    """What a person would type. The epochs end the training, not the seconds, so a slow machine does as much."""
    paths = {"teacher": "source", "corpus": "corpus.txt", "work": "work", "out": "out"}
    options = [option for name, path in paths.items() for option in (f"--{name}", str(root / path))]
    seconds = {"teacher": 600, "sample": 0, "train": 600, "evaluate": 600}
    options += [option for name, s in seconds.items() for option in (f"--{name}-seconds", str(s))]
    return [*options, "--device", "cpu", "--workers", "1", "--rows", "4"]


def test_the_split_is_disjoint_and_goes_by_the_text_alone() -> None:
    stories = made_up_stories(300)
    parts = split.split([*stories, *stories[:50], "Too short."])
    assert sorted(story for part in parts.values() for story in part) == sorted(set(stories))
    assert all(parts.values())
    pinned = [split.part_of(number) for number in ("3", "16", "32")]
    assert pinned == ["train", "held_out", "validation"]  # in any process, on any machine
    again = split.split(reversed(stories[::2]))
    assert all(set(again[name]) <= set(parts[name]) for name in parts)


def test_the_tokenizer_begins_every_text(root: Path) -> None:
    """The empty text too, so that the model can begin from nothing."""
    tokenizer = MinillmTokenizer.from_dir(root / "work" / "tokenizer")
    story = made_up_stories(1)[0]
    assert tokenizer.encode("") == [0] == [tokenizer.eos_token_id]
    ids = tokenizer.encode(story)
    assert ids[0] == 0
    assert tokenizer.decode(ids) == story
    assert len(ids) < len(story) / 2  # it has learned merges


@pytest.mark.parametrize(
    ("story", "reason"),
    [
        (REAL, None),
        (REAL + " Caf\u00e9.", "not printable ASCII"),
        ("They were happy in the end.", "too short"),
        (" ".join([REAL] * 9), "too long"),
        (REAL[REAL.index(" ") + 1 :], "begins in mid-sentence"),
        (REAL.removesuffix("."), "ends in mid-sentence"),
        (REAL.replace('"', "", 1), "unbalanced quotes"),
        (REAL + " " + REAL, "repeats itself"),
        (REAL + " Ann saw it all. Bob ran. Ann saw it all. Bob hid. Ann saw it all.", "repeats a sentence"),
    ],
    ids=lambda value: str(value)[:25],
)
def test_what_falls_through_the_sieve(story: str, reason: str | None) -> None:
    assert Sieve([]).reason(story) == reason


def test_copies_fall_through_the_sieve() -> None:
    sieve, opening = Sieve([REAL]), REAL.split()
    assert sieve.reason(" ".join(opening[:20]) + ". " + NEW) == "copies a real story"
    assert sieve.reason(" ".join(opening[:19]) + ". " + NEW) is None  # a short opening may be the same
    assert sieve.reason(NEW) is None
    assert sieve.reason(NEW.replace(",", "")) == "was there before"


def test_blocks_hold_whole_stories() -> None:
    lengths = [3, 9, 1, 30, 7, 7, 2]
    stories = [f"{index}" for index in range(len(lengths))]
    tokens = Tokens.encode(stories, lambda text: [100 + int(text)] * (lengths[int(text)] - 1), end=5)
    order = epoch_order([1, 2, 1, 1, 3, 1, 1], seed=3)
    blocks = pack(tokens, order, block=12)
    assert blocks.shape[1] == 13
    assert (blocks[:, 0] == 5).all()
    found = []
    for row in blocks.tolist():
        used = row.index(PAD) if PAD in row else len(row)
        assert row[used:] == [PAD] * (len(row) - used)
        found += sample.finished(row[1:used], 5) or [row[1:used]]
    found += [[]] * order.count(2)  # a story of no tokens but its end
    expected = [[100 + index] * min(lengths[index] - 1, 12) for index in order]
    assert sorted(found) == sorted(expected)


def test_places_do_not_overlap() -> None:
    rng = random.Random(1)
    lengths = [rng.randint(1, 50) for _ in range(500)]
    rows, columns, count = place(lengths, 64)
    taken = [(row, column + i) for row, column, n in zip(rows, columns, lengths, strict=True) for i in range(n)]
    assert len(set(taken)) == sum(lengths)
    assert max(column for _, column in taken) < 64
    assert {row for row, _ in taken} == set(range(count))
    assert count < 1.2 * sum(lengths) / 64


def test_what_is_unfinished_is_dropped() -> None:
    assert sample.finished([7, 8, 0, 9, 0, 0, 6], end=0) == [[7, 8], [9]]
    assert sample.finished([7, 8], end=0) == []


def test_workers_parts_are_merged(tmp_path: Path) -> None:
    """A story that two workers wrote counts once; a part without its counts was not finished."""
    for index, stories in enumerate([["One.", "Two."], ["Two.", "Three."], ["Four."]]):
        write_stories(tmp_path / f"sampled-{index}.jsonl", stories)
        if index < 2:
            (tmp_path / f"sampled-{index}.json").write_text(json.dumps({"kept": 2, "too short": 1}))
    assert sample.merge(tmp_path) == {"kept": 3, "too short": 2, "was there before": 1, "workers": 2}
    assert read_stories(tmp_path / "sampled.jsonl") == ["One.", "Two.", "Three."]


def test_no_story_at_all_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no story"):
        sample.merge(tmp_path)


def test_the_sampled_stories_are_the_teachers(root: Path) -> None:
    stories = read_stories(root / "work" / "sampled.jsonl")
    counts = json.loads((root / "work" / "counts.json").read_text())["sample"]
    assert counts["kept"] == len(stories) > 0
    assert counts["tokens made"] % (4 * sample.Sampling().tokens) == 0


def test_both_models_learn(root: Path) -> None:
    for stage in ("teacher", "train"):
        entries = [json.loads(line) for line in (root / "out" / f"losses-{stage}.jsonl").read_text().splitlines()]
        assert entries[-1]["loss"] < 0.8 * entries[0]["loss"], stage
        assert entries[-1]["progress"] >= 1
        held = [entry["validation"] for entry in entries if "validation" in entry]
        best = json.loads((root / "work" / "counts.json").read_text())[stage]
        assert best == min(held) < 0.9 * held[0]


def test_the_best_weights_are_the_ones_that_are_kept() -> None:
    """What is trained here is not what is validated, which so gets worse and worse."""

    def encode(text: str) -> list[int]:
        return [ord(character) for character in text]

    stories, other = (Tokens.encode([letters * 30] * 8, encode, end=0) for letters in ("abc", "xyz"))
    recipe = Recipe(block=100, batch=4, learning_rate=1e-2, epochs=6, warm_up=1)
    entries: list[dict[str, Any]] = []
    model = llama.Llama(ModelConfig.from_dict(CONFIG), 100)
    llama.initialise(model)  # all tokens alike: what it can still lose, it loses
    best = fit(model, stories, [1] * 8, other, recipe, 600, entries.append)
    held = [entry["validation"] for entry in entries]
    assert best == min(held) < held[-1]
    assert validate(model, pack(other, range(8), 100), other.num_bytes, 4) == pytest.approx(best, rel=1e-5)


def test_a_run_ends_with_its_epochs() -> None:
    """The rate is zero at the end, and there are as many steps as the epochs ask for."""
    stories = Tokens.encode(made_up_stories(9), lambda text: [ord(c) for c in text], end=0)
    recipe = Recipe(block=128, batch=2, learning_rate=1e-3, epochs=2, warm_up=3)
    entries: list[dict[str, Any]] = []
    model = llama.Llama(ModelConfig.from_dict(CONFIG), 128)
    fit(model, stories, [1] * 9, stories, recipe, 600, entries.append)
    assert entries[-1]["step"] == 2 * (9 // 2) - 1  # nine stories of more than half a block: four steps an epoch
    assert entries[-1]["progress"] == 1
    entries.clear()
    fit(model, stories, [1] * 9, stories, recipe, 0, entries.append)
    assert [entry["step"] for entry in entries] == [0]  # no time: one step
    assert rate(0.0, 0, recipe) == pytest.approx(1e-3 / 3)
    assert rate(0.5, 100, recipe) == pytest.approx(5e-4)
    assert rate(1.0, 100, recipe) == 0


@pytest.mark.parametrize("name", ["stories", "teacher"])
def test_minillm_computes_the_logits_of_training(root: Path, name: str) -> None:
    model = llama.load(root / "work" / name, 512)
    with LLM(root / "work" / name, device="cpu", max_batch_size=1) as llm:
        ids = evaluate.story_ids(llm, made_up_stories(1)[0])
        theirs = llm.logits(ids)
    with torch.no_grad():
        ours = model(torch.tensor([ids]))[0]
    assert ours.std() > 0.5  # it has learned something
    torch.testing.assert_close(theirs, ours, atol=1e-4, rtol=1e-4)


def test_the_bundled_shape() -> None:
    config = ModelConfig.from_dict(train.CONFIG)
    assert 4.5e6 < config.parameter_count < 5.5e6
    assert sum(p.numel() for p in llama.Llama(config, 512).parameters()) == config.parameter_count


def test_models_that_are_not_plain_are_refused() -> None:
    with pytest.raises(ValueError, match="plain Llama"):
        llama.Llama(ModelConfig.from_dict(CONFIG | {"attention_bias": True}), 512)


def longest_by_hand(text: str, stories: list[str]) -> int:
    words = words_of(text)
    texts = [" " + " ".join(words_of(story)) + " " for story in stories]
    runs = [(i, j) for i in range(len(words)) for j in range(i + 1, len(words) + 1)]
    return max((j - i for i, j in runs if any(f" {' '.join(words[i:j])} " in t for t in texts)), default=0)


def test_the_longest_shared_run() -> None:
    real = made_up_stories(20)
    texts = [real[3], "Nobody else ever says this!", real[0][:120] + " and then " + real[1][:200], ""]
    found = evaluate.longest_shared_runs(texts, real, CPU)
    assert found == [longest_by_hand(text, real) for text in texts]
    assert found[0] == len(words_of(real[3]))
    assert found[3] == 0


def test_distinct() -> None:
    assert evaluate.distinct(["a b c d", "a b c e"]) == 3 / 4
    assert evaluate.distinct(["a"]) == 0


def test_the_figures_of_the_card(root: Path) -> None:
    """Recomputed in another way from what lies in the out directory."""
    figures = json.loads((root / "out" / "evaluation.json").read_text())
    model = llama.load(root / "out" / "stories", 512)
    encode = Tokenizer.from_file(str(root / "out" / "stories" / "tokenizer.json")).encode
    nats, size, stories = 0.0, 0, read_stories(root / "work" / "held_out.jsonl")
    for story in stories:
        ids = torch.tensor([[0, *encode(story).ids, 0]])
        with torch.no_grad():
            nats += llama.summed_nll(model, ids)[0].item()
        size += len(story)
    assert figures["student_stories"] == figures["teacher_stories"] == len(stories)
    assert figures["student_nats_per_byte"] == pytest.approx(nats / size, rel=1e-4)
    samples = figures["samples"]
    trigrams = [tuple(w[i : i + 3]) for w in (words_of(s["text"]) for s in samples) for i in range(len(w) - 2)]
    assert figures["distinct_3"] == pytest.approx(len(set(trigrams)) / len(trigrams))
    card = (root / "out" / "stories" / "README.md").read_text()
    longest = max(sample["longest_real"] for sample in samples)
    longest_sampled = max(sample["longest_sampled"] for sample in samples)
    for figure in (
        f"{nats / size:.4f}",
        f"{figures['teacher_nats_per_byte']:.4f}",
        f"distinct-3 {figures['distinct_3']:.3f}",
    ):
        assert figure in card
    assert f"is {longest} words, with a sampled one {longest_sampled}" in card


def test_the_samples_of_the_card_can_be_made_again(root: Path) -> None:
    samples = json.loads((root / "out" / "evaluation.json").read_text())["samples"]
    assert [sample["seed"] for sample in samples] == list(range(20))
    with LLM(root / "out" / "stories", device="cpu", max_batch_size=1) as llm:
        for wanted in (samples[2], samples[17]):
            params = SamplingParams(max_tokens=496, temperature=0.8, seed=wanted["seed"])
            assert wanted["prompt"] + llm.generate(wanted["prompt"], params).text == wanted["text"]


def test_a_second_run_does_nothing_again(root: Path) -> None:
    kept = [
        path
        for folder in ("work", "out")
        for path in (root / folder).rglob("*")
        if path.suffix in (".json", ".safetensors")
    ]
    before = {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in kept}
    main(command(root))
    assert before == {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in kept}
    assert (root / "out" / "log.txt").read_text().count("not run again") == 5
