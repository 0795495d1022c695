"""Streams of training batches: chats as token rows of similar length, pictures as patches."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from random import Random
from typing import Any, Final

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx_vlm.models.qwen3_vl.processing_qwen3_vl import Qwen3VLImageProcessor
from tokenizers import Tokenizer

from tools.demo_model.architecture import MERGE, PATCH, PICTURE_PIXELS
from tools.demo_model.conversations import Chat, Message, draw_chat, draw_facts, system_prompt
from tools.demo_model.fast_forward import CHUNK
from tools.demo_model.pictures import TRAINING_SIZES, Picture, draw_picture, picture_chat
from tools.demo_model.ranks import RANKS
from tools.demo_model.tokenizer import ANSWER_WEIGHT, TokenRow, encode_chat, special_ids
from tools.demo_model.world import PICTURE_COLOURS, PICTURE_SHAPES

Bytes = npt.NDArray[np.uint8]
Grid = tuple[int, int]
"""Patches down and across."""

TOKENS_IN_BATCH: Final = 2304 // RANKS
MAX_ROW_TOKENS: Final = 768
MAX_POSITION: Final = 4800
_CHATS_IN_POOL: Final = 1024


@dataclass(frozen=True)
class TextBatch:
    """Rows of chats: inputs, targets, weights [B, T]; positions [3, B, T]."""

    inputs: mx.array
    targets: mx.array
    weights: mx.array
    positions: mx.array


@dataclass(frozen=True)
class PictureBatch:
    """A text batch with one picture per row: patches [B, P, 768] of one grid.

    `sources` [B, T] is the index of the merged picture token of each token, counted over the batch;
    text tokens have the index after the last. `colours` and `shapes` [B] are classes.
    """

    text: TextBatch
    patches: mx.array
    grid: Grid
    sources: mx.array
    colours: mx.array
    shapes: mx.array


def _pad(rows: Sequence[TokenRow], positions: Sequence[npt.NDArray[np.int32]]) -> TextBatch:
    longest = max(len(row.tokens) for row in rows) - 1
    length = -(-longest // CHUNK) * CHUNK
    tokens = np.zeros((len(rows), length + 1), np.int32)
    weights = np.zeros((len(rows), length + 1), np.float32)
    padded_positions = np.zeros((3, len(rows), length), np.int32)
    for index, (row, row_positions) in enumerate(zip(rows, positions, strict=True)):
        tokens[index, : len(row.tokens)] = row.tokens
        weights[index, : len(row.tokens)] = row.weights
        padded_positions[:, index, : len(row.tokens) - 1] = row_positions[
            ..., : len(row.tokens) - 1
        ]
    return TextBatch(
        mx.array(tokens[:, :-1]),
        mx.array(tokens[:, 1:]),
        mx.array(weights[:, 1:]),
        mx.array(padded_positions),
    )


def _skipping_positions(random: Random, row: TokenRow) -> npt.NDArray[np.int32]:
    """Return positions, in one row of three with a jump before the first answer.

    Short rows then have distances as long as the longest system prompt (Zhu et al., "PoSE", 2023).
    """
    positions = np.arange(len(row.tokens), dtype=np.int32)
    if random.random() < 1 / 3:
        answers = (at for at, weight in enumerate(row.weights) if weight >= ANSWER_WEIGHT)
        first_answer = next(answers, len(row.tokens))
        jump = random.randint(0, MAX_POSITION - len(row.tokens))
        positions[random.randint(1, max(1, first_answer)) :] += jump
    return positions


def text_batches(
    tokenizer: Tokenizer,
    random: Random,
    order: Random,
    practice: Callable[[Random], Chat] | None = None,
    share: float = 0.0,
    *,
    end_weight: float = ANSWER_WEIGHT,
) -> Iterator[TextBatch]:
    """Yield batches of about TOKENS_IN_BATCH tokens, with rows of similar length.

    `practice` draws a `share` of the chats; the others are ordinary. The ends of answers have
    `end_weight` in the loss. Ranks that share `order` use rows of similar length in the same step,
    so that no rank waits.
    """

    def draw() -> Chat:
        if practice and random.random() < share:
            return practice(random)
        return draw_chat(random)

    while True:
        chats = (draw() for _ in range(_CHATS_IN_POOL))
        rows = [
            row
            for chat in chats
            if len((row := encode_chat(tokenizer, chat, end_weight)).tokens) <= MAX_ROW_TOKENS
        ]
        rows.sort(key=lambda row: len(row.tokens))
        batches: list[list[TokenRow]] = [[]]
        for row in rows:
            if len(batches[-1]) * len(row.tokens) > TOKENS_IN_BATCH:
                batches.append([])
            batches[-1].append(row)
        order_keys = [order.random() for _ in range(_CHATS_IN_POOL)]
        for _, batch in sorted(zip(order_keys, batches, strict=False), key=itemgetter(0)):
            yield _pad(batch, [_skipping_positions(random, row) for row in batch])


def long_batches(
    tokenizer: Tokenizer, random: Random, order: Random, longest: int
) -> Iterator[TextBatch]:
    """Yield batches of one chat with a system prompt of up to `longest` tokens.

    Ranks that share `order` use prompts of similar length in the same step.
    """
    while True:
        sentences = order.randint(longest // 40, longest // 9)
        row = _long_row(tokenizer, random, sentences)
        while len(row.tokens) > longest + 300:
            sentences = sentences * 9 // 10
            row = _long_row(tokenizer, random, sentences)
        yield _pad([row], [np.arange(len(row.tokens), dtype=np.int32)])


def _long_row(tokenizer: Tokenizer, random: Random, sentences: int) -> TokenRow:
    facts = draw_facts(random, random.randint(3, 8))
    messages = [Message("system", system_prompt(random, sentences, facts))]
    for fact in random.sample(facts, len(facts)):
        messages.append(Message("user", random.choice(fact.questions)))
        messages.append(Message("assistant", fact.answer))
    messages += [message for message in draw_chat(random) if message.role != "system"]
    return encode_chat(tokenizer, tuple(messages))


@dataclass(frozen=True)
class PatchedPicture:
    """A picture as bytes [P, 3, 256], with its labels."""

    patches: Bytes
    colour: str
    shape: str

    @property
    def classes(self) -> tuple[int, int]:
        """Return the indices of colour and shape; the last shape is none."""
        has_shape = self.shape in PICTURE_SHAPES
        shape = PICTURE_SHAPES.index(self.shape) if has_shape else len(PICTURE_SHAPES)
        return PICTURE_COLOURS.index(self.colour), shape


class PicturePool:
    """Pictures as patches of the processor, by grid.

    Half of the pictures of each batch are new and replace the oldest ones: a vision tower that sees
    few pictures memorises them.
    """

    def __init__(self) -> None:
        self._processor = Qwen3VLImageProcessor(
            patch_size=PATCH, merge_size=MERGE,
            min_pixels=PICTURE_PIXELS, max_pixels=PICTURE_PIXELS,
        )  # fmt: skip
        self._drawn: dict[Grid, deque[PatchedPicture]] = {}

    def fill(self, random: Random, count: int) -> Iterator[int]:
        """Draw `count` pictures; yield the number of pictures so far."""
        for number in range(1, count + 1):
            self.add(draw_picture(random, random.choice(TRAINING_SIZES)))
            yield number

    def add(self, picture: Picture) -> Grid:
        """Add a picture; return the grid of its patches."""
        processed: dict[str, Any] = self._processor([picture.image])
        _, down, across = (int(side) for side in processed["image_grid_thw"][0])
        pixels = processed["pixel_values"].reshape(-1, 3, 2, PATCH * PATCH)[:, :, 0]
        patches = np.round((pixels * 0.5 + 0.5) * 255).astype(np.uint8)
        grid = (down, across)
        patched = PatchedPicture(patches, picture.colour, picture.shape)
        self._drawn.setdefault(grid, deque()).append(patched)
        return grid

    def sample(self, random: Random, count: int) -> tuple[Grid, list[PatchedPicture]]:
        """Return `count` pictures of one grid, in proportion to the pictures of each grid."""
        for _ in range(count // 2):
            grid = self.add(draw_picture(random, random.choice(TRAINING_SIZES)))
            self._drawn[grid].popleft()
        sizes = {grid: len(drawn) for grid, drawn in self._drawn.items()}
        grid = random.choices(list(sizes), list(sizes.values()))[0]
        return grid, random.choices(self._drawn[grid], k=count)


def patch_array(pictures: Sequence[PatchedPicture]) -> mx.array:
    """Return one of the two equal frames of each patch: [B, P, 768], from -1 to 1."""
    stacked = mx.array(np.stack([picture.patches for picture in pictures])).astype(mx.float32)
    return stacked.reshape(*stacked.shape[:2], -1) / 127.5 - 1


def class_arrays(pictures: Sequence[PatchedPicture]) -> tuple[mx.array, mx.array]:
    """Return the classes of the pictures: colours [B] and shapes [B]."""
    colours, shapes = zip(*(picture.classes for picture in pictures), strict=True)
    return mx.array(colours), mx.array(shapes)


def _picture_row(
    row: TokenRow, pad_id: int, grid: Grid
) -> tuple[TokenRow, npt.NDArray[np.int32], int]:
    """Return the row with its picture token repeated, M-RoPE positions [3, T], picture start."""
    down, across = grid[0] // MERGE, grid[1] // MERGE
    count, start = down * across, row.tokens.index(pad_id)
    tokens = row.tokens[:start] + [pad_id] * count + row.tokens[start + 1 :]
    weights = row.weights[:start] + [0.0] * count + row.weights[start + 1 :]
    positions = np.tile(np.arange(len(tokens), dtype=np.int32), (3, 1))
    end = start + count
    positions[0, start:end] = start
    positions[1, start:end] = start + np.repeat(np.arange(down), across)
    positions[2, start:end] = start + np.tile(np.arange(across), down)
    positions[:, end:] = start + max(down, across) + np.arange(len(tokens) - end)
    return TokenRow(tokens, weights), positions, start


def picture_batches(
    tokenizer: Tokenizer,
    pool: PicturePool,
    random: Random,
    rows: int,
    draw: Callable[[Random, str, str], Chat] = picture_chat,
) -> Iterator[PictureBatch]:
    """Yield batches of chats about pictures of one grid."""
    pad_id = special_ids(tokenizer)["<|image_pad|>"]
    while True:
        grid, drawn = pool.sample(random, rows)
        count = grid[0] * grid[1] // MERGE**2
        texts, positions, starts = [], [], []
        for picture in drawn:
            chat = draw(random, picture.colour, picture.shape)
            row = encode_chat(tokenizer, chat)
            text, row_positions, start = _picture_row(row, pad_id, grid)
            texts.append(text)
            positions.append(row_positions)
            starts.append(start)
        text_batch = _pad(texts, positions)
        sources = np.full(text_batch.inputs.shape, rows * count, np.int32)
        for index, start in enumerate(starts):
            sources[index, start : start + count] = index * count + np.arange(count)
        patches, (colours, shapes) = patch_array(drawn), class_arrays(drawn)
        yield PictureBatch(text_batch, patches, grid, mx.array(sources), colours, shapes)
