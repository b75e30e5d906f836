"""Text, vocabulary, windows, epochs: each test names the mistake that would turn it red."""

import pickle
import re

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import char_dataset
from char_dataset import (
    CharDataset,
    CharVocabulary,
    DataConfig,
    WindowSampler,
    evaluation_batches,
    split_codes,
)

# No deadline: the first example of a session pays for imports and caches, and would look slow.
properties = settings(deadline=None, max_examples=60)


def positions(length: int) -> np.ndarray:
    """A text in which every character is different and says where it stands."""
    return np.arange(length, dtype=np.uint16)


@pytest.mark.parametrize(
    "wrong",
    [
        {"block_size": 0},
        {"train_split": 0.0},
        {"train_split": 1.0},
        {"train_split": float("nan")},
        {"truncate": 0.0},
        {"truncate": 1.1},
        {"truncate": float("nan")},
    ],
)
def test_bad_data_configuration_is_refused(wrong):
    """Catches a value outside its range that is noticed late, or never."""
    (name, value), *_ = wrong.items()
    with pytest.raises(ValueError, match=rf"^data_config\.{name}={value}: must [^\n]*$"):
        DataConfig(**wrong)


# --- Vocabulary ------------------------------------------------------------------------------------------------------


@properties
@given(st.text())
@example("")
@example("\x00a\uffff\U0010ffff😀𝄞a")
def test_decode_is_the_inverse_of_encode(text):
    """Catches codes per UTF-16 unit or byte (wrong beyond the basic plane), and an index off by one."""
    vocabulary = CharVocabulary.of(text)
    codes = vocabulary.encode(text)
    assert codes.dtype == torch.int64
    assert codes.shape == (len(text),)
    assert vocabulary.decode(codes) == text
    # The definition, by a plain loop: a character's code is its place among the sorted ones.
    ordered = sorted(set(text))
    assert len(vocabulary) == len(ordered)
    assert codes.tolist() == [ordered.index(c) for c in text]


@properties
@given(st.text(min_size=1), st.integers(1, 5))
def test_encoding_in_chunks_changes_nothing(text, chunk):
    """Catches a character lost or shifted where two chunks meet."""
    whole = CharVocabulary.of(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(char_dataset, "CHUNK", chunk)
        pieces = CharVocabulary.of(text)
        assert pieces.characters == whole.characters
        np.testing.assert_array_equal(pieces.encode_array(text), whole.encode_array(text))


@properties
@given(st.text(min_size=1))
def test_vocabulary_is_rebuilt_from_what_a_snapshot_stores(text):
    """Catches a vocabulary that needs the corpus, or whose order depends on the text's order or on hashing."""
    vocabulary = CharVocabulary.of(text)
    rebuilt = CharVocabulary(str(vocabulary.characters))
    assert torch.equal(rebuilt.encode(text), vocabulary.encode(text))
    assert CharVocabulary.of(text[::-1]).characters == vocabulary.characters


def test_a_text_is_no_vocabulary():
    """Catches a text given as its own vocabulary, as one might type it: 30,000 codes, most of them never seen."""
    with pytest.raises(ValueError, match=r"11 characters, 8 of them different; .* CharVocabulary\.of\(text\)"):
        CharVocabulary("hello world")


def test_part_of_a_text_fits_the_vocabulary_of_the_whole():
    """Catches codes that depend on which part of the text is encoded (row 10: snapshots stop fitting)."""
    text = "a zebra and a fox"
    vocabulary = CharVocabulary.of(text)
    assert torch.equal(vocabulary.encode(text)[:7], vocabulary.encode(text[:7]))


@pytest.mark.parametrize(("size", "dtype"), [(1, np.uint8), (256, np.uint8), (257, np.uint16), (65537, np.uint32)])
def test_codes_take_the_smallest_type(size, dtype):
    """Catches eight bytes for a character, and a type one too small, in which code 256 becomes 0."""
    text = "".join(map(chr, range(0x10000, 0x10000 + size)))
    vocabulary = CharVocabulary.of(text)
    codes = vocabulary.encode_array(text)
    assert codes.dtype == dtype
    np.testing.assert_array_equal(codes, np.arange(size))
    assert vocabulary.decode(vocabulary.encode(text[-3:])) == text[-3:]


@pytest.mark.parametrize(
    ("text", "unknown"),
    [("ab?b!", "!?"), ("a😀", "😀"), ("\x00a", "\x00"), ("b`", "`"), ("a\ud800", "\ud800")],
    ids=["between", "above the highest", "below the lowest", "just below", "half a character"],
)
def test_unknown_characters_are_named(text, unknown):
    """Catches a KeyError or IndexError, and unknown characters that silently take code 0."""
    expected = re.escape(f"unknown characters {unknown!r}; the vocabulary has these 3: 'abz'")
    with pytest.raises(ValueError, match=f"^{expected}$"):
        CharVocabulary("abz").encode(text)


def test_half_a_character_is_no_question_mark():
    """Catches an encoding that puts "?" for what it can't express, where "?" is a known character."""
    with pytest.raises(ValueError, match="unknown characters"):
        CharVocabulary("?ab").encode("a\ud800")


def test_empty_vocabulary_knows_nothing():
    """Catches an IndexError at the edge."""
    with pytest.raises(ValueError, match="unknown characters"):
        CharVocabulary("").encode("a")


def test_a_text_without_a_prompt_starts_with_a_known_character():
    """Catches a newline that the vocabulary of a text in one line doesn't have: an error instead of a sample."""
    assert CharVocabulary.of("one\nand two").start == "\n"
    for text in ("a single line", "\t~", "李"):
        assert CharVocabulary.of(text).start in text


# --- Split -----------------------------------------------------------------------------------------------------------


@properties
@given(st.integers(40, 400), st.floats(0.2, 0.8), st.floats(0.5, 1.0), st.integers(1, 3))
def test_parts_are_contiguous_and_share_nothing(length, train_split, truncate, block_size):
    """Catches a split over windows (row 8): a training window must not reach a character that is evaluated."""
    config = DataConfig(block_size=block_size, train_split=train_split, truncate=truncate)
    training, evaluation = split_codes(positions(length), config)
    kept = int(length * truncate)
    np.testing.assert_array_equal(np.concatenate((training, evaluation)), np.arange(kept))
    assert abs(len(training) - kept * train_split) <= 1  # at most one character is lost to rounding

    seen_in_training = {c for x, y in CharDataset(training, block_size) for c in (*x.tolist(), *y.tolist())}
    evaluated = {c for x, y in evaluation_batches(evaluation, block_size, 4, 0, 1) for c in y.flatten().tolist()}
    assert not seen_in_training & evaluated


@pytest.mark.parametrize(
    "edge", [{"truncate": 1.0}, {"block_size": 1}, {"train_split": 0.01}, {"train_split": 0.99}], ids=str
)
def test_the_edges_of_the_ranges_are_allowed(edge):
    """Catches a limit that shuts out its own value, so that what the message allows is refused."""
    training, evaluation = split_codes(positions(1000), DataConfig(**{"block_size": 4, **edge}))
    assert len(training) + len(evaluation) == 1000


@pytest.mark.parametrize(("length", "cut"), [(15, 13), (16, 14), (19, 17), (20, 18)])
def test_the_cut_is_rounded_down(length, cut):
    """Catches a cut that moves by one character: every older snapshot would be refused as one of another text."""
    training, evaluation = split_codes(positions(length), DataConfig(block_size=1, train_split=0.9))
    assert (len(training), len(evaluation)) == (cut, length - cut)


def test_split_is_a_pure_function():
    """Catches a split drawn at random (row 9): other ranks and restarts would train on what this one evaluates."""
    codes, config = positions(100), DataConfig(block_size=4)
    np.random.seed(1)  # noqa: NPY002  # the global state that must have no influence
    torch.manual_seed(1)
    first = split_codes(codes, config)
    np.random.seed(2)  # noqa: NPY002
    torch.manual_seed(2)
    second = split_codes(codes, config)
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)
        assert np.shares_memory(a, codes)  # a view: a large text isn't held twice


@pytest.mark.parametrize(
    ("length", "train_split", "which", "found"), [(20, 0.2, "training", 4), (20, 0.8, "evaluation", 4)]
)
def test_text_too_short_is_explained(length, train_split, which, found):
    """Catches `__len__() should return >= 0` in place of the path, the length found and the length needed."""
    config = DataConfig(path="short.txt", block_size=4, train_split=train_split)
    with pytest.raises(
        ValueError, match=rf"^data_config\.path=short\.txt: the {which} part .* {found} characters, .* 5;[^\n]*$"
    ):
        split_codes(positions(length), config)
    # One character more in each part is enough.
    split_codes(positions(25), DataConfig(block_size=4, train_split=train_split))


# --- Windows ---------------------------------------------------------------------------------------------------------


@properties
@given(st.integers(1, 20), st.integers(1, 60))
def test_window_starts_at_its_index(block_size, more):
    """Catches y equal to x or shifted twice, a start multiplied by block_size, and a last window off by one."""
    length = block_size + more
    codes = (positions(length) * 7 % 251).astype(np.uint8)
    dataset = CharDataset(codes, block_size)
    assert len(dataset) == more
    for i in (0, more // 2, more - 1):
        x, y = dataset[i]
        assert x.dtype == y.dtype == torch.int64
        assert x.tolist() == codes[i : i + block_size].tolist()
        assert y.tolist() == codes[i + 1 : i + block_size + 1].tolist()


@properties
@given(st.integers(1, 9), st.lists(st.integers(0, 50), min_size=1, max_size=20))
def test_batch_equals_its_windows_stacked(block_size, starts):
    """Catches a batch path that disagrees with the path of single windows."""
    dataset = CharDataset(positions(block_size + 51), block_size)
    x, y = dataset.__getitems__(starts)
    assert torch.equal(x, torch.stack([dataset[i][0] for i in starts]))
    assert torch.equal(y, torch.stack([dataset[i][1] for i in starts]))


class CountingWindows:
    """Stands in for an array and counts how often it is indexed."""

    def __init__(self, array):
        self.array, self.count = array, 0

    def __len__(self):
        return len(self.array)

    def __getitem__(self, index):
        self.count += 1
        return self.array[index]


def test_batch_is_one_indexing_operation():
    """Catches a Python loop over windows (row 11), and a DataLoader that doesn't find `__getitems__`."""
    codes = positions(200)
    dataset = CharDataset(codes, 8)
    assert np.shares_memory(dataset.windows, codes)  # encoded once, kept once: windows are views
    dataset.windows = CountingWindows(dataset.windows)
    batches = list(DataLoader(dataset, batch_size=64, collate_fn=lambda batch: batch))
    assert [tuple(x.shape) for x, _ in batches] == [(64, 8), (64, 8), (64, 8)]
    assert dataset.windows.count == 3


# --- Epochs ----------------------------------------------------------------------------------------------------------


@st.composite
def epochs(draw):
    """Sizes of a text and a step that leave at least one step: (length, block_size, batch_size, ranks)."""
    ranks = draw(st.integers(1, 4))
    batch_size = ranks * draw(st.integers(1, 4))
    block_size = draw(st.integers(1, 7))
    length = batch_size * block_size + 1 + draw(st.integers(0, 150))
    return length, block_size, batch_size, ranks


def epoch_of(length, block_size, batch_size, ranks, rank, seed=0, epoch=0, first_step=0):
    """The windows of one rank in one epoch, from a new sampler."""
    sampler = WindowSampler(CharDataset(positions(length), block_size), batch_size, ranks, rank, seed)
    sampler.set_epoch(epoch, first_step)
    starts = [int(start) for start in sampler]
    assert len(sampler) == len(starts)
    return starts


@properties
@given(epochs(), st.integers(0, 9), st.integers(0, 9))
def test_epoch_is_one_pass_without_padding_or_overlap(sizes, seed, epoch):
    """Catches padding and repetition (row 13), overlapping windows, lost text, and windows beyond the end."""
    length, block_size, batch_size, ranks = sizes
    shares = [epoch_of(*sizes, rank, seed, epoch) for rank in range(ranks)]
    assert len({len(share) for share in shares}) == 1  # all ranks make equally many steps
    targets = [start + 1 + i for share in shares for start in share for i in range(block_size)]
    assert len(targets) == len(set(targets))  # none twice
    assert set(targets) <= set(range(1, length))  # character 0 has no predecessor: it can't be a target
    # A multiple of one global batch, and less than one is left to the next epoch.
    assert len(targets) % (batch_size * block_size) == 0
    assert length - 1 - len(targets) < batch_size * block_size


@properties
@given(st.integers(1, 7), st.integers(0, 150), st.integers(0, 3), st.integers(0, 3))
def test_step_has_the_same_windows_for_every_number_of_ranks(block_size, more, epoch, first_step):
    """Catches an order that depends on the number of ranks, and a restart that repeats or skips windows."""
    B = 12  # windows of a step; 1, 2, 3 and 4 ranks divide it
    length = 4 * B * block_size + 1 + more
    alone = epoch_of(length, block_size, B, 1, 0, epoch=epoch)
    steps = [set(alone[first : first + B]) for first in range(0, len(alone), B)]
    for ranks in (1, 2, 3, 4):
        shares = [epoch_of(length, block_size, B, ranks, r, 0, epoch, first_step) for r in range(ranks)]
        b = B // ranks
        found = [{w for share in shares for w in share[i : i + b]} for i in range(0, len(shares[0]), b)]
        assert found == steps[first_step:]


def test_epochs_differ_and_a_rerun_repeats_them():
    """Catches a sampler that ignores set_epoch (row 12), or draws from a global generator."""
    sizes = (1000, 8, 4, 2, 1)
    first = [epoch_of(*sizes, seed=5, epoch=epoch) for epoch in range(4)]
    torch.manual_seed(99)  # the global state that must have no influence
    again = [epoch_of(*sizes, seed=5, epoch=epoch) for epoch in range(4)]
    assert first == again
    assert len({tuple(order) for order in first}) == 4
    # Not the phase alone differs: the order of the windows, too.
    assert len({tuple(start // 8 for start in order) for order in first}) == 4
    assert first[0] != epoch_of(*sizes, seed=6, epoch=0)
    assert first[0] != sorted(first[0])


def test_no_seed_repeats_another_ones_epochs():
    """Catches seed and epoch that are added: epoch 1 of seed 7 would be epoch 0 of seed 8."""
    orders = {tuple(epoch_of(1000, 8, 4, 1, 0, seed=seed, epoch=epoch)) for seed in range(6) for epoch in range(6)}
    assert len(orders) == 36


def test_every_phase_occurs():
    """Catches a phase that is always 0 (a window's first target never has a longer context), or draws too few."""
    phases = {epoch_of(1000, 8, 4, 1, 0, epoch=epoch)[0] % 8 for epoch in range(200)}
    assert phases == set(range(8))


@pytest.mark.parametrize(("length", "block_size", "batch_size"), [(103, 10, 2), (200, 8, 7)])
def test_every_target_is_drawn_in_some_epoch(length, block_size, batch_size):
    """Catches the end of the text left out in every epoch: windows beyond the full steps, targets of the last phase."""
    drawn = set()
    for epoch in range(300):
        for start in epoch_of(length, block_size, batch_size, 1, 0, epoch=epoch):
            drawn |= set(range(start + 1, start + block_size + 1))
    assert drawn == set(range(1, length))


def test_first_step_lasts_for_one_epoch_only():
    """Catches a restart in the middle of an epoch that shortens every later epoch as well."""
    sampler = WindowSampler(CharDataset(positions(1000), 8), 4, 1, 0, 0)
    sampler.set_epoch(0, 5)
    assert len(sampler) == len(list(sampler)) == 4 * (sampler.steps_per_epoch - 5)
    sampler.set_epoch(1)
    assert len(sampler) == len(list(sampler)) == 4 * sampler.steps_per_epoch


def test_a_new_sampler_begins_at_the_beginning():
    """Catches a sampler that can't be used before set_epoch, or leaves out the first step then."""
    sampler = WindowSampler(CharDataset(positions(1000), 8), 4, 1, 0, 0)
    assert [int(start) for start in sampler] == epoch_of(1000, 8, 4, 1, 0)
    assert len(sampler) == 4 * sampler.steps_per_epoch


def test_text_too_short_for_a_step_is_explained():
    """Catches an epoch of no steps, which ends at once or loops for ever."""
    with pytest.raises(ValueError, match=r"^the training text has 32 characters, .* needs 33; [^\n]*$"):
        WindowSampler(CharDataset(positions(32), 8), 4, 2, 0, 0)
    assert len(epoch_of(33, 8, 4, 2, 0)) == 2  # one character more makes one step


# --- Evaluation ------------------------------------------------------------------------------------------------------


@properties
@given(st.integers(0, 120), st.integers(1, 9), st.integers(1, 5), st.integers(1, 4))
def test_every_target_is_scored_exactly_once(length, block_size, batch_size, ranks):
    """Catches padding that scores windows twice (row 13), a lost short tail, and targets out of step with inputs."""
    scored = []
    for rank in range(ranks):
        for x, y in evaluation_batches(positions(length), block_size, batch_size, rank, ranks):
            assert x.dtype == y.dtype == torch.int64
            assert x.shape == y.shape
            assert 1 <= x.size(0) <= batch_size
            assert x.size(1) == block_size
            counts = y != -1
            assert torch.equal(y[counts], x[counts] + 1)  # in this text, the next character is one more
            # Within a window, nothing but characters of that window precedes a target.
            first = x[:, :1] + torch.arange(block_size)
            assert torch.equal(x[counts], first[counts])
            scored += y[counts].tolist()
    assert sorted(scored) == list(range(1, length))


def test_shares_of_the_evaluation_are_even():
    """Catches one rank that evaluates all alone while the others wait, or one that calls a sharded model once less."""
    batches = [[*evaluation_batches(positions(83), 8, 3, rank, 4)] for rank in range(4)]
    assert {tuple(len(x) for x, _ in share) for share in batches} == {(3,)}  # 11 windows, and an empty one
    assert [int((y[:, 0] != -1).sum()) for share in batches for _, y in share] == [3, 3, 3, 2]


def test_what_is_near_an_unknown_character():
    """Catches 65 known characters in place of the one that could be typed instead."""
    known = CharVocabulary("\n !',-.?abcdefghijklmnopqrstuvwxyzE")
    with pytest.raises(ValueError, match="unknown characters") as error:
        known.encode("é — “É” ’ﬁ李\u2026\u00a0")
    line = str(error.value)
    for odd, near in {"é": "e", "—": "-", "É": "E", "ﬁ": "fi", "…": "...", "\xa0": " "}.items():
        assert f"{odd!r} -> {near!r}" in line
    assert line.count('"\'"') >= 3  # both double quotes, of which the vocabulary has none, and the apostrophe
    assert "'李' ->" not in line
    assert line.index("é") < line.index("the vocabulary has these 35")
    with pytest.raises(ValueError, match=r"the vocabulary has 5000$"):
        CharVocabulary("".join(map(chr, range(20_000, 25_000)))).encode("a")


def test_a_pickled_dataset_is_no_larger_than_its_text():
    """Catches all windows in the bytes that a spawned worker gets: block_size times the text."""
    dataset = CharDataset(np.arange(10_000, dtype=np.uint8), 100)
    content = pickle.dumps(dataset)
    assert len(content) < 11_000
    x, y = pickle.loads(content)[5]
    assert torch.equal(x, dataset[5][0])
    assert torch.equal(y, dataset[5][1])
