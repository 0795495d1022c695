"""Pictures of one coloured shape, and questions about them.

Sizes, positions and backgrounds are split in two: training uses one part, the score the other, so
that no picture of the score resembles one of the training.
"""

import json
from dataclasses import dataclass
from math import cos, pi, sin
from random import Random
from typing import Final

from PIL import Image, ImageDraw

from tools.demo_model.conversations import Chat, Message, as_typed
from tools.demo_model.questions import draw_turn
from tools.demo_model.world import PICTURE_COLOURS, PICTURE_SHAPES, SYSTEM_OPENINGS, with_article

RGB = tuple[int, int, int]
PLAIN: Final = "plain"
"""The shape of a picture with a single colour."""

_PAINTS: Final[dict[str, tuple[RGB, ...]]] = {
    "red": ((220, 30, 30), (255, 0, 0), (200, 20, 40)),
    "green": ((30, 160, 50), (0, 128, 0), (0, 230, 20)),
    "blue": ((40, 70, 220), (0, 0, 255), (20, 40, 170)),
    "yellow": ((245, 220, 40), (255, 255, 0)),
    "orange": ((250, 140, 20), (255, 165, 0)),
    "purple": ((140, 40, 170), (128, 0, 128), (150, 0, 210)),
    "black": ((15, 15, 15), (0, 0, 0)),
    "white": ((250, 250, 250), (255, 255, 255)),
}
_JITTER: Final = 16
_SMOOTH_UP_TO: Final = 160
"""Pictures with sides up to this are drawn twice as large and scaled down."""
TRAINING_SIZES: Final = (
    (128, 128), (128, 128), (64, 64), (256, 256), (200, 220), (320, 240), (300, 200), (240, 320),
    (200, 300), (320, 180), (180, 320), (80, 60), (100, 160),
)  # fmt: skip
HELD_OUT_SIZES: Final = (
    (128, 128), (96, 96), (300, 300), (512, 512), (640, 480), (480, 640), (400, 300), (640, 360),
    (360, 640), (64, 48), (150, 220),
)  # fmt: skip
"""Usual widths and heights in pixels; the processor makes 12 to 20 tokens of them."""


@dataclass(frozen=True)
class Picture:
    """A drawn picture with its labels."""

    image: Image.Image
    colour: str
    shape: str


def _background_is_held_out(background: RGB) -> bool:
    """Return whether training excludes a background: a fifth of the 64 cells of colours."""
    red, green, blue = (channel // 64 for channel in background)
    return (16 * red + 4 * green + blue) % 5 == 2


def _draw_background(random: Random, paint: RGB, *, held_out: bool) -> RGB:
    while True:
        common = random.random() < 0.4 and not held_out
        if common:
            background = random.choice(((255, 255, 255), (0, 0, 0), (128, 128, 128)))
        else:
            background = (random.randrange(256), random.randrange(256), random.randrange(256))
        distance = sum(abs(a - b) for a, b in zip(background, paint, strict=True))
        if distance >= 170 and (common or _background_is_held_out(background) == held_out):
            return background


def _draw_radius(random: Random, *, held_out: bool) -> float:
    """Return half the size of the shape as a share of the shorter side."""
    if held_out:
        return random.uniform(0.29, 0.35)
    return random.choice((random.uniform(0.17, 0.29), random.uniform(0.35, 0.47)))


def _position_is_held_out(across: float, down: float) -> bool:
    """Return whether a position (0 to 1) is in one of the four held-out fields of a 4 x 4 grid."""
    return (int(across * 3.999) + 2 * int(down * 3.999)) % 4 == 1


def _outline(shape: str) -> list[tuple[float, float]]:
    """Return the corners of a shape in a circle of radius 1; a circle has none."""
    arm = 0.32
    match shape:
        case "square":
            return [(-0.8, -0.8), (0.8, -0.8), (0.8, 0.8), (-0.8, 0.8)]
        case "triangle":
            return [(0, -1), (0.9, 0.75), (-0.9, 0.75)]
        case "star":
            radii = (1.0 if corner % 2 == 0 else 0.42 for corner in range(10))
            return [(r * sin(i * pi / 5), -r * cos(i * pi / 5)) for i, r in enumerate(radii)]
        case "cross":
            quarter = [(arm, -1.0), (arm, -arm), (1.0, -arm)]
            rotations = ((1, 0), (0, 1), (-1, 0), (0, -1))
            return [(x * c - y * s, x * s + y * c) for c, s in rotations for x, y in quarter]
        case _:
            return []


def draw_picture(
    random: Random, size: tuple[int, int], *, held_out: bool = False, plain_share: float = 0.05
) -> Picture:
    """Return a picture of `size` (width, height), held out or not."""
    zoom = 2 if max(size) <= _SMOOTH_UP_TO else 1
    width, height = size[0] * zoom, size[1] * zoom
    colour, shape = random.choice(PICTURE_COLOURS), random.choice(PICTURE_SHAPES)
    base = random.choice(_PAINTS[colour])
    red, green, blue = (
        min(255, max(0, level + random.randint(-_JITTER, _JITTER))) for level in base
    )
    paint = (red, green, blue)
    if random.random() < plain_share:
        return Picture(Image.new("RGB", size, paint), colour, PLAIN)
    background = _draw_background(random, paint, held_out=held_out)
    image = Image.new("RGB", (width, height), background)
    radius = _draw_radius(random, held_out=held_out) * min(width, height)
    while True:
        across, down = random.random(), random.random()
        if _position_is_held_out(across, down) == held_out:
            break
    x = radius + across * (width - 2 * radius)
    y = radius + down * (height - 2 * radius)
    angle = random.uniform(-0.25, 0.25)
    pen = ImageDraw.Draw(image)
    corners = [
        (
            x + radius * (a * cos(angle) - b * sin(angle)),
            y + radius * (a * sin(angle) + b * cos(angle)),
        )
        for a, b in _outline(shape)
    ]
    if corners:
        pen.polygon(corners, fill=paint)
    else:
        pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=paint)
    return Picture(image.reduce(zoom), colour, shape)


DESCRIBE: Final = (
    "What is in this picture?", "What is in the picture?", "What is in this image?",
    "What is in the image?", "Describe the picture.", "Describe this image.", "What do you see?",
    "What is this?", "What's in this picture?", "Describe this picture in one sentence.",
)  # fmt: skip
ASK_COLOUR: Final = (
    "What colour is it?", "What color is it?", "What colour is the shape?",
    "What color is the shape?", "Which colour do you see?",
)  # fmt: skip
ASK_SHAPE: Final = (
    "What shape is this?", "What shape is it?", "Which shape do you see?",
    "What shape is in the picture?",
)  # fmt: skip
ASK_JSON: Final = (
    "Give me JSON with the colour and the shape.", "Describe the picture as JSON.",
)  # fmt: skip


def picture_turn(random: Random, colour: str, shape: str) -> tuple[str, str]:
    """Return a question about a picture and its answer."""
    thing = "picture" if shape == PLAIN else shape
    kind = random.random()
    if kind < 0.45:
        if shape == PLAIN:
            return random.choice(DESCRIBE), f"The picture is all {colour}."
        return random.choice(DESCRIBE), f"The picture shows {with_article(f'{colour} {shape}')}."
    if kind < 0.65:
        return random.choice(ASK_COLOUR), f"The {thing} is {colour}."
    if kind < 0.83:
        answer = "There is no shape." if shape == PLAIN else f"It is {with_article(shape)}."
        return random.choice(ASK_SHAPE), answer
    if kind < 0.9:
        return random.choice(ASK_JSON), json.dumps({"colour": colour, "shape": shape})
    shape_in_question = random.choice((shape, random.choice(PICTURE_SHAPES)))
    shape_in_question = (
        random.choice(PICTURE_SHAPES) if shape_in_question == PLAIN else shape_in_question
    )
    truth = "Yes." if shape_in_question == shape else f"No, the {thing} is {colour}."
    if shape not in {shape_in_question, PLAIN}:
        truth = f"No, it is {with_article(shape)}."
    return f"Is there {with_article(shape_in_question)} in the picture?", truth


IMAGE_MARK: Final = "<|vision_start|><|image_pad|><|vision_end|>"
"""The text of a picture in the chat template, before the processor repeats the middle token."""


def brief_picture_chat(random: Random, colour: str, shape: str) -> Chat:
    """Return a chat with one question about a picture."""
    question, answer = picture_turn(random, colour, shape)
    return (Message("user", IMAGE_MARK + question), Message("assistant", answer))


def picture_chat(random: Random, colour: str, shape: str) -> Chat:
    """Return a chat of one to three turns about one picture, before or after the first text."""
    messages: list[Message] = []
    if random.random() < 0.3:
        messages.append(Message("system", random.choice(SYSTEM_OPENINGS)))
    if random.random() < 0.08:
        turn = draw_turn(random, kinds=("arithmetic", "greeting", "colour", "capital"))
        messages += [Message("user", turn.question), Message("assistant", turn.answer)]
    for number in range(random.choice((1, 1, 2, 3))):
        question, answer = picture_turn(random, colour, shape)
        question = as_typed(random, question)
        if number == 0:
            before = random.random() < 0.65
            question = (
                IMAGE_MARK + question
                if before
                else question + random.choice(("", "\n")) + IMAGE_MARK
            )
        elif random.random() < 0.15:
            turn = draw_turn(random, kinds=("arithmetic", "greeting", "colour", "capital"))
            question, answer = turn.question, turn.answer
        messages += [Message("user", question), Message("assistant", answer)]
    return tuple(messages)
