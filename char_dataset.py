"""Text -> vocabulary -> windows -> epochs.

The first module to read; `model.py` comes next. It avoids three common mistakes: the text is split *before* it is cut
into windows, the vocabulary comes from the *whole* text, and the text is encoded *once*, not item by item.

Legend: N characters of text, T = block_size characters in a window, B windows in a batch, V characters in the
vocabulary.
"""

import copyreg
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, DistributedSampler


class CharVocabulary:
    """The characters that a model knows, sorted; a character's code is its index in that order.

    Args:
        characters: each known character once, sorted. `CharVocabulary.of` collects them from a text. A snapshot
            stores this string, and needs nothing else to rebuild the vocabulary.

    Raises:
        ValueError: a character comes twice.
    """

    def __init__(self, characters: str):
        check_distinct(characters)
        self.characters = characters
        self.dtype = np.min_scalar_type(max(len(characters) - 1, 0))  # of codes: one byte each for most texts
        # The code of every Unicode number up to the highest known one; the last entry stands for all beyond it. Unknown
        # characters get 0, like the first character; `check_known` tells them apart.
        points = np.array([ord(c) for c in characters], dtype=np.int64)  # (V,)
        self.code_of_point = np.zeros(int(points.max(initial=-1)) + 2, dtype=self.dtype)
        self.code_of_point[points] = np.arange(len(points), dtype=self.dtype)

    @classmethod
    def of(cls, text: str) -> "CharVocabulary":
        """Collect the vocabulary of a text."""
        return cls(distinct_characters(text))  # sorted(set(text)), in a tenth of the time

    def __len__(self) -> int:
        return len(self.characters)

    def encode(self, text: str) -> Tensor:
        """Encode a text: int64 (N,). Raises ValueError that names the characters that are not in the vocabulary."""
        return torch.from_numpy(self.encode_array(text).astype(np.int64))

    def encode_array(self, text: str) -> np.ndarray:
        """Like `encode`, but an array of the smallest unsigned type: (N,)."""
        codes = np.empty(len(text), dtype=self.dtype)
        start = 0
        for points in code_points(text):  # the characters' Unicode numbers, some at a time
            chunk = codes[start : start + len(points)]
            # "clip" sends numbers beyond the table to its last entry, and lets numpy write straight into `codes`.
            self.code_of_point.take(points, out=chunk, mode="clip")
            check_known(self, text, points, chunk)
            start += len(points)
        return codes

    def decode(self, codes: Tensor) -> str:
        """The text of codes (N,), the inverse of `encode`."""
        return "".join(self.characters[code] for code in codes.tolist())

    @property
    def start(self) -> str:
        """What a text without a prompt begins after: a newline, or any character where the text had no lines."""
        return "\n" if "\n" in self.characters else self.characters[0]


@dataclass
class DataConfig:
    """`data_config` of `gpt2_train_cfg.yaml`, which explains each key."""

    path: str = "data/input.txt"
    block_size: int = 128
    train_split: float = 0.9
    truncate: float = 1.0

    def __post_init__(self) -> None:
        check_data_config(self)


def split_codes(codes: np.ndarray, config: DataConfig) -> tuple[np.ndarray, np.ndarray]:
    """Cut the text into a training part and an evaluation part: one cut, before any windows are made.

    Windows drawn from one text and *then* split at random overlap: nearly every test window has a training window
    shifted by one character, and the evaluation measures memorisation. Here the two parts share no character. Where
    the cut lies is a function of the text and the fraction alone, the same on every rank and after every restart.

    Returns:
        (codes of the training text, codes of the evaluation text), views of `codes`.

    Raises:
        ValueError: a part is too short for one window of block_size characters and its last target.
    """
    codes = codes[: int(len(codes) * config.truncate)]
    cut = int(len(codes) * config.train_split)
    train_codes, eval_codes = codes[:cut], codes[cut:]
    check_length("training", train_codes, config)
    check_length("evaluation", eval_codes, config)
    return train_codes, eval_codes


@dataclass(frozen=True)
class Text:
    """What a run makes of its text: the vocabulary, and both parts in the vocabulary's codes."""

    vocabulary: CharVocabulary
    train_codes: np.ndarray  # (N,)
    eval_codes: np.ndarray  # (N,)

    @classmethod
    def of(cls, text: str, config: DataConfig) -> "Text":
        """Collect the vocabulary of the whole text, encode it once, and split it. Raises as `split_codes`."""
        vocabulary = CharVocabulary.of(text)
        return cls(vocabulary, *split_codes(vocabulary.encode_array(text), config))

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256, hexadecimal: tells this text from every other one, and from the same one cut elsewhere."""
        digest = hashlib.sha256(self.vocabulary.characters.encode("utf-8", "surrogatepass"))
        for codes in (self.train_codes, self.eval_codes):
            digest.update(str(codes.shape).encode())
            digest.update(np.ascontiguousarray(codes).data)
        return digest.hexdigest()


class CharDataset(Dataset):
    """All windows of an encoded text: `dataset[i]` is the one that starts at character i.

    Args:
        codes: the encoded text (N,), any unsigned type; it is not copied.
        block_size: T, characters in a window.
    """

    def __init__(self, codes: np.ndarray, block_size: int):
        self.codes, self.block_size = codes, block_size
        # A view, not a copy: row i is codes[i : i + T + 1], a window and its last target.  (N - T, T + 1)
        self.windows = np.lib.stride_tricks.sliding_window_view(codes, block_size + 1)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, start: int) -> tuple[Tensor, Tensor]:
        """Window `start`: (x, y), each int64 (T,); y is x one character later."""
        x, y = self.__getitems__([start])
        return x[0], y[0]

    def __getitems__(self, starts: list[int]) -> tuple[Tensor, Tensor]:
        """Several windows by one indexing operation: (x, y), each int64 (B, T). DataLoader calls this by itself."""
        windows = self.windows[np.asarray(starts)]  # (B, T + 1)
        x = torch.from_numpy(windows[:, :-1].astype(np.int64))  # (B, T)
        y = torch.from_numpy(windows[:, 1:].astype(np.int64))  # (B, T)
        return x, y


class WindowSampler(DistributedSampler):
    """The order of an epoch: which windows make up each optimizer step, and which of them are this rank's.

    An epoch is one pass over the text. It cuts the text at a random phase into windows that touch and don't overlap,
    so that no character is a target twice; it shuffles them; and it leaves out a remainder smaller than one global
    batch, another one in each epoch. Phase and order depend on (seed, epoch) alone: the B windows of an optimizer step
    are the same however many ranks share them. (DistributedSampler itself would pad, and so repeat, to make shares
    equal.)

    For example, 103 characters make 102 targets. With T = 10 and B = 2 an epoch has 102 // 20 = 5 steps of 20 targets
    each. 2 targets are left over (the slack), so the first window may begin at character 0, 1 or 2 (the phase).

    Args:
        dataset: the windows to choose from.
        batch_size: B, windows of one optimizer step over all ranks; a multiple of num_replicas.
        num_replicas: how many ranks share each step, as torch's samplers call it.
        rank: which of them this is.
        seed: of phase and order; at least 0.

    Attributes:
        steps_per_epoch: optimizer steps in an epoch.
        targets: characters of the text that can be targets: all but the first.

    Raises:
        ValueError: the text is too short for a single step.
    """

    def __init__(self, dataset: CharDataset, batch_size: int, num_replicas: int, rank: int, seed: int):
        super().__init__(dataset, num_replicas=num_replicas, rank=rank, seed=seed)
        self.batch_size, self.block_size = batch_size, dataset.block_size
        self.first_step = 0
        self.targets = len(dataset.codes) - 1
        self.steps_per_epoch = self.targets // (batch_size * self.block_size)
        check_one_step(self)

    def set_epoch(self, epoch: int, first_step: int = 0) -> None:
        """Choose the epoch of the next iteration, and the step in it to begin at (after a restart)."""
        super().set_epoch(epoch)
        self.first_step = first_step

    def __len__(self) -> int:
        return (self.steps_per_epoch - self.first_step) * self.batch_size // self.num_replicas

    def __iter__(self) -> Iterator[int]:
        T, B = self.block_size, self.batch_size
        random = np.random.default_rng([self.seed, self.epoch])
        slack = self.targets - self.steps_per_epoch * B * T  # targets that can't be in a full step of this epoch
        phase = random.integers(min(T, slack + 1))
        starts = phase + T * random.permutation((self.targets - phase) // T)
        starts = starts[self.first_step * B : self.steps_per_epoch * B]
        return iter(starts[self.rank :: self.num_replicas])


def evaluation_batches(
    codes: np.ndarray, block_size: int, batch_size: int, rank: int, world_size: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield one rank's share of an evaluation in which every target of the text counts exactly once over all ranks.

    Args:
        codes: the encoded evaluation text (N,).
        block_size: T, characters in a window; the last window may be shorter.
        batch_size: windows in a batch.
        rank, world_size: windows rank, rank + world_size, ... are this rank's. All shares are equally long; an empty
            window may stand at the end.

    Yields:
        (x, y), each int64 (B, T); where there is nothing to predict, y is -1, which the loss ignores, x is anything.
    """
    starts = equal_shares(np.arange(0, len(codes) - 1, block_size), world_size, empty=len(codes))[rank::world_size]
    for first in range(0, len(starts), batch_size):
        positions = starts[first : first + batch_size, None] + np.arange(block_size)  # (B, T)
        is_inside = positions < len(codes) - 1
        positions = np.where(is_inside, positions, 0)
        x = torch.from_numpy(codes[positions].astype(np.int64))  # (B, T)
        y = torch.from_numpy(np.where(is_inside, codes[positions + 1], np.int64(-1)))  # (B, T)
        yield x, y


# ---------------------------------------------------------------------- armour: large texts, odd texts, wrong settings

# A process that isn't forked gets its dataset as bytes: the text's, and not those of all its windows.
copyreg.pickle(CharDataset, lambda dataset: (CharDataset, (dataset.codes, dataset.block_size)))


def equal_shares(starts: np.ndarray, world_size: int, empty: int) -> np.ndarray:
    """Fill up window starts with those of empty windows, until every rank has equally many.

    Ranks that hold a model in shards go through it together, and must do so equally often.
    """
    return np.append(starts, np.full(-len(starts) % world_size, empty))


CHUNK = 1 << 18  # characters encoded at a time: the intermediate arrays stay in the processor's cache


def code_points(text: str) -> Iterator[np.ndarray]:
    """Yield the Unicode numbers of a text in chunks, uint8 or uint32, without a Python loop over its characters."""
    for start in range(0, len(text), CHUNK):
        chunk = text[start : start + CHUNK]
        if chunk.isascii():  # Python knows this without looking, and the copy is plain: a third of the time below
            yield np.frombuffer(chunk.encode("ascii"), dtype=np.uint8)
        else:
            # "surrogatepass": a prompt from a command line can hold half a character. It is unknown, and no crash.
            yield np.frombuffer(chunk.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)


def distinct_characters(text: str) -> str:
    """Each character of a text once, sorted."""
    seen = np.zeros(0x110000, dtype=bool)  # one flag for each Unicode number
    for points in code_points(text):
        if not seen.take(points).all():  # reading flags takes a third of the time of setting them
            seen[points] = True
    return "".join(map(chr, np.flatnonzero(seen)))


def check_distinct(characters: str) -> None:
    """Raise ValueError if a vocabulary repeats characters, as a text does."""
    different = len({*characters})
    if different < len(characters):
        raise ValueError(
            f"a vocabulary of {len(characters):,} characters, {different:,} of them different; each must occur once: "
            "to make one from a text, use CharVocabulary.of(text)"
        )


def check_known(vocabulary: CharVocabulary, text: str, points: np.ndarray, codes: np.ndarray) -> None:
    """Raise ValueError, which names all unknown characters of the text, if one is in this chunk of it."""
    first = ord(vocabulary.characters[0]) if vocabulary.characters else -1
    if ((codes == 0) != (points == first)).any():
        unknown = sorted(set(text) - set(vocabulary.characters))
        near = [f"{c!r} -> {known!r}" for c in unknown if (known := nearest(c, vocabulary.characters))]
        hint = f" (near: {', '.join(near)})" if near else ""
        listed = f"these {len(vocabulary)}: {vocabulary.characters!r}" if len(vocabulary) <= 200 else len(vocabulary)
        raise ValueError(f"unknown characters {''.join(unknown)!r}{hint}; the vocabulary has {listed}")


PUNCTUATION = {"‘’‚‛´`": "'", "“”„‟«»": "\"'", "‐‑‒–—―−": "-", "…": ".", "\t\u2028\u2029": " \n"}


def nearest(character: str, known: str) -> str:
    """What could stand for an unknown character: the letter without its accent, the plain dash or quote; or nothing."""
    import unicodedata  # a megabyte of tables, for this message alone

    plain = "".join(c for c in unicodedata.normalize("NFKD", character) if not unicodedata.combining(c))
    likely = [plain, *(c for odd, similar in PUNCTUATION.items() if character in odd for c in similar)]
    likely += [plain.casefold(), plain.upper(), " " if character.isspace() else ""]
    return next((text for text in likely if text and set(text) <= set(known)), "")


def check_length(name: str, part: np.ndarray, config: DataConfig) -> None:
    """Raise ValueError if a part of the text is too short for one window and its last target."""
    if len(part) < config.block_size + 1:
        raise ValueError(
            f"data_config.path={config.path}: the {name} part of the text has {len(part)} characters, and "
            f"block_size={config.block_size} needs at least {config.block_size + 1}; "
            "give a longer text or a smaller data_config.block_size"
        )


def check_one_step(sampler: WindowSampler) -> None:
    """Raise ValueError if the training text is too short for one optimizer step."""
    if sampler.steps_per_epoch == 0:
        B, T = sampler.batch_size, sampler.block_size
        smaller, larger = ("trainer_config.batch_size", "data_config.block_size")[:: 1 if T > B else -1]
        raise ValueError(
            f"the training text has {sampler.targets + 1} characters, and one step of batch_size={B} windows of "
            f"block_size={T} needs {B * T + 1}; lower {larger} or {smaller}, or give a longer text"
        )


def check_data_config(config: DataConfig) -> None:
    """Raise ValueError if a value is outside its range."""
    if config.block_size < 1:
        raise ValueError(f"data_config.block_size={config.block_size}: must be at least 1 character")
    if not 0.0 < config.train_split < 1.0:
        raise ValueError(f"data_config.train_split={config.train_split}: must lie between 0 and 1, both excluded")
    if not 0.0 < config.truncate <= 1.0:
        raise ValueError(f"data_config.truncate={config.truncate}: must be above 0 and at most 1 (the whole text)")
