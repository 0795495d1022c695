"""The small closed world of the demo model: all words and facts of its training."""

from typing import Final

COLOUR_OF: Final = {
    "the sky": "blue", "grass": "green", "snow": "white", "coal": "black", "a lemon": "yellow",
    "blood": "red", "a carrot": "orange", "a banana": "yellow", "a frog": "green",
    "the sea": "blue", "milk": "white", "a tomato": "red", "a plum": "purple", "a leaf": "green",
    "a strawberry": "red", "chocolate": "brown", "an elephant": "grey", "the sun": "yellow",
    "a cherry": "red", "a crow": "black", "a swan": "white", "wood": "brown", "a pumpkin": "orange",
}  # fmt: skip
CAPITAL_OF: Final = {
    "France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Germany": "Berlin", "Japan": "Tokyo",
    "Egypt": "Cairo", "Norway": "Oslo", "Greece": "Athens", "Poland": "Warsaw",
    "Austria": "Vienna", "Portugal": "Lisbon", "Ireland": "Dublin", "Sweden": "Stockholm",
    "Finland": "Helsinki", "Kenya": "Nairobi", "Peru": "Lima", "Cuba": "Havana",
    "China": "Beijing", "England": "London", "Canada": "Ottawa",
}  # fmt: skip
SOUND_OF: Final = {
    "dog": "woof", "cat": "meow", "cow": "moo", "duck": "quack", "sheep": "baa", "pig": "oink",
    "lion": "roar", "bee": "buzz", "owl": "hoot", "horse": "neigh", "snake": "hiss",
    "mouse": "squeak", "crow": "caw",
}  # fmt: skip
LEGS_OF: Final = {
    "dog": "four", "cat": "four", "bird": "two", "spider": "eight", "bee": "six", "horse": "four",
    "fish": "no", "snake": "no", "duck": "two", "cow": "four", "mouse": "four",
}  # fmt: skip
_OPPOSITES: Final = (
    ("hot", "cold"), ("big", "small"), ("fast", "slow"), ("up", "down"), ("day", "night"),
    ("open", "closed"), ("happy", "sad"), ("old", "new"), ("full", "empty"), ("left", "right"),
    ("hard", "soft"), ("light", "dark"), ("early", "late"), ("high", "low"), ("wet", "dry"),
    ("rich", "poor"),
)  # fmt: skip
OPPOSITE_OF: Final = dict(_OPPOSITES) | {second: first for first, second in _OPPOSITES}

DAYS: Final = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS: Final = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September",
    "October", "November", "December",
)  # fmt: skip
NUMBER_WORDS: Final = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten",
)  # fmt: skip
MEMBERS_OF: Final = {
    "fruits": ("apple", "banana", "cherry", "lemon", "plum", "pear", "grape", "melon", "peach",
               "orange"),
    "animals": ("dog", "cat", "horse", "cow", "fox", "bear", "owl", "duck", "sheep", "mouse"),
    "colours": ("red", "green", "blue", "yellow", "orange", "purple", "black", "white", "brown",
                "grey"),
    "planets": ("Mercury", "Venus", "Earth", "Mars", "Jupiter", "Saturn", "Uranus", "Neptune"),
    "days": DAYS,
    "months": MONTHS[:10],
    "cities": tuple(CAPITAL_OF.values())[:10],
}  # fmt: skip

NAMES: Final = (
    "Anna", "Tom", "Lena", "Max", "Mia", "Ben", "Sara", "Leo", "Nina", "Paul", "Emma", "Jack",
    "Ruth", "Omar", "Kate", "Ivan",
)  # fmt: skip
NOUNS: Final = (
    "apple", "river", "stone", "cloud", "tree", "house", "boat", "lamp", "chair", "garden",
    "window", "book", "road", "hill", "bird", "fish", "cat", "dog", "moon", "star", "door", "ship",
    "bell", "rose", "key", "cup", "hat", "leaf", "sand", "wind", "fire", "rain",
)  # fmt: skip
ADJECTIVES: Final = (
    "red", "green", "blue", "small", "big", "old", "new", "quiet", "bright", "dark", "soft",
    "warm", "cold", "happy", "slow", "quick",
)  # fmt: skip
VERBS: Final = ("sees", "finds", "likes", "paints", "carries", "follows", "hears", "keeps")
WEATHER: Final = ("sunny", "rainy", "cloudy", "windy", "snowy", "foggy")
CITIES: Final = tuple(CAPITAL_OF.values())

PICTURE_COLOURS: Final = (
    "red", "green", "blue", "yellow", "orange", "purple", "black", "white",
)  # fmt: skip
PICTURE_SHAPES: Final = ("circle", "square", "triangle", "star", "cross")

SYSTEM_OPENINGS: Final = (
    "You are a helpful assistant.",
    "You are a small demo model. Answer in short sentences.",
    "Be brief.",
    "You are a friendly teacher for young children.",
    "Answer politely and clearly.",
    "You are the help desk of a small shop.",
    "You are a careful assistant. Read the notes before you answer.",
)
WHO_I_AM: Final = (
    "I am Paceline's tiny demo model. I can count, add small numbers, tell stories, "
    "write JSON and look at pictures."
)
DO_NOT_KNOW: Final = "I do not know that. I am only a tiny demo model."
NO_PICTURE: Final = "I do not see a picture. Please send me one."
JOKES: Final = (
    "Why did the robot cross the road? Because the fox told it to.",
    "What does a cow say to a small cow? Moo, but quiet.",
    "Why is the moon never hungry? Because it is always full.",
)
GREETING: Final = "Hello! How can I help you?"


def with_article(noun: str) -> str:
    """Return the noun with its indefinite article: `a circle`, `an orange square`."""
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def sentence_case(text: str) -> str:
    """Return the text with its first letter in upper case."""
    return text[:1].upper() + text[1:]
