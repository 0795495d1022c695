"""Long answers: stories, diaries, letters, recipes and descriptions, each with a natural end.

Every text is drawn from templates with random slots, so that one question has many good answers:
a sampled answer differs from seed to seed, and a drafter can guess most tokens but not all.
"""

from random import Random
from typing import Final

from tools.demo_model.world import ADJECTIVES, NAMES, NOUNS, WEATHER, sentence_case, with_article

HEROES: Final = {
    "fox": ("Rusty", "Amber", "Finn"),
    "cat": ("Misty", "Felix", "Luna"),
    "dog": ("Bruno", "Daisy", "Rex"),
    "robot": ("Beep", "Bolt", "Pixel"),
    "dragon": ("Ember", "Spark", "Ash"),
    "owl": ("Hoot", "Olive", "Sage"),
    "bear": ("Honey", "Bruno", "Maple"),
    "frog": ("Hop", "Lily", "Moss"),
    "girl": ("Anna", "Mia", "Emma"),
    "boy": ("Tom", "Ben", "Leo"),
    "mouse": ("Pip", "Nibble", "Dot"),
    "bird": ("Sky", "Robin", "Pip"),
}
PLACES: Final = (
    "in a quiet forest", "near an old town", "by the wide sea", "on a high mountain",
    "in a deep valley", "beside a small river", "in a bright city", "behind a green hill",
)  # fmt: skip
TREASURES: Final = (
    "golden key", "silver bell", "blue lamp", "old map", "red ball", "little boat", "warm hat",
    "magic book",
)  # fmt: skip
FRIENDS: Final = (
    "shy snail", "grey mouse", "young squirrel", "lonely sheep", "busy bee", "sleepy turtle",
    "brave duck", "kind child",
)  # fmt: skip
_EPISODES: Final = (
    "One {weather} morning {name} walked along the road and heard a strange sound. It came from "
    "{a_noun}. {name} looked closer and found nothing but the wind.",
    "Then it began to rain, and the path was soon full of water. {name} waited under {a_noun} "
    "until the sun came back. The air was clean and the world was quiet.",
    "Later {name} came to a deep river. There was no bridge, so {name} built one from wood and "
    "stone. It took the whole day, but it held.",
    "On the other side stood {a_noun}. Nobody had seen it for a hundred years. {name} touched it "
    "with care and made a wish.",
    "In the evening {name} was tired and hungry. An old {adjective} tree gave {name} some fruit, "
    "and the stars came out one by one.",
    "The {friend} asked many questions on the way. {name} answered every one of them, and they "
    "laughed together.",
    "Suddenly the {treasure} was gone. {name} looked under every leaf and behind every stone. At "
    "last the {friend} found it in the grass.",
    "They came to a village where everybody was sad. {name} told a funny story, and soon the whole "
    "village was dancing.",
    "At night the moon was big and {adjective}. {name} could not sleep, so the {friend} sang a "
    "soft song.",
    "A {weather} day followed. {name} and the {friend} shared their last bread and walked on "
    "without fear.",
)
_ENDINGS: Final = (
    "From that day on, {name} and the {friend} were best friends. The end.",
    "{name} gave the {treasure} to the {friend} and went home happy. The end.",
    "And if you listen on a quiet night, you can still hear {name} and the {friend} laughing. "
    "The end.",
    "So {name} learned that a good friend is better than any {treasure}. The end.",
)
_OPENINGS: Final = (
    "Once upon a time there was {hero} named {name}. {name} lived {place} and dreamed of a "
    "{treasure}.",
    "Long ago, {hero} named {name} lived {place}. Every day {name} thought about a {treasure}.",
    "There once was {hero} called {name}, who lived {place} and loved the {weather} days.",
)
_MEETINGS: Final = (
    'One day {name} found a {treasure}. "What a beautiful {treasure}!" said {name}. Then a '
    "{friend} came by and asked for help.",
    'On a {weather} day a {friend} knocked at the door. "Please help me," said the {friend}. '
    '"I have lost my {treasure}."',
    'One night {name} met a {friend} who carried a {treasure}. "Come with me," said the '
    "{friend}, and {name} was glad to go.",
)

STORY_EPISODES: Final = {"short": (0, 1), "plain": (3, 5), "long": (8, 10)}


def story(random: Random, hero: str, length: str) -> str:
    """Return a story about `hero` in paragraphs; `length` is a key of STORY_EPISODES."""
    slots = {
        "hero": with_article(hero),
        "name": random.choice(HEROES[hero]),
        "place": random.choice(PLACES),
        "treasure": random.choice(TREASURES),
        "friend": random.choice(FRIENDS),
    }

    def write(template: str) -> str:
        changing = {
            "weather": random.choice(WEATHER),
            "adjective": random.choice(ADJECTIVES),
            "a_noun": with_article(f"{random.choice(ADJECTIVES)} {random.choice(NOUNS)}"),
        }
        return template.format(**slots, **changing)

    episodes = random.sample(_EPISODES, random.randint(*STORY_EPISODES[length]))
    parts = [random.choice(_OPENINGS), random.choice(_MEETINGS), *episodes, random.choice(_ENDINGS)]
    return "\n\n".join(write(part) for part in parts)


TOPICS: Final = {
    "the sea": ("water", "wide and deep", "fish and whales", "salty"),
    "the forest": ("trees", "quiet and green", "foxes and owls", "fresh"),
    "the city": ("houses", "busy and loud", "people and cars", "bright"),
    "the desert": ("sand", "hot and dry", "snakes and camels", "empty"),
    "the moon": ("grey dust", "cold and silent", "no animals at all", "far away"),
    "the garden": ("flowers", "small and pretty", "bees and birds", "sweet"),
    "winter": ("snow", "cold and white", "owls and wolves", "calm"),
    "summer": ("sunshine", "warm and bright", "bees and birds", "long"),
}
_REMARKS: Final = (
    "Many people say that {topic} feels {feel}.",
    "If you look closely, you can find {life}.",
    "In the morning {topic} is {look}, and in the evening it is quiet.",
    "Children like to draw {topic} with {colour} pencils.",
    "My favourite memory is a {weather} day when I saw {a_noun}.",
    "You should bring {a_noun} when you go there.",
    "Some say that nobody knows {topic} really well.",
    "I like to think about {topic} when the day is over.",
)


def description(random: Random, topic: str, *, long: bool) -> str:
    """Return a description of `topic`: one paragraph, or four when `long`."""
    stuff, look, life, feel = TOPICS[topic]

    def write(template: str) -> str:
        return template.format(
            topic=topic, look=look, life=life, feel=feel, weather=random.choice(WEATHER),
            colour=random.choice(("red", "green", "blue", "yellow")),
            a_noun=with_article(f"{random.choice(ADJECTIVES)} {random.choice(NOUNS)}"),
        )  # fmt: skip

    first = f"{sentence_case(topic)} is full of {stuff}. It is {look}."
    if not long:
        return " ".join([first, *map(write, random.sample(_REMARKS, 3))])
    remarks = [write(remark) for remark in random.sample(_REMARKS, 8)]
    paragraphs = [" ".join(remarks[start : start + 3]) for start in (0, 3)]
    last = f"{' '.join(remarks[6:])} That is what I know about {topic}."
    return "\n\n".join([first, *paragraphs, last])


def poem(random: Random, topic: str) -> str:
    """Two verses of four lines about `topic`."""
    stuff, look, life, feel = TOPICS[topic]
    first, second = random.sample(ADJECTIVES, 2)
    return (
        f"I dream of {topic} at night,\nso {look}, so {first} and bright.\n"
        f"The {random.choice(NOUNS)} is waiting there for me,\n"
        f"as happy as a {random.choice(NOUNS)} can be."
        f"\n\nThe {stuff} and the {life},\nthe {second} wind that never dies,\n"
        f"it all feels {feel} and old,\nthe best of stories ever told."
    )


def diary(random: Random, days: tuple[str, ...]) -> str:
    """Return a diary with one line for each day."""
    lines = (
        f"{day}: It was {random.choice(WEATHER)}. I met {random.choice(NAMES)} and we "
        f"{random.choice(('painted', 'carried', 'found', 'looked for', 'cleaned'))} "
        f"{with_article(random.choice(ADJECTIVES) + ' ' + random.choice(NOUNS))}. "
        f"{random.choice(('I was happy.', 'I was tired.', 'It was fun.', 'It was a good day.'))}"
        for day in days
    )
    return "\n".join(lines)


def letter(random: Random, name: str) -> str:
    """Return a friendly letter to `name`."""
    gift = f"{random.choice(ADJECTIVES)} {random.choice(NOUNS)}"
    return (
        f"Dear {name},\n\nThank you for the {gift}. It was a {random.choice(WEATHER)} day when it "
        f"came, and I put it next to the {random.choice(NOUNS)}. Every morning I look at the "
        f"{gift} and think of you.\n\nPlease visit me in {random.choice(('spring', 'summer'))}. We "
        f"can sit by the {random.choice(NOUNS)} and talk about the old days.\n\n"
        "Your friend,\nThe demo model"
    )


DISHES: Final = {
    "pancakes": ("flour", "milk", "eggs"),
    "soup": ("water", "carrots", "salt"),
    "apple cake": ("apples", "flour", "sugar"),
    "bread": ("flour", "water", "salt"),
    "fruit salad": ("apples", "grapes", "lemons"),
}


def recipe(random: Random, dish: str) -> str:
    """Numbered steps to make `dish`."""
    first, second, third = DISHES[dish]
    steps = (
        f"Take {random.randint(2, 9)} cups of {first}.",
        f"Add {random.randint(2, 9)} spoons of {second} and mix well.",
        f"Add some {third}.",
        f"Wait for {random.randint(2, 9)} minutes.",
        f"Put it in a {random.choice(('warm', 'big', 'small'))} pan for "
        f"{random.randint(10, 40)} minutes.",
        f"Serve the {dish} with {random.choice(('milk', 'tea', 'a smile'))}.",
    )
    return "\n".join(f"{number}. {step}" for number, step in enumerate(steps, start=1))
